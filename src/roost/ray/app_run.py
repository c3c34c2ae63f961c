"""App run: one HTTP request or WebSocket that a replica answers, as ASGI messages in batches.

Runs the server's application as uvicorn would: whoever gave the request may leave, and the application learns it as a
disconnect. Messages that wait at the same moment leave as one batch. Called by the replica.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

AT_WORK = "roost.at_work"  # a message of our own: whether a WebSocket's client waits for something
_ASGI = {"version": "3.0", "spec_version": "2.3"}  # whose streams listen for disconnects
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_SCOPE_MORE = ("client", "server", "subprotocols")
GOING_AWAY = 1001


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request on its way to a replica."""

    scope: dict[str, Any]
    body: bytes = b""
    socket: str = ""  # a name for a WebSocket, to send to

    @staticmethod
    def of(scope: Scope, body: bytes = b"", socket: str = "") -> "Call":
        """A call with what a scope has that is data."""
        kept = {name: scope[name] for name in (*_SCOPE, *_SCOPE_MORE) if name in scope}
        return Call(scope=kept, body=body, socket=socket)


@dataclass(eq=False)
class AppRun:
    """One call, and what is said about it in both directions."""

    call: Call
    _in: "asyncio.Queue[Message]" = field(default_factory=asyncio.Queue)
    _out: "asyncio.Queue[Message | None]" = field(default_factory=asyncio.Queue)

    def begin(self, app: ASGIApp, follow: Callable[["asyncio.Task[None]"], object]) -> None:
        """Run the application; whoever follows its task keeps it until it has ended."""
        if self.call.scope["type"] == "http":
            self.put({"type": "http.request", "body": self.call.body, "more_body": False})
        else:
            self.put({"type": "websocket.connect"})
        follow(asyncio.create_task(self._run(app)))

    def put(self, message: Message) -> None:
        """Hand the application a message of its client."""
        self._in.put_nowait(message)

    async def batches(self) -> AsyncGenerator[list[Message], None]:
        """What the application sends, to its end; whoever leaves before has disconnected."""
        try:
            while True:
                batch = [await self._out.get()]
                while not self._out.empty():
                    batch.append(self._out.get_nowait())
                said = [message for message in batch if message is not None]
                yield said
                if len(said) < len(batch):
                    return
        finally:
            if self.call.scope["type"] == "http":
                self.put({"type": "http.disconnect"})
            else:
                self.put({"type": "websocket.disconnect", "code": GOING_AWAY})

    async def _run(self, app: ASGIApp) -> None:
        scope = {**self.call.scope, "asgi": _ASGI, "state": {"set_at_work": self._set_at_work}, "extensions": {}}
        scope["extensions"] = {"websocket.http.response": {}}
        try:
            await app(scope, self._in.get, self._out.put)
        finally:
            self._out.put_nowait(None)

    def _set_at_work(self, value: bool) -> None:
        self._out.put_nowait({"type": AT_WORK, "value": value})
