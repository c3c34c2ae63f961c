"""How servers end, and what happens to those who wait: signals, a dead engine, a dead server, a wedged one."""

import os
import signal
import socket
import threading
from collections.abc import Callable
from typing import Any
from urllib.parse import urlparse

import httpx

from tests.server.conftest import StartTiny
from tests.support.server_process import Server, Stream, has_ended, wait_until
from tests.support.tiny_folder import ENDLESS


def in_background(work: Callable[[], Any]) -> Callable[[], Any]:
    """Start some work; the function that comes back waits for its result, an HTTP failure included."""
    results: list[Any] = []

    def run() -> None:
        try:
            results.append(work())
        except httpx.HTTPError as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> Any:
        thread.join()
        return results[0]

    return result


def begin(server: Server, **more: Any) -> Stream:
    """A long stream that has begun."""
    stream = Stream(server, "/generate", {"text": "hello", "sampling_params": {**ENDLESS, **more}, "stream": True})
    assert stream.next()["output_ids"]
    return stream


def test_sigterm_lets_what_runs_end_and_takes_nothing_new(start_tiny: StartTiny) -> None:
    server = start_tiny()
    body = {"text": "hello", "stream": True, "return_logprob": True, "top_logprobs_num": 2}
    stream = Stream(server, "/generate", {**body, "sampling_params": {**ENDLESS, "max_new_tokens": 300}})
    stream.next()
    keep_alive = httpx.Client(base_url=server.url)
    assert keep_alive.get("/ready").status_code == 200
    server.process.send_signal(signal.SIGTERM)
    wait_until(lambda: _refuses(server.url))
    last = stream.rest()[-1]
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
    assert len(last["meta_info"]["output_token_logprobs"]) == 300
    assert server.process.wait() == 0
    assert has_ended(server.engine_pid)
    assert "roost: stopping; 1 running request gets up to 30 s (Ctrl-C again ends it at once)\n" in server.log
    assert "rror" not in server.log


def _refuses(url: str) -> bool:
    try:
        return httpx.post(f"{url}/generate", json={"text": "a"}).status_code == 503
    except httpx.TransportError:
        return True


def test_what_has_not_ended_when_the_drain_is_over_ends_as_aborted(start_tiny: StartTiny) -> None:
    server = start_tiny("--drain-s", "1")
    stream = begin(server)
    whole = in_background(lambda: server.generate({"text": "hello", "sampling_params": ENDLESS}))
    wait_until(lambda: server.stats()["running"] == 2)
    place = urlparse(server.url)
    half = socket.create_connection((place.hostname, place.port))
    half.sendall(b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-length: 9\r\n")
    half.sendall(b"content-type: application/json\r\nexpect: 100-continue\r\n\r\n")
    assert half.recv(100).startswith(b"HTTP/1.1 100 ")  # so it is read from now on
    server.process.send_signal(signal.SIGINT)
    wait_until(lambda: "roost: stopping; 3 running requests get up to 1 s" in server.log)
    assert stream.rest()[-1]["meta_info"]["finish_reason"]["type"] == "abort"
    assert whole()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.process.wait() == 0
    assert "Traceback" not in server.log
    half.close()
    assert "rror" not in server.log


def test_an_engine_that_dies_ends_every_request_with_an_error_and_then_the_server(start_tiny: StartTiny) -> None:
    server = start_tiny()
    stream = begin(server)
    whole = in_background(lambda: server.post("/generate", {"text": "hello", "sampling_params": ENDLESS}))
    wait_until(lambda: server.stats()["running"] == 2)
    os.kill(server.engine_pid, signal.SIGKILL)
    assert stream.rest()[-1]["error"]["code"] == 500
    assert whole().status_code == 500
    assert server.process.wait() != 0
    assert server.litter() == []


def test_an_engine_ends_with_its_server(start_tiny: StartTiny) -> None:
    server = start_tiny()
    begin(server)
    server.process.kill()
    server.process.wait()
    wait_until(lambda: has_ended(server.engine_pid))
    assert server.litter() == []


def test_33_health_is_bad_while_the_engine_is_wedged(start_tiny: StartTiny) -> None:
    server = start_tiny("--health-answer-s", "1")
    stream = begin(server)
    assert server.http.get("/health").status_code == 200
    os.kill(server.engine_pid, signal.SIGSTOP)
    try:
        answer = server.http.get("/health")
        assert answer.status_code == 503
        assert "has not answered" in answer.json()["error"]["message"]
        assert server.post("/flush_cache").status_code == 503
    finally:
        os.kill(server.engine_pid, signal.SIGCONT)
    wait_until(lambda: server.http.get("/health").status_code == 200)
    stream.close()
    server.check_rest()
    os.kill(server.engine_pid, signal.SIGKILL)
    wait_until(lambda: _is_down(server))


def _is_down(server: Server) -> bool:
    """Not healthy, or not there at all: never well."""
    try:
        answer = server.http.get("/health")
    except httpx.TransportError:
        return True
    assert answer.status_code in (200, 503)
    return answer.status_code == 503


def test_41_a_reader_that_takes_nothing_stalls_nobody_and_is_given_up(start_tiny: StartTiny) -> None:
    server = start_tiny("--stall-s", "1")
    unread = begin(server)
    assert server.generate({"text": "hello", "sampling_params": {"max_new_tokens": 20}})["text"] is not None
    wait_until(server.is_at_rest)
    assert dict(server.stats()["endings"])["abort"] == 1  # long before all was generated
    assert server.http.get("/health").status_code == 200
    unread.close()
    assert server.stop() == 0
