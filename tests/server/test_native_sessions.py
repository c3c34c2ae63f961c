"""SGLang's sessions, streaming or not, as its clients use them, against a real server with the real default model."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.test_native import COUNT, GREEDY, LONG, ids_of
from tests.server.test_sessions import error
from tests.support.server_process import Server, Stream


@pytest.fixture
def native(rested: Server) -> Iterator[Server]:
    """A server whose sessions are closed in the end."""
    yield rested
    for each in rested.http.get("/v1/sessions").json()["data"]:
        assert rested.post("/close_session", {"session_id": each["id"]}).status_code == 200


def opened(server: Server, **options: Any) -> str:
    """A new session's name."""
    answer = server.post("/open_session", {"capacity_of_str_len": 1000, **options})
    assert answer.status_code == 200, answer.text
    name = answer.json()
    assert isinstance(name, str)
    return name


def turn(server: Server, session: str, ids: list[int], rid: str | None = None, **more: Any) -> Any:
    """The answer to one turn."""
    params = {"id": session, "rid": rid}
    return server.generate({"input_ids": ids, "session_params": params, "sampling_params": GREEDY, **more})


def test_a_streaming_session_goes_on_from_prompt_and_output(native: Server) -> None:
    name = opened(native, streaming=True, session_id="stream / ?", timeout=600.0)
    assert name == "stream / ?"
    assert error(native.post("/open_session", {"capacity_of_str_len": 0, "session_id": name})) == (400, "session_id")
    ids, bos = ids_of(native, COUNT), 1
    first = turn(native, name, [bos, *ids])["meta_info"]
    assert (first["prompt_tokens"], first["completion_tokens"]) == (1 + len(ids), 6)
    second = turn(native, name, [bos, *ids], rid=first["id"])["meta_info"]
    assert second["prompt_tokens"] == 1 + len(ids) + 6 + len(ids), "one leading bos is not repeated"
    assert second["cached_tokens"] == 1 + len(ids) + 6
    third = native.generate({"text": COUNT, "session_params": {"id": name}, "sampling_params": GREEDY})["meta_info"]
    assert third["prompt_tokens"] == second["prompt_tokens"] + 6 + len(ids)
    (state,) = native.http.get("/v1/sessions").json()["data"]
    assert (state["turns"], state["length"], state["streaming"]) == (3, third["prompt_tokens"] + 6, True)
    assert state["capacity_of_str_len"]["given"] == 1000 and "none" in state["capacity_of_str_len"]["effect"]
    assert state["limits"]["ttl_s"] == 600


@pytest.mark.parametrize("streaming", [True, False])
def test_what_only_appending_cannot_do_is_refused_and_the_session_is_intact(native: Server, streaming: bool) -> None:
    name = opened(native, streaming=streaming)
    ids = ids_of(native, COUNT)
    rid = turn(native, name, ids)["meta_info"]["id"]
    body = {"input_ids": ids, "sampling_params": GREEDY}
    edits = ({"offset": 3}, {"offset": -1}, {"replace": True}, {"drop_previous_output": True})
    for edit in edits if streaming else ():
        answer = native.post("/generate", {**body, "session_params": {"id": name, "rid": rid, **edit}})
        assert error(answer) == (400, f"session_params.{next(iter(edit))}")
    for bad, param in (
        ({"sampling_params": {"n": 2}}, "sampling_params.n"),
        ({"sampling_params": [GREEDY]}, "sampling_params"),
        ({"input_ids": [ids]}, "input_ids"),
        ({"input_ids": None, "text": [COUNT]}, "text"),
        ({"sampling_params": {"top_p": 2}}, "sampling_params.top_p"),
    ):
        answer = native.post("/generate", {**body, "session_params": {"id": name, "rid": rid}, **bad})
        assert error(answer) == (400, param)
    harmless = {"offset": 0, "replace": False, "drop_previous_output": False}
    answer = native.generate({**body, "session_params": {"id": name, "rid": rid, **harmless}})
    assert answer["meta_info"]["prompt_tokens"] == len(ids) + 6 + len(ids)
    assert error(native.post("/generate", {**body, "session_params": {"id": "nobody"}})) == (404, "session_params.id")


def test_a_session_that_does_not_stream_goes_on_from_any_request_that_has_ended(native: Server) -> None:
    name = opened(native)
    ids = ids_of(native, COUNT)
    root = turn(native, name, ids)["meta_info"]
    branches = [turn(native, name, ids[:more], rid=root["id"])["meta_info"] for more in (1, 3)]
    assert [each["prompt_tokens"] for each in branches] == [len(ids) + 6 + 1, len(ids) + 6 + 3]
    leaf = turn(native, name, [1, *ids], rid=branches[1]["id"])["meta_info"]
    assert leaf["prompt_tokens"] == branches[1]["prompt_tokens"] + 6 + len(ids)
    assert leaf["cached_tokens"] > 0, "its KV is found in the prefix tree"
    assert turn(native, name, ids)["meta_info"]["prompt_tokens"] == len(ids), "without a rid it begins anew"
    body = {"input_ids": ids, "sampling_params": GREEDY, "session_params": {"id": name, "rid": "unknown"}}
    assert error(native.post("/generate", body)) == (400, "session_params.rid")
    running = Stream(
        native,
        "/generate",
        {**body, "sampling_params": LONG, "rid": "open", "stream": True, "session_params": {"id": name}},
    )
    running.next()
    body["session_params"] = {"id": name, "rid": "open"}
    assert error(native.post("/generate", body)) == (400, "session_params.rid")
    running.close()
    assert error(native.post(f"/v1/sessions/{name}/append", {"text": "x"})) == (400, "session_id")


def test_20_logprobs_begin_where_the_session_ends(native: Server) -> None:
    name = opened(native, streaming=True)
    ids = ids_of(native, COUNT)
    scored = {"return_logprob": True, "logprob_start_len": 0}
    first = turn(native, name, ids, **scored)["meta_info"]
    assert first["logprob_start_len"] == 0
    assert [token for _, token, _ in first["input_token_logprobs"]] == ids
    second = turn(native, name, ids, **scored)["meta_info"]
    assert second["logprob_start_len"] == second["cached_tokens"] == len(ids) + 6
    assert [token for _, token, _ in second["input_token_logprobs"]] == ids
    assert len(second["output_token_logprobs"]) == 6
    third = turn(native, name, ids, return_logprob=True, logprob_start_len=second["prompt_tokens"] + 6 + 2)["meta_info"]
    assert [token for _, token, _ in third["input_token_logprobs"]] == ids[2:]
    assert third["logprob_start_len"] == second["prompt_tokens"] + 8
    assert third["cached_tokens"] == second["prompt_tokens"] + 6


@pytest.mark.parametrize("stream", [False, True])
def test_21_a_turn_that_is_too_long_is_a_400_and_the_session_lives_on(native: Server, stream: bool) -> None:
    name = opened(native, streaming=True)
    ids = ids_of(native, COUNT)
    before = turn(native, name, ids)["meta_info"]
    for new in ([9] * 3000, [9] * 2040):
        body = {"input_ids": new, "session_params": {"id": name}, "sampling_params": GREEDY, "stream": stream}
        answer = native.post("/generate", body)
        assert error(answer) == (400, "input_ids")
        assert "maximum allowed length" in answer.json()["error"]["message"]
        assert "2048" in answer.json()["error"]["message"]
    after = turn(native, name, ids)["meta_info"]
    assert after["cached_tokens"] == before["prompt_tokens"] + 6


def test_a_turn_whose_reader_leaves_is_undone(native: Server) -> None:
    name = opened(native, streaming=True)
    ids = ids_of(native, COUNT)
    before = turn(native, name, ids)["meta_info"]
    body = {"input_ids": ids, "session_params": {"id": name}, "sampling_params": LONG, "stream": True}
    running = Stream(native, "/generate", body)
    running.next()
    assert error(native.post("/generate", {**body, "stream": False})) == (409, "session_params.id")
    running.close()
    after = turn(native, name, ids)["meta_info"]
    assert after["prompt_tokens"] == before["prompt_tokens"] + 6 + len(ids)


def test_closing_ends_a_running_turn_and_closing_again_is_refused(native: Server) -> None:
    name = opened(native, streaming=True)
    body = {"text": COUNT, "session_params": {"id": name}, "sampling_params": LONG, "stream": True}
    running = Stream(native, "/generate", body)
    running.next()
    assert native.post("/close_session", {"session_id": name}).status_code == 200
    assert running.rest()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert error(native.post("/close_session", {"session_id": name})) == (404, "session_id")
