"""Several keys on one server: each has sessions, request names, a prefix cache and limits of its own."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from roost.server.keys import SESSION_TTL_S
from tests.server.test_ends import in_background
from tests.support.server_process import PATIENCE_S, Server, Stream, wait_until
from tests.support.tiny_folder import ENDLESS

KEYS = {"alice": "sk-alice-1", "bob": "sk-bob-1", "carol": "sk-carol-1"}
FILE = f"""
[alice]
keys = ["sk-alice-0", "{KEYS["alice"]}"]
admin = true

[bob]
keys = ["{KEYS["bob"]}"]

[carol]
keys = ["{KEYS["carol"]}"]
running = 1
queued = 2
sessions = 2
priority = [-1, 3]
"""
SHORT = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}
PROMPT = "what alice says is hers, and nobody else's, whatever they ask for"


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """A server for three clients."""
    folder = tmp_path_factory.mktemp("shared")
    path = folder / "keys.toml"
    path.write_text(FILE)
    path.chmod(0o644)
    flags = ("--api-keys", str(path), "--model", str(tiny_model), "--threads", "1", "--max-sessions", "12")
    started = Server(folder, *flags, "--pool-tokens", "16384", "--page-size", "4")
    started.http.headers["authorization"] = f"Bearer {KEYS['alice']}"
    try:
        yield started
        started.check_rest()
        assert not any(key in started.log for key in KEYS.values())
        assert "can be read by other users" in started.log and "keys: alice (admin), bob, carol" in started.log
        assert started.stop() == 0
    finally:
        started.kill()


@pytest.fixture
def http(shared: Server) -> Iterator[dict[str, httpx.Client]]:
    """What each client sends with; nothing is left of it in the end."""
    clients = {
        name: httpx.Client(base_url=shared.url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {key}"})
        for name, key in KEYS.items()
    }
    yield clients
    for client in clients.values():
        for each in client.get("/v1/sessions").json()["data"]:
            assert client.delete(f"/v1/sessions/{each['id']}").status_code == 200
        client.close()
    shared.check_rest()


def endless(shared: Server, client: httpx.Client, rid: str) -> Stream:
    """A request that runs until it is ended."""
    body = {"text": "a", "rid": rid, "sampling_params": ENDLESS, "stream": True}
    return Stream(shared, "/generate", body, client.headers)


def text(answer: httpx.Response) -> Any:
    """The answer, which must be one."""
    assert answer.status_code in (200, 201), answer.text
    return answer.json()


def test_sessions_of_two_keys_may_have_one_name_and_neither_sees_the_others(http: dict[str, httpx.Client]) -> None:
    alice, bob, carol = http["alice"], http["bob"], http["carol"]
    for client, words in ((alice, "hello"), (bob, "he")):
        text(client.post("/v1/sessions", json={"id": "chat"}))
        body = {"text": words, "max_tokens": 2, "ignore_eos": True}
        text(client.post("/v1/sessions/chat/generate", json=body))
    assert alice.post("/v1/sessions", json={"id": "chat"}).status_code == 409
    lengths = [text(client.get("/v1/sessions/chat"))["length"] for client in (alice, bob)]
    assert lengths[0] != lengths[1]
    assert [each["id"] for each in text(bob.get("/v1/sessions"))["data"]] == ["chat"]
    assert text(carol.get("/v1/sessions"))["data"] == []
    foreign = [
        carol.get("/v1/sessions/chat"),
        carol.delete("/v1/sessions/chat"),
        carol.post("/v1/sessions/chat/rewind", json={"turn": 0}),
        carol.post("/v1/sessions/chat/fork", json={}),
        carol.post("/v1/sessions/chat/append", json={"text": "a"}),
        carol.post("/v1/sessions/chat/generate", json={"text": "a", "max_tokens": 1}),
        carol.post("/v1/completions", json={"prompt": "a", "max_tokens": 1, "session_id": "chat"}),
        carol.post("/generate", json={"text": "a", "session_params": {"id": "chat"}}),
        carol.post("/close_session", json={"session_id": "chat"}),
    ]
    for answer in foreign:
        assert answer.status_code == 404 and "alice" not in answer.text, answer.text
    text(bob.delete("/v1/sessions/chat"))
    assert text(alice.post("/v1/sessions/chat/rewind", json={"turn": 0}))["length"] == 0
    text(alice.post("/v1/sessions/chat/fork", json={"id": "copy"}))
    assert {each["id"] for each in text(alice.get("/v1/sessions"))["data"]} == {"chat", "copy"}


def test_sessions_that_do_not_stream_are_their_own_keys_too(http: dict[str, httpx.Client]) -> None:
    bodies = {"text": "hello", "rid": "first", "session_params": {"id": "native"}, "sampling_params": SHORT}
    for name in ("alice", "bob"):
        text(http[name].post("/open_session", json={"capacity_of_str_len": 1, "session_id": "native"}))
    text(http["alice"].post("/generate", json=bodies))
    goes_on = {"text": "!", "session_params": {"id": "native", "rid": "first"}, "sampling_params": SHORT}
    assert http["bob"].post("/generate", json=goes_on).status_code == 400, "no such request has ended in its session"
    assert http["carol"].post("/generate", json=goes_on).status_code == 404
    text(http["alice"].post("/generate", json=goes_on))


def test_request_names_are_a_keys_own_and_so_is_what_it_aborts(shared: Server, http: dict[str, httpx.Client]) -> None:
    streams = {name: endless(shared, http[name], "mine") for name in http}  # one name, three requests
    for stream in streams.values():
        assert stream.next()["meta_info"]["finish_reason"] is None
    assert http["bob"].post("/generate", json={"text": "a", "rid": "mine"}).status_code == 409
    text(http["bob"].post("/abort_request", json={"rid": "mine"}))
    assert streams.pop("bob").rest()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    text(http["carol"].post("/abort_request", json={"abort_all": True}))
    assert streams.pop("carol").rest()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert shared.stats()["running"] == 1, "the others' aborts were not hers"
    streams["bob"] = endless(shared, http["bob"], "again")
    text(http["alice"].post("/abort_request", json={"abort_all": True}))
    for stream in streams.values():
        assert stream.rest()[-1]["meta_info"]["finish_reason"]["type"] == "abort", "an admin's is everybody's"
        stream.close()


def test_what_one_key_has_said_is_not_found_in_the_cache_by_another(http: dict[str, httpx.Client]) -> None:
    def cached(name: str, **more: Any) -> int:
        body = {"text": PROMPT, "sampling_params": SHORT, **more}
        return int(text(http[name].post("/generate", json=body))["meta_info"]["cached_tokens"])

    assert cached("alice") == 0
    assert cached("alice") > 0
    assert [cached("bob"), cached("carol", cache_salt="alice"), cached("alice", cache_salt="bob")] == [0, 0, 0]
    old = {"authorization": "Bearer sk-alice-0"}  # a key that is about to be replaced is hers as well
    body = {"text": PROMPT, "sampling_params": SHORT}
    answer = httpx.post(f"{http['alice'].base_url}/generate", json=body, headers=old, timeout=PATIENCE_S)
    assert text(answer)["meta_info"]["cached_tokens"] > 0


def test_what_concerns_everybody_is_an_admins(http: dict[str, httpx.Client]) -> None:
    for name in ("bob", "carol"):
        for answer in (http[name].post("/flush_cache"), http[name].get("/metrics")):
            assert answer.status_code == 403 and answer.json()["error"]["param"] == "authorization"
        assert "stats" not in text(http[name].get("/server_info"))
    assert text(http["alice"].get("/server_info"))["stats"]["running"] == 0
    assert http["alice"].get("/metrics").status_code == 200
    text(http["alice"].post("/flush_cache"))


def test_a_priority_outside_of_a_keys_range_is_refused_by_name(http: dict[str, httpx.Client]) -> None:
    def asked(name: str, priority: int) -> httpx.Response:
        return http[name].post("/generate", json={"text": "a", "priority": priority, "sampling_params": SHORT})

    for name, priority in (("alice", 100), ("bob", 0), ("bob", -100), ("carol", 3), ("carol", -1)):
        text(asked(name, priority))
    for name, priority, allowed in (("bob", 1, "at most 0"), ("carol", 4, "at most 3"), ("carol", -2, "at least -1")):
        answer = asked(name, priority)
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "priority")
        assert allowed in answer.text


def test_one_key_cannot_take_all_sessions_and_none_of_a_keys_lives_for_ever(http: dict[str, httpx.Client]) -> None:
    def open_many(name: str) -> list[int]:
        return [http[name].post("/v1/sessions", json={}).status_code for _ in range(6)]

    assert open_many("bob") == [201] * 4 + [429] * 2, "a third of --max-sessions 12"
    assert open_many("carol") == [201] * 2 + [429] * 4
    assert open_many("alice") == [201] * 4 + [429] * 2
    states = [each for client in http.values() for each in text(client.get("/v1/sessions"))["data"]]
    assert len(states) == 10 and {each["limits"]["ttl_s"] for each in states} == {SESSION_TTL_S}
    brief = {"capacity_of_str_len": 1, "session_id": "native"}
    text(http["bob"].delete(f"/v1/sessions/{text(http['bob'].get('/v1/sessions'))['data'][0]['id']}"))
    text(http["bob"].post("/open_session", json=brief))
    assert text(http["bob"].get("/v1/sessions/native"))["limits"]["ttl_s"] == SESSION_TTL_S


def test_a_key_has_only_so_many_running_and_waiting_and_others_are_not_held_up(
    shared: Server, http: dict[str, httpx.Client]
) -> None:
    def counts() -> tuple[int, int]:
        stats = shared.stats()
        return stats["running"], stats["queued"]

    first = endless(shared, http["carol"], "runs")
    assert first.next() is not None
    body = {"text": ["a", "b"], "sampling_params": ENDLESS}
    two = in_background(lambda: http["carol"].post("/generate", json=body))
    wait_until(lambda: counts() == (1, 2))
    refused = http["carol"].post("/generate", json={"text": "a", "sampling_params": SHORT})
    assert refused.status_code == 429 and "this key" in refused.text
    text(http["bob"].post("/generate", json={"text": "a", "sampling_params": SHORT}))
    text(http["carol"].post("/abort_request", json={"abort_all": True}))
    assert [each["meta_info"]["finish_reason"]["type"] for each in text(two())] == ["abort"] * 2
    first.close()
