"""Who may do what: keys, methods, sizes, and what answers never hold."""

import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlparse

import httpx
import pytest

from roost.server.body_reader import BODY_BYTES_MAX
from roost.server.serve import HEADER_BYTES_MAX
from tests.support.server_process import Server

KEYS = ("owl-1", "owl-2")
POSTS = (
    *("/v1/chat/completions", "/v1/completions", "/generate", "/abort_request", "/flush_cache"),
    *("/tokenize", "/detokenize", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses", "/v1/conversations"),
    *(
        "/open_session",
        "/close_session",
        *(f"/v1/sessions/s/{verb}" for verb in ("append", "generate", "rewind", "fork")),
    ),
)
BOTH = ("/v1/conversations/c", "/v1/conversations/c/items")  # are read and changed
NAMED_POSTS = ("/v1/responses/input_tokens", "/v1/responses/r/cancel", *BOTH)
GETS = (
    *("/v1/models", "/v1/models/default", "/server_info", "/get_server_info", "/model_info", "/get_model_info"),
    *("/health_generate", "/version", "/metrics", "/openapi.json"),
    *("/v1/responses/r", "/v1/responses/r/input_items", *BOTH, "/v1/conversations/c/items/i"),
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Server]:
    """A server that wants a key."""
    flags = ("--api-key", KEYS[0], "--api-key", KEYS[1], "--model", str(tiny_model), "--threads", "1")
    started = Server(tmp_path_factory.mktemp("guarded"), *flags, "--pool-tokens", "8192")
    started.http.headers["authorization"] = f"Bearer {KEYS[0]}"
    try:
        yield started
        started.check_rest()
        assert started.stop() == 0
    finally:
        started.kill()


WRONG_KEYS = (None, "", "Bearer", "Bearer owl", "Bearer owl-11", "owl-1", "Basic owl-1", "Bearer é")


@pytest.mark.parametrize("key", WRONG_KEYS)
def test_40_without_a_key_nothing_is_done_or_said(guarded: Server, key: str | None) -> None:
    headers = {} if key is None else {"authorization": key.encode()}
    for method, paths in (("POST", (*POSTS, *NAMED_POSTS)), ("GET", GETS)):
        for path in paths:
            answer = httpx.request(method, guarded.url + path, headers=headers, content=b"{")
            assert answer.status_code == 401, path
            error = answer.json()["error"]
            assert error.get("param", "authorization") == "authorization" and "authorization: " in error["message"]
            assert answer.headers["www-authenticate"] == "Bearer"
            assert not any(known in answer.text for known in KEYS)
    for path in ("/health", "/ready"):
        assert httpx.get(guarded.url + path).status_code == 200


@pytest.mark.parametrize("key", [*KEYS])
def test_each_key_opens(guarded: Server, key: str) -> None:
    body = {"text": "a", "sampling_params": {"max_new_tokens": 1}}
    for scheme in ("Bearer", "bearer"):
        headers = {"authorization": f"{scheme} {key}"}
        assert httpx.post(f"{guarded.url}/generate", json=body, headers=headers).status_code == 200


def test_42_memory_does_not_grow_with_requests(guarded: Server) -> None:
    def ask(first: int, end: int) -> None:
        for number in range(first, end):
            params = {"max_new_tokens": 2, "n": 1 + number % 2, "stop": f"never {number}"}
            body = {"text": f"request {number}", "rid": f"name {number}", "sampling_params": params}
            assert guarded.post("/generate", {**body, "stream": number % 3 == 0}).status_code == 200
            if number % 10 == 0:
                assert guarded.post("/generate", {"text": "", "zeta": number}).status_code == 400

    ask(0, 200)
    before = guarded.resident_bytes()
    ask(200, 500)
    assert guarded.resident_bytes() - before < 16 * 2**20


@pytest.mark.parametrize("path", POSTS)
def test_40_no_state_is_changed_by_get(server: Server, path: str) -> None:
    answer = server.http.get(path)
    assert (answer.status_code, answer.headers["allow"]) == (405, "POST")
    assert server.http.head(path).status_code == 405


@pytest.mark.parametrize("path", [*POSTS, *GETS, "/health"])
def test_no_other_origin_is_let_in(server: Server, path: str) -> None:
    asked = {"origin": "https://evil.example", "access-control-request-method": "POST"}
    for method in ("OPTIONS", "POST", "GET"):
        answer = server.http.request(method, path, headers=asked)
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert method != "OPTIONS" or answer.status_code == 405
        assert method != "POST" or answer.status_code == (403 if path in (*POSTS, *BOTH) else 405)


def test_a_form_cannot_stand_in_for_json(server: Server) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""):
        answer = server.http.post("/generate", content=b'{"text": "a"}', headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-type")


@pytest.mark.parametrize("path", POSTS)
def test_a_body_that_is_too_large_is_refused(server: Server, path: str) -> None:
    data = b" " * (BODY_BYTES_MAX + 1)
    answer = server.http.post(path, content=data, headers={"content-type": "application/json"})
    assert answer.status_code == 413 and answer.json()["error"]["message"].startswith("body: ")


def test_headers_that_are_too_large_are_refused(server: Server) -> None:
    place = urlparse(server.url)
    line = socket.create_connection((place.hostname, place.port))
    line.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: " + b"a" * HEADER_BYTES_MAX)  # and more to come
    assert line.recv(100).startswith(b"HTTP/1.1 4")
    line.close()


@pytest.mark.parametrize("path", ["/", "/generate/", "//evil.example/generate", "/docs", "/v1", "/../etc/passwd"])
def test_what_does_not_exist_is_not_found(server: Server, path: str) -> None:
    answer = server.http.post(server.url + path, json={}, follow_redirects=False)
    assert answer.status_code == 404
    assert set(answer.json()) == {"error"}


def test_errors_say_nothing_of_the_inside(server: Server) -> None:
    answers = [server.http.post("/generate", content=b"{", headers={"content-type": "application/json"})]
    answers += [server.post("/generate", body) for body in ({"text": 1}, {"text": "word " * 3000}, {"lora_path": "/x"})]
    answers += [server.post("/v1/chat/completions", {"messages": [{"role": "tool", "content": "a"}]})]
    answers += [server.http.get("/nowhere"), server.http.get("/generate"), server.http.get("/v1/models/none")]
    for answer in answers:
        assert 400 <= answer.status_code < 500
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
        for inner in ("Traceback", ".py", "/src", "line 1,", "msgspec", "starlette", "roost.", "0x"):
            assert inner not in answer.text, answer.text
        assert "server" not in answer.headers
