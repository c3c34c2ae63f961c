"""Parts of a deployment die or drain: what ran there ends with an error, and everything else goes on."""

import threading
from contextlib import ExitStack

import httpx
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

from roost.ray.replica import REPLICA_HEADER
from roost.ray.socket_bridge import RESTARTED
from tests.ray.cluster import PATIENCE_S, Cluster, events_of, respond, wait_until

ENDLESS = {"max_tokens": 4000, "ignore_eos": True}
LONG = {"max_tokens": 400, "ignore_eos": True}


def test_an_ingress_that_was_restarted_finds_every_session(cluster: Cluster) -> None:
    homes = dict(cluster.open() for _ in range(6))
    cluster.kill_ingress()
    for session, home in homes.items():
        answer = cluster.turn(session)
        assert (answer.status_code, answer.headers[REPLICA_HEADER]) == (200, home)


def test_a_replica_that_dies_loses_what_runs_and_another_takes_its_place(cluster: Cluster) -> None:
    before = set(cluster.replicas)
    homes = dict(cluster.open() for _ in range(6))
    victim = next(iter(homes.values()))
    for session in homes:
        assert cluster.turn(session, ignore_eos=True).status_code == 200
    waiting, streaming = [session for session, home in homes.items() if home == victim][:2]
    answers: dict[str, httpx.Response] = {}

    def ask(session: str, **fields: object) -> None:
        answers[session] = httpx.post(
            f"{cluster.url}/v1/sessions/{session}/generate", json={"text": "x", **ENDLESS, **fields}, timeout=60
        )

    threads = [threading.Thread(target=ask, args=(waiting,)), threading.Thread(target=ask, args=(streaming,))]
    threads[1] = threading.Thread(target=ask, args=(streaming,), kwargs={"stream": True})
    for thread in threads:
        thread.start()
    wait_until(lambda: cluster.stats(victim)["running"] == 2)
    cluster.kill_replica(victim)
    for thread in threads:
        thread.join()
    assert answers[waiting].status_code == 503
    assert "has ended" in answers[waiting].json()["error"]["message"]
    *_, last = events_of(answers[streaming])
    assert last["error"]["code"] == 503
    lengths = set()
    for session, home in homes.items():
        answer = cluster.turn(session, ignore_eos=True)
        assert answer.status_code == 200, answer.text
        assert (answer.headers[REPLICA_HEADER] == home) == (home != victim)
        lengths.add(answer.json()["session"]["length"])
    assert len(lengths) == 1  # what ran on it was never committed
    wait_until(lambda: len(cluster.replicas) == 2)
    assert len(before & set(cluster.replicas)) == 1
    assert cluster.http.get("/health").status_code == 200


@pytest.mark.full
def test_without_a_journal_sessions_end_with_their_replica_which_is_said(cluster: Cluster) -> None:
    cluster.deploy(2, has_journal=False)
    homes = dict(cluster.open({"id": f"lost-{number}"}) for number in range(8))
    victim = homes["lost-0"]
    cluster.kill_replica(victim)
    for session, home in homes.items():
        assert cluster.turn(session).status_code == (404 if home == victim else 200)
    assert "--journal" in cluster.turn("lost-0").json()["error"]["message"]
    assert cluster.post("/v1/sessions", {"id": "lost-0"}).status_code == 201
    assert cluster.turn("lost-0").status_code == 200
    cluster.deploy(2)


@pytest.mark.full
def test_a_replica_that_drains_finishes_what_runs_and_takes_nothing_new(cluster: Cluster) -> None:
    before = set(cluster.replicas)
    homes = dict(cluster.open() for _ in range(6))
    running = {home: session for session, home in homes.items()}
    answers: dict[str, httpx.Response] = {}

    def ask(home: str, session: str) -> None:
        answers[home] = httpx.post(
            f"{cluster.url}/v1/sessions/{session}/generate", json={"text": "x", **LONG}, timeout=60
        )

    threads = [threading.Thread(target=ask, args=pair) for pair in running.items()]
    for thread in threads:
        thread.start()
    wait_until(lambda: all(cluster.stats(each)["running"] for each in before))
    cluster.deploy(1)
    for thread in threads:
        thread.join()
    assert {home: answer.status_code for home, answer in answers.items()} == dict.fromkeys(before, 200)
    (left,) = cluster.replicas
    assert left in before
    for session, home in homes.items():
        answer = cluster.turn(session)
        assert (answer.status_code, answer.headers[REPLICA_HEADER]) == (200, left), (home, answer.text)
    assert {cluster.open()[1] for _ in range(4)} == {left}
    cluster.deploy(2)


@pytest.mark.full
def test_a_socket_of_a_replica_that_drains_is_closed_and_others_stay(cluster: Cluster) -> None:
    url = f"{cluster.url.replace('http', 'ws')}/v1/responses"
    sockets = [connect(url) for _ in range(4)]
    homes = [socket.response.headers[REPLICA_HEADER] for socket in sockets if socket.response is not None]
    assert set(homes) == set(cluster.replicas)
    cluster.deploy(1)
    for socket, home in zip(sockets, homes, strict=True):
        if home in cluster.replicas:
            assert respond(socket, input="Hi")["type"] == "response.incomplete"
            socket.close()
        else:
            with pytest.raises(ConnectionClosed) as closed:
                socket.recv(timeout=PATIENCE_S)
            assert closed.value.rcvd is not None
            assert closed.value.rcvd.code == RESTARTED
    cluster.deploy(2)


@pytest.mark.full
def test_replicas_come_and_go_with_the_load(cluster: Cluster) -> None:
    quick = {"upscale_delay_s": 0.5, "downscale_delay_s": 1, "metrics_interval_s": 0.2, "look_back_period_s": 0.5}
    cluster.deploy(1, autoscaling_config={"min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 1, **quick})
    endless = {"text": "x", "sampling_params": {"max_new_tokens": 8000, "ignore_eos": True}, "stream": True}
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(httpx.stream("POST", f"{cluster.url}/generate", json=endless, timeout=PATIENCE_S))
        wait_until(lambda: len(cluster.replicas) == 2)
    wait_until(lambda: len(cluster.replicas) == 1)
    cluster.deploy(2)
