"""Ingress: what Ray's proxy talks to: reads a request, finds out which replica it needs, and passes answers on.

Never touches a model and keeps no session: what it knows of who holds what, it can lose. It asks all replicas when a
request names what it knows nothing of. A replica that dies ends its requests here with a 503, or with an error as the
stream's last event; nothing is sent a second time. Called by Ray for each HTTP request and WebSocket.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Any

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException, RequestCancelledError
from ray.serve.handle import DeploymentHandle
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from roost.errors import CapacityError, RequestError
from roost.ray.app_run import Call
from roost.ray.every_replica import EVERY, merged
from roost.ray.failures import GONE, error_response, last_event
from roost.ray.places import Address, Places
from roost.ray.replica import REPLICA_HEADER, Batch, named_replica
from roost.ray.socket_bridge import SocketBridge
from roost.ray.wanted import OPENING, wanted_of
from roost.router.placement import Wanted
from roost.server.body_reader import BODY_BYTES_MAX
from roost.server.config import ServerConfig
from roost.server.keys import read_keys, sent_key

ASKED_S = 2.0  # longest that replicas are waited for that are asked what they hold
EVERY_S = 30.0  # longest that all replicas are waited for
LOST = "what this request names was on a replica that has ended, and is gone (--journal keeps sessions)"
_FAILURES = (RayError, RayServeException)
_log = logging.getLogger("roost.server")


class Ingress:
    """The deployment's class, which Ray asks for an application."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig, has_journal: bool) -> None:
        self._gateway = Gateway(replicas, config, has_journal)

    def __serve_build_asgi_app__(self) -> "Gateway":
        """The application, once for each process."""
        return self._gateway


class Gateway:
    """The application."""

    def __init__(self, replicas: DeploymentHandle, config: ServerConfig, has_journal: bool) -> None:
        self._has_journal = has_journal
        self._handle = replicas
        self._answer = replicas.options(method_name="answer", stream=True)
        self._keys = read_keys(config)
        self.places = Places()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or keep a WebSocket, to its end."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await SocketBridge(self, scope, self.client_of(Headers(scope=scope))).run(receive, send)
        else:
            await self._http(scope, receive, send)

    def client_of(self, headers: Headers) -> str:
        """The name of the caller, whom the replica will check."""
        try:
            return self._keys.client_of(sent_key(headers)).name
        except RequestError:
            return ""

    def calls(self, address: Address, call: Call) -> AsyncGenerator[Batch, None]:
        """What a replica answers to a call; a caller that leaves ends it."""
        return _batches(self._answer.remote(address, call), self.places)

    async def tell(self, replica: str, socket: str, message: Message) -> bool:
        """Hand a replica's WebSocket a message; False if it is gone."""
        try:
            return bool(await self._handle.send.remote(self.address(Wanted(), replica), socket, message))
        except _FAILURES:
            return False

    def address(self, wanted: Wanted, only: str | None = None) -> Address:
        """An address for a call."""
        return Address(self.places, wanted, only)

    async def find(self, wanted: Wanted) -> str | None:
        """Who holds what a request names: as is known, or as the replicas say."""
        named = (*wanted.keys, *wanted.labels)
        found = self.places.holder(wanted)
        if found is None and named and len(self.places.replicas) != 1:
            for each in await self._ask("held", ASKED_S, named):
                self.places.learn(*each)
            found = self.places.holder(wanted)
        return found

    async def _ask(self, method: str, within_s: float, *args: Any) -> list[Any]:
        """What all replicas answer, without those that do not."""
        try:
            answers = await self._handle.broadcast(method, *args).results_async(
                timeout_s=within_s, return_exceptions=True
            )
        except (*_FAILURES, TimeoutError):
            return []
        return [each for each in answers if not isinstance(each, BaseException)]

    async def _http(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, headers = scope["path"], Headers(scope=scope)
        try:
            body = await _read(receive)
            if body is None:
                return
            if (scope["method"], path) in EVERY:
                call = Call.of(scope, body)
                await merged(path, await self._ask("answer_whole", EVERY_S, call))(scope, receive, send)
                return
            wanted = wanted_of(path, headers, body, self.client_of(headers))
            only = headers.get(REPLICA_HEADER)
            await self.find(wanted)
            if not self._has_journal and path not in OPENING and self.places.is_lost(wanted):
                raise RequestError(404, "session_id", LOST)
            if only is not None and only not in self.places.replicas:
                raise RequestError(404, REPLICA_HEADER, f"there is no replica {only[:100]!r}")
        except (RequestError, CapacityError) as error:
            await error_response(path, error)(scope, receive, send)
            return
        await self._pass_on(self.calls(self.address(wanted, only), Call.of(scope, body)), path, receive, send)

    async def _pass_on(self, batches: AsyncGenerator[Batch, None], path: str, receive: Receive, send: Send) -> None:
        """Send an answer to its client as it comes; a client that leaves ends it."""
        has_begun = is_stream = False
        reading = asyncio.create_task(_left(receive))
        sending: asyncio.Task[None] | None = None

        async def copy() -> None:
            nonlocal has_begun, is_stream
            async with aclosing(batches) as every:
                async for batch in every:
                    for message in batch.messages:
                        if message["type"] == "http.response.start":
                            has_begun, is_stream = True, _is_stream(message)
                            message["headers"] = [*message["headers"], named_replica(batch.replica)]
                        await send(message)

        try:
            sending = asyncio.create_task(copy())
            await asyncio.wait({reading, sending}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                await sending
        except _FAILURES as error:
            _log.warning("a replica failed: %s", type(error).__name__)
            gone = CapacityError(503, GONE)
            if not has_begun:
                await error_response(path, gone)({"type": "http", "path": path}, receive, send)
            elif is_stream:
                await send({"type": "http.response.body", "body": last_event(path, gone), "more_body": False})
            else:
                raise  # a part of the body was sent: the connection ends
        finally:
            for task in (reading, sending):
                if task is not None and not task.done():
                    task.cancel()
                    with suppress(asyncio.CancelledError, *_FAILURES):
                        await task


async def _batches(answer: Any, places: Places) -> AsyncGenerator[Batch, None]:
    """The batches of a call, which is counted, and from which news are learned."""
    replica: str | None = None
    try:
        async for batch in answer:
            if replica is None:
                replica = batch.replica
                places.begin(replica)
            if batch.news:
                places.learn(replica, batch.news)
            yield batch
    except RequestCancelledError:
        return
    finally:
        answer.cancel()
        if replica is not None:
            places.end(replica)


async def _read(receive: Receive) -> bytes | None:
    """The body of a request; None if its client has left."""
    parts, length = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        parts.append(message.get("body", b""))
        length += len(parts[-1])
        if length > BODY_BYTES_MAX:
            raise RequestError(413, "body", f"must be at most {BODY_BYTES_MAX} bytes")
        if not message.get("more_body", False):
            return b"".join(parts)


async def _left(receive: Receive) -> None:
    """Wait until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _live(receive: Receive, send: Send) -> None:
    """There is nothing to do when Ray starts and stops the application."""
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def _is_stream(message: Message) -> bool:
    return any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"])
