"""Connection: one client's line, with a limit to how long the server waits for anything on it.

A request's headers, its body, the next request and the reader of an answer each have their time as a whole, so that
bytes that drip do not help. Says to `Connections` what it waits for. Made by uvicorn for each socket; HTTP itself is
uvicorn's and h11's.
"""

import asyncio
from enum import Enum, auto
from functools import partial
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from roost.server.config import ServerConfig
from roost.server.connections import Connections, Wait
from roost.server.context import error_body, json_response
from roost.server.early_refusals import NO_ROOM, SLOW_BODY, SLOW_HEADERS, full

_PROBES = ("/health", "/ready")


class Phase(Enum):
    """Who has to do what next."""

    HEADERS = auto()  # the client, to send a request's headers
    BODY = auto()  # the client, to send the rest of its body
    ANSWER = auto()  # the server
    NEXT = auto()  # the client, if it has another request
    CLOSING = auto()  # the client, to read what is left of an answer


_WAITS = {
    Phase.HEADERS: Wait.REQUEST,
    Phase.BODY: Wait.BODY,
    Phase.ANSWER: None,
    Phase.NEXT: Wait.REQUEST,
    Phase.CLOSING: Wait.REQUEST,
}


class Connection(H11Protocol):
    """uvicorn's protocol, with times and a place."""

    def __init__(self, *args: Any, limits: ServerConfig, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections = connections
        self._limits_s = {
            Phase.HEADERS: limits.header_s,
            Phase.BODY: limits.body_s,
            Phase.NEXT: limits.keep_alive_s,
            Phase.CLOSING: limits.stall_s,
        }
        self._since: tuple[Phase, object] | None = None  # the phase that is timed, and of which request
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # bytes of an answer when its reader was last looked after

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a place, or be refused."""
        super().connection_made(transport)
        room = self._connections.enter(self, self.client[0] if self.client else "")
        if room is None:
            transport.write(full())
            transport.close()
        elif room is self._connections.lobby:
            self.app = partial(_only_probes, self.app)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        """Give the place back."""
        super().connection_lost(exc)
        self._connections.closed(self)
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Read on."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # nonsense after a request that has its answer: there is no way to say so
            self.transport.abort()
        self._look()

    def on_response_complete(self) -> None:
        """An answer is on its way."""
        super().on_response_complete()
        self._look()

    def evict(self) -> None:
        """Leave at once."""
        self.transport.abort()

    def _phase(self) -> Phase:
        if self.transport.is_closing():
            return Phase.CLOSING
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.ANSWER
        has_begun = self.cycle is None or self.conn.trailing_data[0]
        return Phase.HEADERS if has_begun else Phase.NEXT

    def _look(self) -> None:
        """Where a phase begins, so does its time."""
        phase = self._phase()
        if self._since == (phase, self.cycle):
            return
        self._since = (phase, self.cycle)
        self._connections.wait(self, _WAITS[phase])
        self._set_timer(phase)

    def _set_timer(self, phase: Phase) -> None:
        if self._timer is not None:
            self._timer.cancel()
        limit_s = self._limits_s.get(phase)
        self._timer = None if limit_s is None else self.loop.call_later(limit_s, self._time_is_up)
        self._num_unread = self.transport.get_write_buffer_size()

    def _time_is_up(self) -> None:
        phase = self._phase()
        if phase is not Phase.CLOSING:
            if phase is Phase.HEADERS and self.conn.trailing_data[0]:
                self.transport.write(SLOW_HEADERS)
            elif phase is Phase.BODY and not self.cycle.response_started:
                self.transport.write(SLOW_BODY)
            self.transport.close()
        elif self._since == (phase, self.cycle) and self.transport.get_write_buffer_size() >= self._num_unread:
            self.transport.abort()  # its reader has taken nothing
        else:
            self._since = None
        self._look()


async def _only_probes(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """What can be asked in the lobby: how the server is, once."""

    async def last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    response = app if scope["path"] in _PROBES else json_response(error_body(503, NO_ROOM, None), 503)
    await response(scope, receive, last)
