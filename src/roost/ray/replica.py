"""Replica: one engine with its server, as an actor of Ray Serve.

The server is the one of `roost serve` without its listening socket: requests come as calls of `answer`, the engine
stays a process of its own. What the replica holds is told with every batch that it sends from then on, and as a whole
in its routing stats. A replica ends with its engine, and Ray starts another. Called through Ray.
"""

import asyncio
import logging
import os
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ray import serve
from starlette.types import ASGIApp, Message

from roost.config.options import EngineConfig
from roost.errors import RoostError
from roost.ray.app_run import GOING_AWAY, AppRun, Call
from roost.ray.failures import GONE
from roost.ray.places import HELD, Address
from roost.ray.wanted import SESSION, STORED, label_key
from roost.router.placement import Key, key_of
from roost.server import logs
from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.engine_process import EngineProcess
from roost.server.host_check import AllowedHosts, HostCheck
from roost.server.keys import read_keys
from roost.server.request_log import RequestLog
from roost.server.state import ServerState

REPLICA_HEADER = "x-roost-replica"  # of a request: the replica that it is for; of a response: the one that gave it
_LAST_WORDS_S = 1.0  # for what is told about an engine that has ended
_log = logging.getLogger("roost.server")
_NEWS_MAX = 4096  # keys that are told as news; what is older is in the routing stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a replica sends at once."""

    replica: str
    messages: list[Message]
    news: tuple[Key, ...] = ()  # what it holds since the batch before


def named_replica(replica: str) -> tuple[bytes, bytes]:
    """The header of a response that says who gives it."""
    return REPLICA_HEADER.encode(), replica.encode()


class Holdings:
    """What a server holds, as keys; of what was told last, some may be gone."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._told: deque[Key] = deque(maxlen=_NEWS_MAX)
        self.num_told = 0
        state.sessions.on_add = lambda client, name: self._tell(key_of(SESSION, client, name))
        state.responses.on_put = lambda client, name: self._tell(key_of(STORED, client, name))
        state.labels.on_use = lambda client, name: self._tell(label_key(client, name))

    def all(self) -> set[Key]:
        """All keys that are held now."""
        sessions = {key_of(SESSION, *key) for key in self._state.sessions.keys}
        stored = {key_of(STORED, *key) for key in self._state.responses.keys}
        labels = {label_key(*key) for key in self._state.labels.keys}
        return sessions | stored | labels | set(self._told)  # a journaled fork is in no table before it is used

    def since(self, number: int) -> tuple[Key, ...]:
        """The keys that were told after so many."""
        num_new = min(self.num_told - number, len(self._told))
        return tuple(self._told[at] for at in range(-num_new, 0))

    def _tell(self, key: Key) -> None:
        self._told.append(key)
        self.num_told += 1


class EngineReplica:
    """The deployment's class."""

    async def __init__(self, engine: EngineConfig, config: ServerConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        """Start the engine and wait until its model is loaded."""
        logs.set_up(config.log)
        self._ending: asyncio.Task[None] | None = None  # until the engine is ready
        self.name: str = serve.get_replica_context().replica_tag
        keys = read_keys(config)
        self._state = ServerState(config, EngineProcess(replace(engine, clients=keys.limits(engine)), config.log), keys)
        self._holdings = Holdings(self._state)
        self._sockets: dict[str, AppRun] = {}
        app = make_app(self._state)
        checked: ASGIApp = HostCheck(app, AllowedHosts(config, has_keys=keys.are_required), app.state.origins)
        self._state.engine.last_refusal = 503, GONE
        await self._state.engine.start()
        self._state.open()
        started = self._state.engine.started
        assert started is not None
        if config.otlp_endpoint is not None:
            from roost.server.tracing import tracing_to  # noqa: PLC0415 (its packages are an extra of their own)

            tracing = tracing_to(config.otlp_endpoint)
            checked = tracing.wrap(checked)
            self._state.engine.follow = partial(tracing.follow, self._state.model_name)
        self._app: ASGIApp = RequestLog(checked, config.log_requests)
        self._ending = asyncio.create_task(self._end_with_engine())
        ready = (self.name, started.model_name, started.load_s)
        logging.getLogger(logs.NOTICES).info("replica %s has %s ready after %.1f s", *ready)

    async def answer(self, address: Address, call: Call) -> AsyncGenerator[Batch, None]:
        """The answer to a request in batches; a caller that leaves ends it."""
        exchange, told = AppRun(call), self._holdings.num_told
        if call.socket:
            self._sockets[call.socket] = exchange
        exchange.begin(self._app, self._state.follow)
        batches = exchange.batches()
        try:
            async for messages in batches:
                news = self._holdings.since(told)
                told = self._holdings.num_told
                yield Batch(replica=self.name, messages=messages, news=news)
        finally:
            self._sockets.pop(call.socket, None)
            await batches.aclose()

    async def send(self, address: Address, socket: str, message: Message) -> bool:
        """Hand a WebSocket a message of its client; False if the socket is not here."""
        exchange = self._sockets.get(socket)
        if exchange is not None:
            exchange.put(message)
        return exchange is not None

    async def answer_whole(self, call: Call) -> tuple[str, int, bytes]:
        """The answer to a short request that every replica gets: who answers, the status and the body."""
        status, body = 500, b""
        async for batch in self.answer(Address(), call):
            for message in batch.messages:
                status = message.get("status", status)
                body += message.get("body", b"")
        return self.name, status, body

    async def held(self, keys: tuple[Key, ...]) -> tuple[str, tuple[Key, ...]]:
        """Which of these keys it holds."""
        held = self._holdings.all()
        return self.name, tuple(key for key in keys if key in held)

    async def record_routing_stats(self) -> dict[str, Any]:
        """All that it holds, for routers that have not been told; Ray asks from time to time."""
        self._state.close_expired()
        return {HELD: b"".join(sorted(self._holdings.all()))}

    async def _end_with_engine(self) -> None:
        """End this process soon after its engine: callers learn it at once, and Ray starts another replica."""
        engine = self._state.engine
        await engine.is_gone.wait()
        _log.error("replica %s: the engine has ended with exit code %s", self.name, engine.exit_code)
        await asyncio.sleep(_LAST_WORDS_S)
        logging.shutdown()
        os._exit(1)

    async def __del__(self) -> None:
        """Ray has drained it: let what runs without a client finish, then stop the engine."""
        state = self._state
        state.is_draining = True
        if self._ending is not None:
            self._ending.cancel()
        for exchange in self._sockets.values():
            exchange.put({"type": "websocket.disconnect", "code": GOING_AWAY})
        if state.detached:
            await asyncio.wait(state.detached, timeout=state.config.drain_s)
        with suppress(RoostError):
            await state.engine.stop()
