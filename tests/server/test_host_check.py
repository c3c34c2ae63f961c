"""By which name the server is called, and which pages may use it: a page that takes its name gets nothing."""

import httpx
import pytest

from tests.server.conftest import PAGE
from tests.support.server_process import Server

FOREIGN_HOSTS = (
    *("evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example", "10.0.0.1", "[fe80::1]"),
    *("", ":8000", "[", "]:1", "a b", "localhost@evil.example", "0.0.0.0", "\x01", "é", "localhost:x"),
)
OWN_HOSTS = ("localhost", "LOCALHOST:1", "localhost.", "127.0.0.1", "127.0.0.1:8000", "127.1.2.3", "[::1]", "[::1]:9")
PATHS = (
    ("GET", "/health"),
    ("GET", "/v1/sessions"),
    ("GET", "/metrics"),
    ("POST", "/v1/sessions"),
    ("GET", "/nowhere"),
)


@pytest.mark.parametrize("host", FOREIGN_HOSTS)
def test_a_page_that_takes_the_servers_address_for_its_own_name_gets_nothing(server: Server, host: str) -> None:
    headers = {"host": host.encode(), "origin": f"http://{host}".encode(), "content-type": "application/json"}
    for method, path in PATHS:
        answer = server.http.request(method, path, headers=headers)
        if answer.status_code != 400:  # what is not even HTTP
            assert (answer.status_code, answer.json()["error"]["param"]) == (421, "host"), (method, path)
            assert "--allow-host" in answer.text
    assert server.http.get("/v1/sessions").json()["data"] == []


@pytest.mark.parametrize("host", OWN_HOSTS)
def test_the_server_answers_to_its_own_names(server: Server, host: str) -> None:
    assert server.http.get("/health", headers={"host": host}).status_code == 200


def test_the_server_answers_to_names_it_was_given_and_no_others(friendly: Server) -> None:
    for host, status in (("roost.example", 200), ("Roost.Example:80", 200), ("localhost", 200), ("a.example", 421)):
        assert friendly.http.get("/v1/models", headers={"host": host}).status_code == status


@pytest.mark.parametrize("origin", ["http://[", "http://]", "[", "http://[::1", "null", "", "\x7f", "é", "http://a b"])
def test_an_origin_that_makes_no_sense_is_a_foreign_one(server: Server, origin: str) -> None:
    for method, path in (("POST", "/generate"), ("POST", "/abort_request"), ("DELETE", "/v1/sessions/none")):
        answer = server.http.request(method, path, headers={"origin": origin.encode()}, content=b"{}")
        assert (answer.status_code, answer.json()["error"]["param"]) == (403, "origin"), answer.text
    assert "Traceback" not in server.log


def _asks(origin: str) -> dict[str, str]:
    return {
        "origin": origin,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type,x-stainless-lang",
    }


def test_a_page_of_an_allowed_origin_may_use_the_server(friendly: Server) -> None:
    asked = httpx.options(f"{friendly.url}/v1/completions", headers=_asks(PAGE))
    assert asked.status_code == 204
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-allow-headers"] == _asks(PAGE)["access-control-request-headers"]
    assert {"POST", "GET", "DELETE"} <= set(asked.headers["access-control-allow-methods"].split(", "))
    assert asked.headers["access-control-allow-credentials"] == "true"
    body = {"prompt": "a", "max_tokens": 1}
    for stream in (False, True):
        answer = friendly.post("/v1/completions", {**body, "stream": stream}, headers={"origin": PAGE})
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, PAGE)
        assert answer.headers["vary"].lower() == "origin"
    for headers in ({"origin": PAGE}, {"origin": PAGE, "authorization": "Bearer wrong"}):  # errors can be read, too
        refused = friendly.http.post("/generate", content=b"{", headers=headers)
        assert refused.status_code in (401, 415)
        assert refused.headers["access-control-allow-origin"] == PAGE


@pytest.mark.parametrize(
    "origin", ["https://evil.example", PAGE + ".evil.example", PAGE + ":444", "http://app.example", "null"]
)
def test_a_page_of_another_origin_is_told_nothing_although_one_is_allowed(friendly: Server, origin: str) -> None:
    assert httpx.options(f"{friendly.url}/v1/completions", headers=_asks(origin)).status_code == 405
    for method, path, status in (("POST", "/v1/completions", 403), ("GET", "/v1/models", 200)):
        answer = friendly.http.request(method, path, headers={"origin": origin})
        assert answer.status_code == status
        assert not [name for name in answer.headers if name.startswith("access-control")]
