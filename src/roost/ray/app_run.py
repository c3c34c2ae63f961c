"""App run: one HTTP request or WebSocket that a replica answers, as ASGI messages in batches.

Runs the server's application as uvicorn would: whoever gave the request may leave, and the application learns it as a
disconnect. A batch costs more than what is in it, so that those of a long stream have some time between them. Called
by the replica.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from starlette.types import ASGIApp, Message, Scope

AT_WORK = "roost.at_work"  # a message of our own: whether a WebSocket's client waits for something
_ASGI = {"version": "3.0", "spec_version": "2.3"}  # whose streams listen for disconnects
_SCOPE = ("type", "http_version", "method", "scheme", "path", "raw_path", "query_string", "root_path", "headers")
_SCOPE_MORE = ("client", "server", "subprotocols")
GOING_AWAY = 1001
SPACING_S = 0.01  # least time between batches of one stream: each costs the same, however much it has
_UNPACED = 4  # batches before that holds: the headers, the first tokens


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
    _has_ended: asyncio.Event = field(default_factory=asyncio.Event)

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
        number, sent_at, loop = 0, 0.0, asyncio.get_running_loop()
        try:
            while True:
                batch = [await self._out.get()]
                if number >= _UNPACED and (wait_s := sent_at + SPACING_S - loop.time()) > 0:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._has_ended.wait(), wait_s)
                while not self._out.empty():
                    batch.append(self._out.get_nowait())
                said = [message for message in batch if message is not None]
                number, sent_at = number + 1, loop.time()
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
            self._has_ended.set()

    def _set_at_work(self, value: bool) -> None:
        self._out.put_nowait({"type": AT_WORK, "value": value})
