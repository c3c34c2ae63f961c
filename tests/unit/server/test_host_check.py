"""Names of a server, by where it listens and what it was told."""

import asyncio
import socket
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from roost.server.config import ServerConfig
from roost.server.host_check import AllowedHosts, AllowedOrigins, HostCheck, is_same_origin

NAMES = ("localhost", "127.0.0.1", "::1", "10.1.2.3", "fd00::5", "box.example", "evil.example", socket.gethostname())
LOOPBACK = {"localhost", "127.0.0.1", "::1"}
ADDRESSES = LOOPBACK | {"10.1.2.3", "fd00::5"}
CASES: tuple[tuple[dict[str, Any], bool, set[str]], ...] = (
    ({}, False, LOOPBACK),
    ({"host": "10.1.2.3"}, False, LOOPBACK | {"10.1.2.3"}),
    ({"host": "box.example"}, False, LOOPBACK | {"box.example"}),
    ({"host": "0.0.0.0"}, False, ADDRESSES | {socket.gethostname()}),
    ({"host": "::"}, False, ADDRESSES | {socket.gethostname()}),
    ({"host": ""}, False, ADDRESSES | {socket.gethostname()}),
    ({"host": "0.0.0.0", "allow_host": ("Box.example.",)}, False, ADDRESSES | {socket.gethostname(), "box.example"}),
    ({"allow_host": ("fd00:0:0::5",)}, False, LOOPBACK | {"fd00::5"}),
    ({"allow_host": ("*",)}, False, set(NAMES)),
    ({"host": "0.0.0.0"}, True, set(NAMES)),  # whoever has no key gets nothing by any name
    ({}, True, set(NAMES)),
    ({"allow_host": ("box.example",)}, True, LOOPBACK | {"box.example"}),
)


@pytest.mark.parametrize(("options", "has_keys", "own"), CASES)
def test_a_server_has_these_names_and_no_others(options: dict[str, Any], has_keys: bool, own: set[str]) -> None:
    hosts = AllowedHosts(ServerConfig(**options), has_keys)
    for port in ("", ":8000"):
        assert {name for name in NAMES if hosts.has((f"[{name}]" if ":" in name else name) + port)} == own
    assert hosts.has(None)


def test_any_origin_may_be_allowed_without_its_cookies() -> None:
    origins = AllowedOrigins(("*",))
    assert origins.cors_headers("https://a.example") == {"access-control-allow-origin": "*"}
    assert origins.cors_headers(None) == {}
    assert not AllowedOrigins(()).cors_headers("https://a.example")


@pytest.mark.parametrize("origin", ["http://[", "http://]", "http://[a]b", "http://[::1", "", "null", "http://\u2100"])
def test_what_is_no_origin_is_not_our_own(origin: str) -> None:
    assert not is_same_origin(origin, "localhost")
    assert is_same_origin("http://localhost", "localhost")


@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE", "OPTIONS"])
def test_whatever_is_asked_by_another_name_is_refused(method: str) -> None:
    async def ask(name: str) -> int:
        checked = HostCheck(
            PlainTextResponse("inside"), AllowedHosts(ServerConfig(), has_keys=False), AllowedOrigins(())
        )
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=checked), base_url=f"http://{name}") as http:
            return (await http.request(method, "/health")).status_code

    assert asyncio.run(ask("localhost")) == 200
    assert asyncio.run(ask("evil.example")) == 421
