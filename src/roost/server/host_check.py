"""Host check: the names by which the server may be called, and the origins whose pages may use it (CORS).

A web page can point its own domain name at the server's address (DNS rebinding) and then counts as the same origin; so
every request with an unknown Host is refused. Pages of other origins are allowed only if their origin is listed.
`serve` wraps the application in it; the application asks it about origins.
"""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roost.server.config import ServerConfig
from roost.server.responses import error_body, json_response

ANY = "*"
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
_PREFLIGHT_S = "600"  # a browser may cache the answer to a preflight for this long


class AllowedHosts:
    """The names and addresses of this server."""

    def __init__(self, config: ServerConfig, has_keys: bool) -> None:
        bound = _address(config.host)
        # Without the key a page gets nothing, whatever name it uses.
        self._any = ANY in config.allow_host or (has_keys and not config.allow_host)
        self._any_address = not config.host or (bound is not None and bound.is_unspecified)
        self._names = {"localhost", _plain(config.host), *map(_plain, config.allow_host)}
        if self._any_address:
            self._names.add(_plain(socket.gethostname()))

    def has(self, host: str | None) -> bool:
        """Whether a Host header names this server; browsers always send one, so none is fine."""
        if self._any or host is None:
            return True
        found = _HOST.fullmatch(host)
        name = _plain(found[1] or found[2] or "") if found else ""
        address = _address(name)
        if address is not None and (self._any_address or address.is_loopback):
            return True  # DNS rebinding needs a name; an address cannot be pointed elsewhere
        return name != "" and name in self._names


class AllowedOrigins:
    """The origins whose pages may use this server, besides its own."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = {each.lower() for each in allowed}

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def cors_headers(self, origin: str | None) -> dict[str, str]:
        """The headers that let a page of this origin read a response; empty if it may not."""
        if origin is None:
            return {}
        if origin.lower() in self._allowed:
            return {"access-control-allow-origin": origin, "access-control-allow-credentials": "true"}
        return {"access-control-allow-origin": ANY} if ANY in self._allowed else {}


def is_same_origin(origin: str, host: str | None) -> bool:
    """Whether a page of this origin was loaded from this server."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


class HostCheck:
    """Wraps an application: refuses requests for other hosts, and adds CORS headers for allowed origins."""

    def __init__(self, app: ASGIApp, hosts: AllowedHosts, origins: AllowedOrigins) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if its Host names this server."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        cors = self._origins.cors_headers(headers.get("origin"))

        async def with_cors(message: Message) -> None:
            if self._origins and message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.update(cors)
                answer.add_vary_header("origin")
                if cors:
                    answer["access-control-expose-headers"] = "retry-after"
            await send(message)

        if not self._hosts.has(headers.get("host")):
            said = "host: is not a name of this server; --allow-host adds one"
            await json_response(error_body(421, said, "host"), 421)(scope, receive, send)
        elif cors and scope.get("method") == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, with_cors)
        else:
            await self._app(scope, receive, with_cors)


def _preflight(asked: Headers) -> Response:
    """The answer to a CORS preflight."""
    answer = Response(status_code=204)
    answer.headers["access-control-allow-methods"] = "GET, POST, DELETE"
    answer.headers["access-control-allow-headers"] = asked.get("access-control-request-headers", "")
    answer.headers["access-control-max-age"] = _PREFLIGHT_S
    if asked.get("access-control-request-private-network") == "true":
        answer.headers["access-control-allow-private-network"] = "true"
    return answer


def _plain(name: str) -> str:
    """A name or an address in canonical form, for comparison."""
    address = _address(name)
    return str(address) if address is not None else name.lower().removesuffix(".")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
