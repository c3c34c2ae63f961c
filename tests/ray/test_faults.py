"""Parts of a deployment die or drain: what ran there ends with an error, and everything else goes on."""

import threading

import httpx
import pytest

from roost.ray.ingress import REPLICA_HEADER
from tests.ray.cluster import Cluster, events_of, wait_until

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
    cluster.deploy(num_replicas=1)
    for thread in threads:
        thread.join()
    assert {home: answer.status_code for home, answer in answers.items()} == dict.fromkeys(before, 200)
    (left,) = cluster.replicas
    assert left in before
    for session, home in homes.items():
        answer = cluster.turn(session)
        assert (answer.status_code, answer.headers[REPLICA_HEADER]) == (200, left), (home, answer.text)
    assert {cluster.open()[1] for _ in range(4)} == {left}
    cluster.deploy(num_replicas=2)
