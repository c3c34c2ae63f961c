"""A server of two ranks that loses one: its requests are refused, it says so, and goes on with another engine."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.server_process import Server, Stream, has_ended, wait_until
from tests.support.tiny_folder import ENDLESS


@pytest.fixture
def server(tmp_path: Path, folder: Path) -> Iterator[Server]:
    """It may be restarted twice, and keeps a journal."""
    model = ("--model", str(folder), "--tp", "2", "--threads", "1", "--pool-tokens", "16384")
    started = Server(tmp_path, *model, "--engine-restarts", "2", "--journal", str(tmp_path / "journal"))
    yield started
    started.kill()


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    places = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(each) for place in places for each in place.read_text().split()]


def health(server: Server) -> tuple[int, str]:
    """What /health says."""
    answer = server.http.get("/health")
    said: dict[str, Any] = answer.json()
    return answer.status_code, said.get("status") or said["error"]["message"]


def test_a_lost_rank_ends_its_requests_and_another_engine_takes_new_ones_until_there_were_too_many(
    server: Server,
) -> None:
    assert server.http.get("/server_info").json()["settings"]["tp"] == 2
    for name in ("kept", "again"):
        assert server.post("/v1/sessions", {"id": name}).status_code == 201
    turn = {"text": "hello", "max_tokens": 9, "temperature": 0, "ignore_eos": True}
    for name in ("kept", "again"):
        first = server.post(f"/v1/sessions/{name}/generate", turn).json()
    second = server.post("/v1/sessions/again/generate", turn).json()
    body = {"text": "hello", "sampling_params": {"max_new_tokens": 9, "temperature": 0}}
    before = server.generate(body)["text"]
    stream = Stream(server, "/generate", {"text": "hello", "sampling_params": ENDLESS, "stream": True})
    assert stream.next()["output_ids"]
    (follower,) = children(server.engine_pid)
    os.kill(follower, signal.SIGSTOP)
    assert stream.rest()[-1]["error"]["code"] == 503
    status, said = health(server)
    assert (status, said) == (503, "the engine ended unexpectedly and is being started again")
    assert server.http.get("/ready").status_code == server.post("/generate", body).status_code == 503
    wait_until(lambda: health(server) == (200, "ok"))
    assert "rank 1 has not been heard of for 6 s" in server.log or "rank 1 is not done" in server.log
    assert "starting another (1 of 2 within an hour)" in server.log
    assert has_ended(server.engine_pid) and has_ended(follower)

    assert server.generate(body)["text"] == before
    assert server.http.get("/v1/sessions/other").status_code == 404
    went_on = server.post("/v1/sessions/kept/generate", turn).json()
    assert went_on["text"] == second["text"] != first["text"]
    assert server.http.get("/ready").status_code == 200

    (engine,) = children(server.process.pid)
    os.kill(engine, signal.SIGSTOP)
    wait_until(lambda: has_ended(engine))
    assert "rank 0 has not been heard of for 6 s" in server.log
    wait_until(lambda: health(server) == (200, "ok"))

    (engine,) = children(server.process.pid)
    (follower,) = children(engine)
    os.kill(follower, signal.SIGKILL)
    assert server.process.wait() != 0
    assert has_ended(engine) and has_ended(follower)
    assert "rank 1 has ended: killed by SIGKILL" in server.log
    assert server.litter() == []
