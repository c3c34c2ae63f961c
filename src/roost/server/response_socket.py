"""Responses over a WebSocket: a client sends `response.create` messages, and gets the events of each response.

Lanes (`stream_id`) are in order within themselves and run beside each other. A response that is not stored is kept for
the connection, so that the next one can follow it. A socket that dies ends what it has running; turns that were
committed stay. Limited: lanes, responses at once, those that wait, and the time a socket is open. Called by the app.
"""

import asyncio
from contextlib import aclosing, suppress
from functools import partial
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from roost.errors import CapacityError, RequestError
from roost.server.body_reader import parse, record_of
from roost.server.detached import detached
from roost.server.response_schema import ResponseBody
from roost.server.response_store import ResponseStore
from roost.server.response_turns import prepare
from roost.server.responses import error_at, error_of
from roost.server.state import ServerState
from roost.values import shown

LANES_MAX = 64
ACTIVE_MAX = 16  # responses that run at once on one socket
WAITING_MAX = 64  # responses of one socket that wait for their lane or for a place
OPEN_S = 3600  # a socket is closed after so long
KEPT_MAX = 64  # responses that are kept for the connection alone
_KEPT_BYTES_MAX = 2**24
_STREAM_ID_LEN_MAX = 256
_CREATE, _STEER = "response.create", "response.steer"
_TOO_LONG_OPEN = "websocket_connection_limit_reached"
_GOING_AWAY = 1001


class ResponseSocket:
    """One WebSocket."""

    def __init__(self, websocket: WebSocket, server: ServerState) -> None:
        self._websocket = websocket
        self._server = server
        self._lanes: dict[str | None, asyncio.Queue[dict[str, Any]]] = {}
        self._lane_tasks = asyncio.TaskGroup()
        self._places = asyncio.Semaphore(ACTIVE_MAX)
        self._num_pending = 0  # responses that were asked for and have not ended
        self._sending = asyncio.Lock()
        self._kept = ResponseStore(
            count_max=KEPT_MAX, bytes_max=_KEPT_BYTES_MAX, age_s_max=OPEN_S, uses=server.session_uses
        )

    async def run(self) -> None:
        """Read messages until the client leaves, does not read its own, or has been there for too long."""
        try:
            async with asyncio.timeout(OPEN_S), self._lane_tasks:
                await self._read()
        except* WebSocketDisconnect:
            pass
        except* TimeoutError:
            said = {"message": f"the socket was open for {OPEN_S} s", "code": _TOO_LONG_OPEN}
            with suppress(WebSocketDisconnect):
                await self._refuse(None, 400, said)
        finally:
            self._kept.clear()
            if self._websocket.client_state is WebSocketState.CONNECTED:
                with suppress(RuntimeError, WebSocketDisconnect):
                    await self._websocket.close(_GOING_AWAY)

    async def _read(self) -> None:
        while True:
            message = await self._websocket.receive()
            if message["type"] == "websocket.disconnect":
                raise WebSocketDisconnect(message.get("code", _GOING_AWAY))  # ends the lanes too
            data = message.get("text")
            data = message.get("bytes") or b"" if data is None else data.encode("utf-8", "surrogatepass")
            lane: str | None = None
            try:
                values = await self._server.offload.run(len(data), partial(parse, data))
                lane = _lane_of(values)
                await self._take(lane, values)
            except (RequestError, CapacityError) as error:
                await self._refuse_error(lane, error)

    async def _take(self, lane: str | None, values: dict[str, Any]) -> None:
        """A message that was read."""
        kind = values.pop("type", None)
        if kind == _STEER:
            await self._refuse_steering(lane, values)
            return
        if kind != _CREATE:
            raise RequestError(400, "type", f"must be {_CREATE}, got {shown(kind)}")
        if self._num_pending >= ACTIVE_MAX + WAITING_MAX:
            raise CapacityError(429, f"{self._num_pending} responses of this socket have not ended")
        if lane not in self._lanes:
            if len(self._lanes) >= LANES_MAX:
                raise CapacityError(429, f"stream_id: {LANES_MAX} lanes of this socket are in use")
            self._lanes[lane] = asyncio.Queue()
            self._server.follow(self._lane_tasks.create_task(self._run_lane(lane)))
        self._num_pending += 1
        self._set_at_work()
        self._lanes[lane].put_nowait(values)

    async def _run_lane(self, lane: str | None) -> None:
        """Run the responses of a lane one after the other, until none is left."""
        queue = self._lanes[lane]
        while not queue.empty():
            values = queue.get_nowait()
            try:
                async with self._places:
                    await self._run_response(lane, values)
            except (RequestError, CapacityError) as error:
                await self._refuse_error(lane, error)
            finally:
                self._num_pending -= 1
                self._set_at_work()
        del self._lanes[lane]

    async def _run_response(self, lane: str | None, values: dict[str, Any]) -> None:
        self._server.check_ready()
        body = record_of(values, ResponseBody)
        if body.background:
            raise RequestError(400, "background", "must be false on a WebSocket")
        body.stream = True  # there is no other way here
        turn = await prepare(detached(self._websocket), body, local=self._kept)
        async with aclosing(turn.events()) as events:
            async for event in events:
                await self._send(lane, event)

    def _set_at_work(self) -> None:
        """Have the connection be evicted only while its client waits for nothing."""
        self._websocket.scope["state"]["set_at_work"](self._num_pending > 0)

    async def _refuse_error(self, lane: str | None, error: RequestError | CapacityError) -> None:
        status, body = error_at(self._websocket, error.status, error_of(error))
        if isinstance(error, RequestError) and (error.status, error.param) == (404, "previous_response_id"):
            status = 400  # as it is documented for sockets
        await self._refuse(lane, status, body["error"])

    async def _refuse(self, lane: str | None, status: int, error: dict[str, Any]) -> None:
        usual = {"type": "invalid_request_error", "param": None, "code": None}
        await self._send(lane, {"type": "error", "status": status, "error": {**usual, **error}})

    async def _refuse_steering(self, lane: str | None, values: dict[str, Any]) -> None:
        """Say that a running response cannot be steered, with the input, so that it can be sent in the next one."""
        error = {
            "type": "invalid_request_error",
            "code": "steering_not_supported",
            "message": "response.steer: is not supported; send the input with the next response.create",
        }
        steer = {name: values.get(name) for name in ("input", "previous_response_id")}
        await self._send(lane, {"type": "response.steer.failed", "sequence_number": 0, "error": error, "steer": steer})

    async def _send(self, lane: str | None, event: dict[str, Any]) -> None:
        """Send an event; a client that reads nothing for too long is given up."""
        named = event if lane is None else {**event, "stream_id": lane}
        async with self._sending:
            try:
                async with asyncio.timeout(self._server.config.stall_s):
                    await self._websocket.send_text(msgspec.json.encode(named).decode())
            except TimeoutError:
                raise WebSocketDisconnect(_GOING_AWAY) from None


def _lane_of(values: dict[str, Any]) -> str | None:
    """The lane that a message is for."""
    lane = values.pop("stream_id", None)
    if lane is not None and not (isinstance(lane, str) and 0 < len(lane) <= _STREAM_ID_LEN_MAX):
        raise RequestError(400, "stream_id", f"must be a text of 1 to {_STREAM_ID_LEN_MAX} characters")
    return lane


async def responses_socket(websocket: WebSocket) -> None:
    """GET /v1/responses, upgraded to a WebSocket."""
    server: ServerState = websocket.app.state.server
    await websocket.accept()
    await ResponseSocket(websocket, server).run()
