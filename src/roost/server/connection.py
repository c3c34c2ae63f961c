"""Connection: one client's connection, with limits on how long the server waits for anything on it.

A request's headers, its body, the next request and the reading of a response each have a deadline as a whole, so a
client cannot win time by sending byte after byte. Tells `Connections` what it waits for. A WebSocket keeps the slot of
the connection that it was. uvicorn makes one for each socket; HTTP itself is uvicorn's and h11's.
"""

import asyncio
from collections.abc import Callable
from enum import Enum, auto
from functools import partial
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from roost.server.config import ServerConfig
from roost.server.connections import Connections, Wait
from roost.server.early_refusals import SERVER_FULL, SLOW_BODY, SLOW_HEADERS, full
from roost.server.responses import error_body, json_response

_PROBES = ("/health", "/ready")


class Phase(Enum):
    """Whose turn it is, and to do what."""

    HEADERS = auto()  # the client's: send a request's headers
    BODY = auto()  # the client's: send the rest of the body
    RESPONSE = auto()  # the server's: respond
    NEXT = auto()  # the client's: send another request, if it has one
    CLOSING = auto()  # the client's: read the rest of the response


_WAITS = {
    Phase.HEADERS: Wait.REQUEST,
    Phase.BODY: Wait.BODY,
    Phase.RESPONSE: None,
    Phase.NEXT: Wait.REQUEST,
    Phase.CLOSING: Wait.REQUEST,
}


class Connection(H11Protocol):
    """uvicorn's protocol, with deadlines and a connection slot."""

    def __init__(self, *args: Any, limits: ServerConfig, connections: Connections, **options: Any) -> None:
        super().__init__(*args, **options)
        self._connections = connections
        self._limits_s = {
            Phase.HEADERS: limits.header_s,
            Phase.BODY: limits.body_s,
            Phase.NEXT: limits.keep_alive_s,
            Phase.CLOSING: limits.stall_s,
        }
        self._since: tuple[Phase, object] | None = None  # the phase that the timer is for, and of which request
        self._timer: asyncio.TimerHandle | None = None
        self._num_unread = 0  # unsent bytes of the response when the timer was set
        self._is_upgraded = False  # a WebSocket has taken over, in this connection's slot
        self.app_state = {**self.app_state, "set_at_work": self._set_at_work}  # for whoever speaks on the WebSocket
        self.ws_protocol_class = partial(_WebSocket, on_lost=self._give_up_slot)  # type: ignore[assignment]

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a slot, or be refused."""
        super().connection_made(transport)
        slots = self._connections.enter(self, self.client[0] if self.client else "")
        if slots is None:
            transport.write(full())
            transport.close()
        elif slots is self._connections.probe_slots:
            self.app = partial(_only_probes, self.app)
        self._update_phase()

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the slot."""
        super().connection_lost(exc)
        self._give_up_slot()

    def handle_websocket_upgrade(self, event: h11.Request) -> None:
        """Leave the socket to a WebSocket; the client decides when to speak, so no deadline is left."""
        self._is_upgraded = True
        if self._timer is not None:
            self._timer.cancel()
        super().handle_websocket_upgrade(event)

    def _give_up_slot(self) -> None:
        self._connections.closed(self)
        if self._timer is not None:
            self._timer.cancel()

    def _set_at_work(self, is_at_work: bool) -> None:
        """Whether the client of a WebSocket waits for the server: if not, it may be evicted."""
        self._connections.wait(self, None if is_at_work else Wait.REQUEST)

    def data_received(self, data: bytes) -> None:
        """Parse what was received."""
        try:
            super().data_received(data)
        except h11.LocalProtocolError:  # garbage after a request that was answered: HTTP has no way to report it
            self.transport.abort()
        self._update_phase()

    def on_response_complete(self) -> None:
        """The response was handed to the transport."""
        super().on_response_complete()
        self._update_phase()

    def evict(self) -> None:
        """Close at once."""
        self.transport.abort()

    def _phase(self) -> Phase:
        if self.transport.is_closing():
            return Phase.CLOSING
        if self.conn.their_state is h11.SEND_BODY:
            return Phase.BODY
        if self.cycle is not None and not self.cycle.response_complete:
            return Phase.RESPONSE
        has_begun = self.cycle is None or self.conn.trailing_data[0]
        return Phase.HEADERS if has_begun else Phase.NEXT

    def _update_phase(self) -> None:
        """Start the timer of a phase when the phase begins."""
        if self._is_upgraded:
            return
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
        self._timer = None if limit_s is None else self.loop.call_later(limit_s, self._on_timeout)
        self._num_unread = self.transport.get_write_buffer_size()

    def _on_timeout(self) -> None:
        phase = self._phase()
        if phase is not Phase.CLOSING:
            if phase is Phase.HEADERS and self.conn.trailing_data[0]:
                self.transport.write(SLOW_HEADERS)
            elif phase is Phase.BODY and not self.cycle.response_started:
                self.transport.write(SLOW_BODY)
            self.transport.close()
        elif self._since == (phase, self.cycle) and self.transport.get_write_buffer_size() >= self._num_unread:
            self.transport.abort()  # the client has read nothing since
        else:
            self._since = None
        self._update_phase()


class _WebSocket(WebSocketsSansIOProtocol):
    """uvicorn's protocol for WebSockets, which tells when its socket is closed."""

    def __init__(self, *args: Any, on_lost: Callable[[], None], **options: Any) -> None:
        super().__init__(*args, **options)
        self._on_lost = on_lost

    def connection_lost(self, exc: Exception | None) -> None:
        """Free the slot."""
        super().connection_lost(exc)
        self._on_lost()


async def _only_probes(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """The application for a slot that is for probes: answers one health probe, and closes."""

    async def last(message: Message) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], (b"connection", b"close")]}
        await send(message)

    response = app if scope["path"] in _PROBES else json_response(error_body(503, SERVER_FULL, None), 503)
    await response(scope, receive, last)
