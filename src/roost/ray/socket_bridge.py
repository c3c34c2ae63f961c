"""Socket bridge: a client's WebSocket on one side, those of replicas on the other.

A socket belongs to one replica, which gets all of its messages but those that name what another holds: for these a
second socket is opened there. What the replicas send goes to the client as it comes. When the socket's replica takes
no more requests, the socket is closed as soon as its client waits for nothing, and the client comes again. Called by
the ingress.
"""

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING
from uuid import uuid4

from ray.exceptions import RayError
from ray.serve.exceptions import RayServeException
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from roost.ray.app_run import AT_WORK, Call
from roost.ray.places import Address
from roost.ray.replica import named_replica
from roost.ray.wanted import named_by_message, wanted_of
from roost.router.placement import Wanted

if TYPE_CHECKING:
    from roost.ray.ingress import Gateway

RESTARTED = 1012  # the close code of a service that restarts: come again
_LOOK_S = 1.0  # time between looks whether the replica still takes requests
_ENDS = ("websocket.close", "websocket.http.response.body")


class _Side:
    """A replica's end of the socket."""

    def __init__(self) -> None:
        self.name = uuid4().hex
        self.replica: str | None = None  # once it has answered
        self.is_at_work = False  # whether the client waits for something
        self.has_accepted = False
        self.has_answered = asyncio.Event()


class SocketBridge:
    """One client's WebSocket."""

    def __init__(self, gateway: "Gateway", scope: Scope, client: str) -> None:
        self._gateway = gateway
        self._scope = scope
        self._client = client
        self._home = _Side()
        self._others: dict[str, _Side] = {}  # by replica
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, receive: Receive, send: Send) -> None:
        """Carry messages in both directions until one side ends."""
        await receive()  # websocket.connect
        wanted = wanted_of(self._scope["path"], Headers(scope=self._scope), b"", self._client)
        await self._gateway.find(wanted)
        ends = [self._carry_home(wanted, send), self._read(receive, send), self._watch(send)]
        self._tasks = {asyncio.create_task(end) for end in ends}
        try:
            await asyncio.wait(set(self._tasks), return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _carry_home(self, wanted: Wanted, send: Send) -> None:
        """What the socket's own replica sends; its end is the socket's."""
        has_ended = False

        async def pass_on(message: Message) -> None:
            nonlocal has_ended
            has_ended = has_ended or message["type"] in _ENDS
            if message["type"] == "websocket.accept" and self._home.replica is not None:
                message["headers"] = [*message.get("headers", ()), named_replica(self._home.replica)]
            await send(message)

        await self._carry(self._home, self._gateway.address(wanted), pass_on)
        if not has_ended:
            await send({"type": "websocket.close", "code": RESTARTED})

    async def _carry_other(self, replica: str, side: _Side, send: Send) -> None:
        """What another replica sends; when it ends, the socket goes on without it."""

        async def pass_on(message: Message) -> None:
            if message["type"] == "websocket.send":
                await send(message)

        await self._carry(side, self._gateway.address(Wanted(), replica), pass_on)
        del self._others[replica]

    async def _carry(self, side: _Side, address: Address, pass_on: Send) -> None:
        """Everything that a replica sends, to its end or to the replica's."""
        calls = self._gateway.calls(address, Call.of(self._scope, socket=side.name))
        try:
            async with aclosing(calls) as batches:
                async for batch in batches:
                    side.replica = batch.replica
                    for message in batch.messages:
                        if message["type"] == AT_WORK:
                            side.is_at_work = message["value"]
                        else:
                            side.has_accepted = side.has_accepted or message["type"] == "websocket.accept"
                            await pass_on(message)
                    side.has_answered.set()
        except (RayError, RayServeException):
            pass  # it has died: what it had running is lost
        finally:
            side.has_answered.set()
            side.is_at_work = False

    async def _read(self, receive: Receive, send: Send) -> None:
        """What the client sends, each message to its replica."""
        while (message := await receive())["type"] != "websocket.disconnect":
            side = await self._side_for(message, send)
            if side.replica is None or not await self._gateway.tell(side.replica, side.name, message):
                await self._idle()  # it takes nothing any more, but may still have something to say
                await send({"type": "websocket.close", "code": RESTARTED})
                return

    async def _side_for(self, message: Message, send: Send) -> _Side:
        """Whom a message is for: who holds what it names, else the socket's own replica."""
        data = message.get("text")
        wanted = named_by_message(message.get("bytes") or b"" if data is None else data.encode(), self._client)
        await self._home.has_answered.wait()
        holder = await self._gateway.find(wanted) if wanted.keys else None
        if holder is None or holder == self._home.replica:
            return self._home
        side = self._others.get(holder)
        if side is None:
            side = self._others[holder] = _Side()
            self._tasks.add(asyncio.create_task(self._carry_other(holder, side, send)))
        await side.has_answered.wait()
        return side if side.has_accepted else self._home

    async def _watch(self, send: Send) -> None:
        """Close the socket when its replica takes no more requests and its client waits for nothing."""
        await self._home.has_answered.wait()
        while self._home.replica in self._gateway.places.replicas:
            await asyncio.sleep(_LOOK_S)
        await self._idle()
        await send({"type": "websocket.close", "code": RESTARTED})

    async def _idle(self) -> None:
        while self._home.is_at_work or any(side.is_at_work for side in self._others.values()):
            await asyncio.sleep(_LOOK_S)
