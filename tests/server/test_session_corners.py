"""Corners of sessions over HTTP: time that is up, turns that wait too long, odd names."""

from typing import Any

import pytest

from tests.server.conftest import StartTiny
from tests.server.test_ends import in_background
from tests.server.test_native import COUNT, GREEDY, ids_of
from tests.server.test_native_sessions import native, opened, turn
from tests.server.test_sessions import ENDLESS, MORE, SHORT, USER, Client, error, inherited, session
from tests.support.server_process import Server, Stream, wait_until

__all__ = ["native", "session"]  # fixtures
BRIEF_S = 0.05


def expired(server: Server) -> int:
    """Sessions whose time was up, as the metrics say."""
    lines = server.http.get("/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith("roost_sessions_expired_total ")]
    assert float(line.split()[1]) == server.stats()["sessions_expired"]
    return int(float(line.split()[1]))


def test_a_session_is_gone_when_its_time_is_up_and_its_name_is_free_again(rested: Server) -> None:
    before = expired(rested)
    brief = Client(rested, id="brief", ttl_s=BRIEF_S)
    wait_until(lambda: rested.http.get(brief.path).status_code == 404)
    assert expired(rested) == before + 1
    for what in ("append", "generate"):
        assert error(brief.ask(what, {"text": "a"})) == (404, "session_id")
    for what, body in (("rewind", {"turn": 0}), ("fork", {})):
        assert error(brief.ask(what, body)) == (404, "session_id")
    chat = {"messages": [USER], "session_id": brief.id}
    assert error(rested.post("/v1/chat/completions", chat)) == (404, "session_id")
    params = {"text": "a", "session_params": {"id": brief.id}}
    assert error(rested.post("/generate", params)) == (404, "session_params.id")
    assert error(brief.close()) == (404, "session_id")
    again = Client(rested, id="brief", ttl_s=600)
    assert again.do("generate", {"messages": [USER], **SHORT})["session"]["turns"] == 1, "nothing of the first is left"
    again.close()


def test_a_sessions_time_begins_anew_with_the_end_of_each_turn(rested: Server) -> None:
    before = expired(rested)
    brief = Client(rested, ttl_s=2)
    long = brief.do("generate", {"text": COUNT, **ENDLESS, "max_tokens": 150})
    assert long["finish_reason"] == "length" and long["session"]["idle_s"] < 2, "no turn is too long for it"
    wait_until(lambda: rested.http.get(brief.path).status_code == 404)
    assert expired(rested) == before + 1


def test_a_native_session_that_does_not_stream_is_closed_when_nobody_has_used_it(native: Server) -> None:
    name = opened(native, session_id="unused", timeout=BRIEF_S)
    wait_until(lambda: native.http.get("/v1/sessions/unused").status_code == 404)
    body = {"text": "a", "session_params": {"id": name}}
    assert error(native.post("/generate", body)) == (404, "session_params.id")
    opened(native, session_id="unused", timeout=600.0)
    state = native.http.get("/v1/sessions/unused").json()
    assert state["limits"]["ttl_s"] == 600 and not state["streaming"]
    opened(native, session_id="counted", timeout=BRIEF_S)
    wait_until(lambda: native.stats()["sessions"] == 1)


def test_the_servers_ttl_is_that_of_every_session_that_names_none(start_tiny: StartTiny) -> None:
    server = start_tiny("--session-ttl-s", "1")
    names = [Client(server).id, opened(server, streaming=True), opened(server, streaming=False)]
    states = server.http.get("/v1/sessions").json()["data"]
    assert {state["id"]: state["limits"]["ttl_s"] for state in states}.items() <= {name: 1 for name in names}.items()
    wait_until(lambda: server.stats()["sessions"] == 0)
    assert [server.http.get(f"/v1/sessions/{name}").status_code for name in names] == [404] * 3
    server.check_rest()


@pytest.mark.parametrize("what", [("rewind", {"turn": 0}), ("fork", {}), ("append", {"text": "a"}), ("generate", {})])
def test_only_generate_has_a_session_that_does_not_stream(native: Server, what: tuple[str, Any]) -> None:
    name = opened(native)
    assert error(native.post(f"/v1/sessions/{name}/{what[0]}", what[1])) == (400, "session_id")
    assert len(native.http.get("/v1/sessions").json()["data"]) == 1


def test_a_turn_waits_for_its_session_no_longer_than_its_timeout(session: Client) -> None:
    running = Stream(session.server, f"{session.path}/generate", {"text": COUNT, **ENDLESS, "stream": True})
    running.next()
    waiting = {"queue": True, "timeout": 0.2}
    for path, body in (
        (f"{session.path}/append", {"text": "a"}),
        (f"{session.path}/generate", {"text": "a", **SHORT}),
        (f"{session.path}/generate", {"text": "a", **SHORT, "stream": True}),
        ("/v1/chat/completions", {"messages": [USER], "session_id": session.id}),
        ("/v1/completions", {"prompt": "a", "session_id": session.id}),
    ):
        answer = session.server.post(path, {**body, **waiting})
        assert error(answer) == (504, "timeout") and session.id in answer.json()["error"]["message"]
        assert error(session.server.post(path, {**body, "queue": True, "timeout": 0})) == (400, "timeout")
    assert running.next()["finish_reason"] is None, "nobody who gave up has disturbed it"
    running.close()
    assert session.do("generate", {"text": COUNT, **SHORT, "timeout": 600})["session"]["turns"] == 1


def test_a_turn_sent_twice_is_told_so_also_while_another_runs(session: Client) -> None:
    first = session.do("generate", {"text": COUNT, "turn": 0, **SHORT})
    running = Stream(session.server, f"{session.path}/generate", {"text": COUNT, **ENDLESS, "stream": True})
    running.next()
    for more in ({}, {"queue": True}, {"stream": True}):
        again = session.ask("generate", {"text": COUNT, "turn": 0, **SHORT, **more})
        assert error(again) == (409, "turn") and again.json()["usage"] == first["usage"]
    assert error(session.ask("generate", {"text": COUNT, "turn": 1, **SHORT})) == (409, "session_id")
    running.close()
    copy = Client(session.server, session.ask("fork"))
    session.do("rewind", {"turn": 0})
    assert session.do("generate", {"text": COUNT, "turn": 0, **SHORT})["session"]["turns"] == 1, "the number is free"
    assert copy.ask("append", {"text": "a", "turn": 0}).json()["usage"] == first["usage"]


@pytest.mark.parametrize("name", [".", "..", "a\n", "a/b", "a b", "é", "a%2fb", "", "a" * 257])
def test_names_that_do_not_fit_into_a_path_are_refused(session: Client, name: str) -> None:
    assert error(session.server.post("/v1/sessions", {"id": name})) == (400, "id")
    assert error(session.ask("fork", {"id": name})) == (400, "id")


@pytest.mark.parametrize("path", ["%2e%2e", "a%2Fb", "%FF", "%ED%A0%80", "🦉", "a" * 3000, "%00", "a%0A"])
def test_names_that_nobody_has_are_not_found(rested: Server, path: str) -> None:
    assert rested.http.get(f"/v1/sessions/{path}").status_code == 404
    assert rested.http.delete(f"/v1/sessions/{path}").status_code == 404
    assert rested.post(f"/v1/sessions/{path}/generate", {"text": "a"}).status_code in (404, 405)


@pytest.mark.parametrize("nothing", [{"text": ""}, {"input_ids": []}, {}])
def test_a_turn_without_anything_new_leaves_a_chat_a_chat(session: Client, nothing: dict[str, Any]) -> None:
    first = session.do("generate", {"messages": [USER], **SHORT})
    more = session.do("generate", {**nothing, **SHORT})
    assert more["usage"]["prompt_tokens"] == first["usage"]["total_tokens"], "the answer goes on as it stands"
    if nothing:
        session.do("append", nothing)
    assert inherited(session.do("generate", {"messages": [MORE], **SHORT})) >= more["usage"]["total_tokens"] - 1


def test_many_turns_at_once_are_made_one_after_the_other_or_refused(session: Client) -> None:
    ids = ids_of(session.server, COUNT)
    body = {"input_ids": ids, **SHORT}
    answers = [in_background(lambda n=n: session.ask("generate", {**body, "queue": n % 2 == 0})) for n in range(12)]
    statuses = [answer().status_code for answer in answers]
    assert set(statuses) <= {200, 409} and statuses[::2] == [200] * 6
    state = session.state()
    assert (state["turns"], state["length"]) == (statuses.count(200), statuses.count(200) * (len(ids) + 4))


def test_a_native_stream_says_the_raised_start_of_its_logprobs(native: Server) -> None:
    name, ids = opened(native, streaming=True), ids_of(native, COUNT)
    turn(native, name, ids)
    body = {"input_ids": ids, "session_params": {"id": name}, "sampling_params": GREEDY, "stream": True}
    events = Stream(native, "/generate", {**body, "return_logprob": True, "logprob_start_len": 0}).rest()
    assert {event["meta_info"]["logprob_start_len"] for event in events} == {len(ids) + 6}
    assert [token for _, token, _ in events[-1]["meta_info"]["input_token_logprobs"]] == ids
