"""Clients that leave: their work ends at once, wherever it is, and nobody else notices."""

import json
import socket
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.support.server_process import Server, Stream, wait_until

LONG = {"temperature": 0, "max_new_tokens": 1500, "ignore_eos": True}


def send(server: Server, body: dict[str, Any]) -> socket.socket:
    """Send a request and do not wait for its answer."""
    data = json.dumps(body).encode()
    kind = "host: localhost\r\ncontent-type: application/json"
    head = f"POST /generate HTTP/1.1\r\n{kind}\r\ncontent-length: {len(data)}\r\n\r\n"
    place = urlparse(server.url)
    line = socket.create_connection((place.hostname, place.port))
    line.sendall(head.encode() + data)
    return line


def aborts(server: Server) -> int:
    """How many requests were ended before their end."""
    return int(dict(server.stats()["endings"]).get("abort", 0))


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_who_leaves_a_stream_frees_its_work(rested: Server, n: int) -> None:
    before = aborts(rested)
    stream = Stream(rested, "/generate", {"text": "a", "sampling_params": {**LONG, "n": n}, "stream": True})
    stream.next()
    stream.close()
    wait_until(rested.is_at_rest)
    assert aborts(rested) == before + n


def test_a_client_who_does_not_wait_for_its_answer_frees_its_work(rested: Server) -> None:
    before = aborts(rested)
    line = send(rested, {"text": ["a", "b"], "sampling_params": LONG})
    wait_until(lambda: rested.stats()["running"] == 2)
    line.close()
    wait_until(rested.is_at_rest)
    assert aborts(rested) == before + 2


def test_a_client_who_leaves_the_queue_is_forgotten(rested: Server) -> None:
    busy = send(rested, {"text": ["a"] * 30, "sampling_params": LONG})
    wait_until(lambda: _accepted(rested) == 30 and rested.stats()["queued"] == 30 - 8)
    lines = [send(rested, {"text": "b", "sampling_params": LONG, "stream": stream}) for stream in (False, True)]
    wait_until(lambda: _accepted(rested) == 32)
    for line in lines:
        line.close()
    wait_until(lambda: _accepted(rested) == 30)
    busy.close()


def _accepted(server: Server) -> int:
    stats = server.stats()
    return int(stats["queued"] + stats["running"])


def test_who_uses_anothers_name_and_leaves_does_not_end_it(rested: Server) -> None:
    owner = Stream(rested, "/generate", {"text": "a", "sampling_params": LONG, "rid": "owned", "stream": True})
    owner.next()
    for stream in (False, True) * 10:
        send(rested, {"text": "b", "sampling_params": {**LONG, "n": 2}, "rid": "owned", "stream": stream}).close()
    for _ in range(30):
        assert owner.next()["meta_info"]["finish_reason"] is None
    assert rested.stats()["running"] == 1
    owner.close()


def test_a_name_is_free_again_as_soon_as_its_owner_has_left(rested: Server) -> None:
    for _ in range(5):
        stream = Stream(rested, "/generate", {"text": "a", "sampling_params": LONG, "rid": "again", "stream": True})
        wait_until(lambda: stream.response.is_success)  # noqa: B023 (it is over before the next one)
        stream.next()
        stream.close()
        free = {"text": "a", "sampling_params": {"max_new_tokens": 1}, "rid": "again"}
        wait_until(lambda: rested.post("/generate", free).status_code == 200)  # noqa: B023


def test_who_leaves_while_still_sending_leaves_no_trace(rested: Server) -> None:
    place = urlparse(rested.url)
    head = (
        b"POST /generate HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    )
    for part in (b"", b"POST /gen", head, head + b'{"text'):
        line = socket.create_connection((place.hostname, place.port))
        line.sendall(part)
        line.close()
