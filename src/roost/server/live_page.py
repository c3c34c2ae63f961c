"""Live page: `/live` and its files, the frames it draws, and who owns each page of the KV pools as data.

The files hold no data and need no key; a strict content security policy keeps anything else from running in the page.
Frames and pages are all clients' together, and need an admin's key like `/metrics`. Called by the app's routes.
"""

from importlib.resources import files
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import roost
from roost.errors import CapacityError, RequestError
from roost.messages import Event, Frame, GetFrame, GetPages
from roost.server.keys import check_admin
from roost.server.live_hub import LiveHub
from roost.server.responses import event_stream, json_response
from roost.server.state import ServerState

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(request: Request) -> Response:
    """GET /live."""
    return _file("index.html")


async def asset(request: Request) -> Response:
    """GET /live/{file}."""
    return _file(request.path_params["file"])


def _file(name: str) -> Response:
    folder = files("roost.server") / "live"
    kind = name.rpartition(".")[2]
    if name not in {each.name for each in folder.iterdir()} or kind not in _TYPES:
        raise RequestError(404, "path", f"there is no file {name!r} of the live page")
    return Response((folder / name).read_bytes(), media_type=_TYPES[kind], headers=_HEADERS)


async def frames(request: Request) -> Response:
    """GET /live/frames."""
    check_admin(request)
    server: ServerState = request.app.state.server
    if server.live is None:
        server.live = LiveHub(_WatchedEngine(server))
    return await event_stream(request, server.live.frames())


async def pages(request: Request) -> Response:
    """GET /v1/pages."""
    check_admin(request)
    server: ServerState = request.app.state.server
    server.check_alive()
    answer = await server.ask(GetPages())
    if not isinstance(answer, Frame):
        raise CapacityError(503, "the engine is not running")
    told = answer.told
    for pool in told["pools"]:
        pool["pages"] = [
            {"first": first, "count": count, "kind": told["kinds"][kind], "owner": told["owners"].get(key, "")}
            for first, count, kind, key in pool.pop("runs")
        ]
    return json_response({"page_size": told["page_size"], "pools": told["pools"]})


class _WatchedEngine:
    """The server as the hub sees it."""

    def __init__(self, server: ServerState) -> None:
        self._server = server

    @property
    def health(self) -> str:
        """Whether the engine loads, works or is gone."""
        if self._server.engine.is_gone.is_set() or self._server.is_draining:
            return "gone"
        try:
            self._server.check_alive()
        except CapacityError:
            return "loading"
        return "ok"

    def tell(self, command: GetFrame) -> None:
        """Send a command whose answer nobody waits for."""
        if self.health == "ok":
            self._server.engine.tell(command)

    async def ask(self, command: GetFrame, limit_s: float) -> Event:
        """The engine's answer."""
        return await self._server.ask(command, limit_s=limit_s)

    def dressed(self, told: dict[str, Any]) -> dict[str, Any]:
        """A frame with health, refusals and, where they are shown, texts; a whole one also with names."""
        server = self._server
        is_late = told["totals"]["step_age_ms"] > server.config.health_step_s * 1000
        told["health"] = "stalled" if is_late else "ok"
        told["totals"]["refusals"] = server.metrics.refused()
        if told["whole"]:
            told |= {"version": roost.__version__, "model": server.model_name, "shows_text": server.config.live_text}
        for session in told["sessions"]:
            session["idle_ms"] = max(0.0, told["now_ms"] - session.pop("used_ms"))
        if told["tree"] is not None:
            tree = dict(told["tree"])
            tokens = tree.pop("tokens")
            if server.config.live_text:
                tree["texts"] = [server.language.tokenizer.decode([token], skip_special=False) for token in tokens]
            told["tree"] = tree
        return told
