"""Headers, paths and numbers that make no sense: all are refused, none breaks anything, and the log stays clean."""

import json
import random
import socket
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlparse

import pytest

from tests.support.server_process import PATIENCE_S, Server

HEADERS = (
    *("origin", "host", "authorization", "content-type", "content-length", "transfer-encoding", "expect", "upgrade"),
    *(
        "accept",
        "cookie",
        "range",
        "x-forwarded-for",
        "access-control-request-method",
        "if-match",
        "te",
        "x-request-id",
    ),
)
VALUES = (
    *(b"", b"http://[", b"[", b"]", b"http://[::1", b"\xff\xfe", b"\xc3\xa9", b"a" * 10_000, b"-1", b"1e9", b"0x10"),
    *(
        b"9" * 40,
        b"+5",
        b"5, 6",
        b"%00",
        b"%",
        b"\x7f",
        b"\x0b",
        b"a\tb",
        b"null",
        b"chunked, gzip",
        b"bearer",
        b"\x1b[2J",
    ),
    *(b"websocket", b"application/json; charset=\xff", b"bytes=9-0", b"Bearer \xff", b"http://a:99999999"),
)
PATHS = (
    *("/v1/sessions/%", "/v1/sessions/%zz", "/v1/sessions/%ff", "/v1/sessions/%00", "/v1/sessions/%ed%a0%80"),
    *("/v1/sessions/%2e%2e", "/v1/sessions/%0a%1b", "/v1/models/%f4%90%80%80", "/v1/sessions/" + "9" * 5000, "/%0d%0a"),
    *("http://evil/health", "//", "/?" + "a=" * 3000, "/v1/models/" + "%41" * 2000, "*"),
)
HUGE = (2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1e308)


def ask(server: Server, data: bytes) -> bytes:
    """The status line of the answer to some bytes."""
    place = urlparse(server.url)
    with socket.create_connection((place.hostname, place.port), timeout=PATIENCE_S) as line:
        line.sendall(data)
        return line.recv(12)


def request(method: str, path: str, headers: dict[str, bytes], body: bytes = b"{}") -> bytes:
    """A request as bytes, whatever they mean."""
    usual = {"host": b"localhost", "content-type": b"application/json", "content-length": str(len(body)).encode()}
    lines = [f"{name}: ".encode() + value for name, value in {**usual, "connection": b"close", **headers}.items()]
    return b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), *lines, b"", body])


def requests(number: int, seed: int) -> Iterator[bytes]:
    """Requests with one or two headers, or a path, that make no sense."""
    draw = random.Random(seed)
    for path in PATHS:
        for method in ("GET", "DELETE", "POST", "HEAD"):
            yield request(method, path, {})
    for _ in range(number):
        headers = {draw.choice(HEADERS): draw.choice(VALUES) for _ in range(draw.choice((1, 1, 2)))}
        method, path = draw.choice((("POST", "/abort_request"), ("DELETE", "/v1/sessions/none"), ("GET", "/ready")))
        yield request(method, path, headers)


def test_no_header_and_no_path_breaks_anything(rested: Server) -> None:
    answers = {data: ask(rested, data) for data in requests(400, seed=4)}
    wrong = [(data[:200], answer) for data, answer in answers.items() if not b"HTTP/1.1 2" <= answer < b"HTTP/1.1 5"]
    assert not wrong, wrong
    assert all(line.isprintable() for line in rested.log.split("\n"))
    assert "Traceback" not in rested.log


@pytest.mark.parametrize("key", ["9" * 19, "9" * 20, "9" * 5000, "-" + "9" * 30, "", " 5", "1_0", "٣", "5.0", "0x5"])
def test_a_bias_for_what_is_no_token_is_refused_by_name(rested: Server, key: str) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "logit_bias": {key: 1}}, "logit_bias"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logit_bias": {key: 1}},
            "logit_bias",
        ),
        ("/generate", {"text": "a", "sampling_params": {"logit_bias": {key: 1}}}, "sampling_params.logit_bias"),
    ):
        answer = rested.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert len(answer.text) < 500


NUMBERS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    (
        "/v1/completions",
        {"prompt": "a"},
        ("max_tokens", "min_tokens", "n", "seed", "top_k", "priority", "timeout", "turn", "logprobs", "temperature"),
    ),
    ("/generate", {"text": "a"}, ("priority", "logprob_start_len", "top_logprobs_num")),
    ("/v1/sessions", {}, ("ttl_s", "max_tokens")),
    ("/v1/sessions/none/rewind", {}, ("turn", "length")),
    ("/open_session", {"capacity_of_str_len": 1}, ("capacity_of_str_len", "timeout")),
)


def test_no_number_is_too_large_to_be_refused(rested: Server) -> None:
    for path, body, names in NUMBERS:
        for name in names:
            for value in HUGE:
                data = json.dumps({**body, name: value})
                answer = rested.http.post(path, content=data, headers={"content-type": "application/json"})
                assert 400 <= answer.status_code < 500, (path, name, value, answer.text)
    for ids in ([2**63], [2**70], [1e300], [[10**400]]):
        headers = {"content-type": "application/json"}
        answer = rested.http.post("/generate", content=json.dumps({"input_ids": ids}), headers=headers)
        assert answer.status_code == 400, answer.text
