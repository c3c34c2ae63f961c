"""Sessions over HTTP that go on after the server and its engine were killed, from the journal."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.server.conftest import StartTiny
from tests.support.server_process import Server, Stream, wait_until
from tests.support.tiny_folder import PLAIN_TEMPLATE, write_model

CHAT_TEMPLATE = PLAIN_TEMPLATE + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
GREEDY = {"max_tokens": 12, "temperature": 0, "ignore_eos": True}
LONG = {**GREEDY, "max_tokens": 3000}
SAYS = [[{"role": "user", "content": f"number {number} <|im_end|>"}] for number in range(5)]


def _chat(server: Server, number: int, session: str, **more: Any) -> tuple[str, list[int]]:
    """A turn of chat messages: what the model says, and how many tokens its prompt had."""
    body = {"messages": SAYS[number], "turn": number, **GREEDY, **more}
    if number % 2:  # on the other endpoint that takes a session
        answer = server.post("/v1/chat/completions", {**body, "model": "default", "session_id": session})
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["message"]["content"], [answer.json()["usage"]["prompt_tokens"]]
    answer = server.post(f"/v1/sessions/{session}/generate", body)
    assert answer.status_code == 200, answer.text
    return answer.json()["text"], [answer.json()["usage"]["prompt_tokens"]]


def _plain(server: Server, text: str) -> dict[str, Any]:
    """A turn in SGLang's form."""
    sampling = {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = server.post("/generate", {"text": text, "session_params": {"id": "sg"}, "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    said: dict[str, Any] = answer.json()
    return said


def _killed(server: Server) -> None:
    for pid in (server.engine_pid, server.process.pid):
        os.kill(pid, signal.SIGKILL)
    server.process.wait()


@pytest.mark.parametrize("fsync", [pytest.param(True, marks=pytest.mark.full), False])
def test_sessions_go_on_in_a_new_server_with_the_tokens_that_were_acknowledged(
    start_tiny: StartTiny, tmp_path: Path, *, fsync: bool
) -> None:
    flags = ("--journal", str(tmp_path / "journal"), *(("--journal-fsync",) if fsync else ()))
    model = write_model(tmp_path, CHAT_TEMPLATE)
    server = start_tiny(*flags, model=model)
    for name in ("alone", "moves"):
        assert server.post("/v1/sessions", {"id": name, "ttl_s": 3600}).status_code == 201
    assert server.post("/open_session", {"session_id": "sg", "streaming": True, "capacity_of_str_len": 0}).json()
    wanted = [_chat(server, number, "alone") for number in range(5)]
    assert [_chat(server, number, "moves") for number in range(2)] == wanted[:2]
    first = _plain(server, "one two")
    stream = Stream(server, "/v1/sessions/moves/generate", {"messages": SAYS[2], "stream": True, **LONG})
    assert stream.next()
    _killed(server)

    server = start_tiny(*flags, model=model)
    assert server.http.get("/v1/sessions").json()["data"] == [], "none is there before it is asked for"
    state = server.http.get("/v1/sessions/moves").json()
    assert (state["turns"], state["resident"], state["limits"]["ttl_s"]) == (2, 0, 3600)
    again = server.post("/v1/sessions/moves/generate", {"messages": SAYS[1], "turn": 1, **GREEDY})
    assert again.status_code == 409 and "committed already" in again.text
    assert _chat(server, 2, "moves") == wanted[2]
    fork = server.post("/v1/sessions/moves/fork", {"id": "fork", "turn": 1})
    assert fork.status_code == 201, fork.text
    assert [_chat(server, number, "fork") for number in (1, 2, 3)] == wanted[1:4]
    assert server.post("/v1/sessions/fork/rewind", {"turn": 2}).json()["turns"] == 2
    assert [_chat(server, number, "fork") for number in (2, 3)] == wanted[2:4]
    assert _plain(server, " three")["meta_info"]["cached_tokens"] == 0
    assert server.post("/v1/sessions", {"id": "moves"}).status_code == 409
    _killed(server)

    server = start_tiny(*flags, model=model)
    assert [_chat(server, 3, "moves"), _chat(server, 4, "moves"), _chat(server, 4, "fork")] == [
        *wanted[3:],
        wanted[4],
    ]
    third = _plain(server, " four")
    assert third["meta_info"]["prompt_tokens"] > first["meta_info"]["prompt_tokens"] + 2 * 8
    for name in ("alone", "moves", "fork", "sg"):
        assert server.http.delete(f"/v1/sessions/{name}").status_code == 200
    assert list((tmp_path / "journal").iterdir()) == []
    assert server.http.get("/v1/sessions/moves").status_code == 404
    server.check_rest()


def test_sessions_go_on_when_the_engine_alone_is_killed_and_started_again(
    start_tiny: StartTiny, tmp_path: Path
) -> None:
    flags = ("--journal", str(tmp_path / "journal"), "--engine-restarts", "1")
    server = start_tiny(*flags, model=write_model(tmp_path, CHAT_TEMPLATE))
    for name in ("alone", "goes on"):
        assert server.post("/open_session", {"session_id": name, "streaming": True, "capacity_of_str_len": 0}).json()
    wanted = [_chat(server, number, "alone") for number in range(4)]
    assert [_chat(server, number, "goes on") for number in range(2)] == wanted[:2]
    stream = Stream(server, "/v1/sessions/goes%20on/generate", {"messages": SAYS[2], "stream": True, **LONG})
    assert stream.next()
    os.kill(server.engine_pid, signal.SIGKILL)
    assert stream.rest()[-1]["error"]["code"] == 503
    wait_until(lambda: server.http.get("/health").status_code == 200)
    assert [_chat(server, number, "goes on") for number in (2, 3)] == wanted[2:]


def test_a_server_whose_session_went_on_elsewhere_says_so_and_then_knows_it(
    start_tiny: StartTiny, tmp_path: Path
) -> None:
    folder, model = str(tmp_path / "journal"), write_model(tmp_path, CHAT_TEMPLATE)
    first = start_tiny("--journal", folder, model=model)
    second = start_tiny("--journal", folder, model=model)
    assert first.post("/v1/sessions", {"id": "s"}).status_code == 201
    assert first.post("/v1/sessions", {"id": "alone"}).status_code == 201
    wanted = [_chat(first, number, "alone") for number in range(4)]
    assert _chat(first, 0, "s") == wanted[0]
    assert _chat(second, 1, "s") == wanted[1]
    old = first.post("/v1/sessions/s/generate", {"messages": SAYS[2], **GREEDY})
    assert old.status_code == 409 and "went on elsewhere" in old.text and "send the turn again" in old.text
    assert _chat(first, 2, "s") == wanted[2], "it has taken it back, and knows all its messages"
    body = {"messages": SAYS[3], "stream": True, **LONG}
    assert second.post("/v1/sessions/s/generate", body).status_code == 409
    stream = Stream(second, "/v1/sessions/s/generate", body)
    assert stream.next()
    assert _chat(first, 3, "s") == wanted[3]
    assert "another replica owns it now" in str(stream.rest()[-1])


def test_a_folder_that_cannot_be_written_is_refused_at_start(start_tiny: StartTiny, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    server = start_tiny("--journal", str(tmp_path / "file"), wait=False)
    assert server.process.wait(240) == 2
    assert "--journal" in server.log and "cannot be written" in server.log
    server = start_tiny("--journal-fsync", wait=False)
    assert server.process.wait(240) == 2
    assert "--journal-fsync is for --journal, which is not given" in server.log
