"""Gate: by which names the server may be called, and pages of which origins may use it.

A page can give its own name the server's address (DNS rebinding) and then is of the same origin as the server; so a
name that is not known is refused, whatever is asked for. Pages of other origins get nothing unless their origin is
allowed: then browsers are told so. `serve` puts it around the application, which asks it about origins.
"""

import ipaddress
import re
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roost.server.config import ServerConfig
from roost.server.context import error_body, json_response

ANY = "*"
_HOST = re.compile(r"(?:\[([^\[\]]*)\]|([^:\[\]]*))(?::[0-9]*)?")
_PREFLIGHT_S = "600"  # for which a browser may remember what it was told


class Hosts:
    """The names and addresses of this server."""

    def __init__(self, config: ServerConfig, has_keys: bool) -> None:
        bound = _address(config.host)
        # A page does not know the key, so by whatever name it calls, it gets nothing.
        self._any = ANY in config.allow_host or (has_keys and not config.allow_host)
        self._any_address = not config.host or (bound is not None and bound.is_unspecified)
        self._names = {"localhost", _plain(config.host), *map(_plain, config.allow_host)}
        if self._any_address:
            self._names.add(_plain(socket.gethostname()))

    def has(self, host: str | None) -> bool:
        """Whether a Host header names this server; who sends none is no browser."""
        if self._any or host is None:
            return True
        found = _HOST.fullmatch(host)
        name = _plain(found[1] or found[2] or "") if found else ""
        address = _address(name)
        if address is not None and (self._any_address or address.is_loopback):
            return True  # an address cannot be given to others, as a name can
        return name != "" and name in self._names


class Origins:
    """The origins whose pages may use this server, besides its own."""

    def __init__(self, allowed: tuple[str, ...]) -> None:
        self._allowed = {each.lower() for each in allowed}

    def __bool__(self) -> bool:
        return bool(self._allowed)

    def grant(self, origin: str | None) -> dict[str, str]:
        """What browsers are told so that a page of this origin may read an answer; nothing if it may not."""
        if origin is None:
            return {}
        if origin.lower() in self._allowed:
            return {"access-control-allow-origin": origin, "access-control-allow-credentials": "true"}
        return {"access-control-allow-origin": ANY} if ANY in self._allowed else {}


def is_own(origin: str, host: str | None) -> bool:
    """Whether a page of this origin was loaded from this server."""
    try:
        return urlsplit(origin).netloc == host
    except ValueError:
        return False


class Gate:
    """An application that answers to its own names, and to pages of allowed origins."""

    def __init__(self, app: ASGIApp, hosts: Hosts, origins: Origins) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on if it is meant for this server."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        grant = self._origins.grant(headers.get("origin"))

        async def told(message: Message) -> None:
            if self._origins and message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.update(grant)
                answer.add_vary_header("origin")
                if grant:
                    answer["access-control-expose-headers"] = "retry-after"
            await send(message)

        if not self._hosts.has(headers.get("host")):
            said = "host: is not a name of this server; --allow-host adds one"
            await json_response(error_body(421, said, "host"), 421)(scope, receive, send)
        elif grant and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, told)
        else:
            await self._app(scope, receive, told)


def _preflight(asked: Headers) -> Response:
    """What a browser asks before it sends what a form could not."""
    answer = Response(status_code=204)
    answer.headers["access-control-allow-methods"] = "GET, POST, DELETE"
    answer.headers["access-control-allow-headers"] = asked.get("access-control-request-headers", "")
    answer.headers["access-control-max-age"] = _PREFLIGHT_S
    if asked.get("access-control-request-private-network") == "true":
        answer.headers["access-control-allow-private-network"] = "true"
    return answer


def _plain(name: str) -> str:
    """A name or an address in the one form in which it is compared."""
    address = _address(name)
    return str(address) if address is not None else name.lower().removesuffix(".")


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
