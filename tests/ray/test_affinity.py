"""What a client has begun on a replica goes on there, over every interface, whoever comes in between."""

from collections import Counter

import anthropic
import httpx
import openai
import pytest
from websockets.sync.client import connect

from roost.ray.replica import REPLICA_HEADER
from tests.ray.cluster import Cluster, events_of, respond, wait_until

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}


@pytest.fixture
def client(cluster: Cluster) -> openai.OpenAI:
    """OpenAI's own client."""
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)


def test_sessions_are_spread_stay_and_are_forked_where_they_are(cluster: Cluster) -> None:
    homes = dict(cluster.open({"id": f"walk-{number}"} if number % 2 else {}) for number in range(16))
    assert set(Counter(homes.values())) == set(cluster.replicas)
    for session, home in homes.items():
        lengths = []
        for _ in range(2):
            answer = cluster.turn(session)
            assert (answer.status_code, answer.headers[REPLICA_HEADER]) == (200, home), answer.text
            lengths.append(answer.json()["session"]["length"])
        assert lengths[0] < lengths[1]
        fork = cluster.post(f"/v1/sessions/{session}/fork", {})
        assert (fork.status_code, fork.headers[REPLICA_HEADER]) == (201, home), fork.text
        seen = cluster.http.get(f"/v1/sessions/{fork.json()['id']}")
        assert (seen.json()["length"], seen.headers[REPLICA_HEADER]) == (lengths[1], home)
    listed = {each["id"]: each["replica"] for each in cluster.http.get("/v1/sessions").json()["data"]}
    assert homes.items() <= listed.items()
    again = cluster.post("/v1/sessions", {"id": "walk-1"})
    assert again.status_code == 409  # on whichever replica it is
    for session in listed:
        assert cluster.http.delete(f"/v1/sessions/{session}").status_code == 200


def test_responses_and_conversations_go_on_where_they_are(client: openai.OpenAI) -> None:
    for _ in range(4):
        first = client.responses.create(model="default", input="Hello", max_output_tokens=4)
        second = client.responses.create(
            model="default", input="and?", max_output_tokens=4, previous_response_id=first.id
        )
        assert client.responses.retrieve(second.id).previous_response_id == first.id
        conversation = client.conversations.create()
        client.responses.create(model="default", input="Hi", max_output_tokens=4, conversation=conversation.id)
        assert len(client.conversations.items.list(conversation.id).data) == 2
    late = client.responses.create(model="default", input="Hello", max_output_tokens=4, background=True)
    wait_until(lambda: client.responses.retrieve(late.id).status not in ("queued", "in_progress"))


def test_a_label_leads_to_its_replica(cluster: Cluster) -> None:
    for number in range(6):
        body = {**CHAT, "prompt_cache_key": f"agent-{number}"}
        homes = {cluster.post("/v1/chat/completions", body).headers[REPLICA_HEADER] for _ in range(3)}
        assert len(homes) == 1


def test_official_clients_stream_through_rays_proxy(cluster: Cluster, client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(model="default", temperature=0, **CHAT)  # type: ignore[call-overload]
    pieces = client.chat.completions.create(  # type: ignore[call-overload]
        model="default", temperature=0, stream=True, **CHAT
    )
    streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
    assert streamed == whole.choices[0].message.content
    claude = anthropic.Anthropic(base_url=cluster.url, api_key="none", max_retries=0)
    with claude.messages.stream(model="default", max_tokens=4, messages=CHAT["messages"]) as stream:  # type: ignore[arg-type]
        assert stream.get_final_message().usage.output_tokens == 4


def test_sglangs_sessions_and_commands_to_all(cluster: Cluster) -> None:
    opened = [cluster.post("/open_session", {"capacity_of_str_len": 100}).json() for _ in range(4)]
    for session in opened:
        body = {"text": "abc", "session_params": {"id": session}, "sampling_params": {"max_new_tokens": 2}}
        assert cluster.post("/generate", body).status_code == 200
        assert cluster.post("/close_session", {"session_id": session}).status_code == 200
    assert cluster.post("/flush_cache", {}).status_code == 200
    assert cluster.post("/abort_request", {"abort_all": True}).status_code == 200
    samples = cluster.http.get("/metrics").text
    assert all(f'replica="{each}"' in samples for each in cluster.replicas)
    assert cluster.http.get("/ready").status_code == 200
    assert cluster.http.get("/live").status_code == 200


def test_refusals_come_as_they_are(cluster: Cluster, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="max_tokens"):
        client.chat.completions.create(model="default", messages=CHAT["messages"], max_tokens=-1)  # type: ignore[arg-type]
    assert cluster.http.get("/v1/sessions/nowhere").status_code == 404
    assert cluster.http.post(
        "/v1/chat/completions", content=b"{", headers={"content-type": "application/json"}
    ).is_error
    unknown = cluster.http.get("/health_generate", headers={REPLICA_HEADER: "nobody"})
    assert (unknown.status_code, REPLICA_HEADER in unknown.text) == (404, True)


def test_a_client_that_leaves_ends_its_request(cluster: Cluster) -> None:
    endless = {**CHAT, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{cluster.url}/v1/chat/completions", json=endless) as answer:
        home = answer.headers[REPLICA_HEADER]
        lines = answer.iter_lines()  # which must not be dropped: that would end the stream
        next(lines)
        wait_until(lambda: cluster.stats(home)["running"] == 1)
    wait_until(lambda: cluster.stats(home)["running"] == 0)


def test_a_websocket_stays_and_reaches_what_another_replica_holds(cluster: Cluster, client: openai.OpenAI) -> None:
    elsewhere = [client.responses.create(model="default", input="Hi", max_output_tokens=4).id for _ in range(4)]
    with connect(f"{cluster.url.replace('http', 'ws')}/v1/responses") as socket:
        followed = None
        for _ in range(3):  # kept by the connection alone
            event = respond(socket, input="Hi", store=False, previous_response_id=followed)
            assert event["type"] == "response.incomplete", event
            followed = event["response"]["id"]
        for id in elsewhere:
            assert respond(socket, input="and?", previous_response_id=id)["type"] == "response.incomplete"
        assert respond(socket, input="Hi", previous_response_id="resp_nobody")["type"] == "error"
    answer = cluster.post("/v1/chat/completions", {**CHAT, "stream": True})
    assert events_of(answer)
