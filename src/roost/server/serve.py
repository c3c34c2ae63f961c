"""Serve: the life of a server, from its listening socket to its last request.

It listens at once and answers 503 until the model is loaded. At the first SIGTERM or Ctrl-C it refuses new requests and
gives running ones some time to finish; a second Ctrl-C ends it at once. If the engine ends unexpectedly, it is started
again if it may be; else so does the server. Called by the command line.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import uvicorn

from roost.config.options import EngineConfig
from roost.errors import CapacityError, ConfigError
from roost.server import logs
from roost.server.app import make_app
from roost.server.body_reader import BODY_BYTES_MAX
from roost.server.config import RESTARTS_DEFAULT, ServerConfig
from roost.server.connection import Connection
from roost.server.connections import Connections
from roost.server.engine_process import EngineProcess
from roost.server.host_check import AllowedHosts, HostCheck
from roost.server.keys import NO_KEYS, Keys
from roost.server.listener import Listeners, cannot_listen
from roost.server.request_log import RequestLog
from roost.server.restarts import Restarts
from roost.server.state import ServerState

if TYPE_CHECKING:  # its packages are an extra of their own
    from roost.server.tracing import Tracing

HEADER_BYTES_MAX = 32 * 1024
_SWITCH_S = 0.001  # longest that a thread with large work keeps the GIL from the event loop
_LAST_WORDS_S = 5  # for responses to be sent, after running requests were aborted
_BAD_FLAGS = 2  # the exit code where a flag cannot be honoured
_INTERRUPTED = 128 + signal.SIGINT  # the shells' exit code for it
_notices = logging.getLogger(logs.NOTICES)


def serve(
    engine: EngineConfig,
    config: ServerConfig,
    listeners: Listeners,
    keys: Keys = NO_KEYS,
    tracing: "Tracing | None" = None,
    warnings: Sequence[str] = (),
) -> int:
    """Serve until told to stop; returns the exit code. Warnings are for the operator, before all else."""
    logs.set_up(config.log)
    for warning in warnings:
        _notices.warning("warning: %s", warning)
    sys.setswitchinterval(_SWITCH_S)
    engine = replace(engine, clients=keys.limits(engine))
    try:
        return asyncio.run(_serve(engine, config, listeners, keys, tracing))
    finally:
        if tracing is not None:
            tracing.close()


async def _serve(
    engine: EngineConfig, config: ServerConfig, listeners: Listeners, keys: Keys, tracing: "Tracing | None"
) -> int:
    asyncio.get_running_loop().set_exception_handler(_report)
    state = ServerState(config, EngineProcess(engine, config.log), keys)
    restarts = Restarts(restarts_max(config, engine))
    state.engine.may_restart = lambda: not state.is_draining and restarts.take()
    app = make_app(state)
    checked = HostCheck(app, AllowedHosts(config, has_keys=keys.are_required), app.state.origins)
    server = _Server(
        uvicorn.Config(
            RequestLog(checked if tracing is None else tracing.wrap(checked), config.log_requests),
            log_config=None,
            log_level=config.log_level,
            http=partial(Connection, limits=config, connections=listeners.connections),  # type: ignore[arg-type]
            ws="websockets-sansio",
            ws_max_size=BODY_BYTES_MAX,
            ws_per_message_deflate=False,  # a compressor for each socket costs more memory than all else of it
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=config.keep_alive_s,
            timeout_graceful_shutdown=config.drain_s + _LAST_WORDS_S,
        ),
        state,
        listeners.connections,
    )
    watcher = asyncio.create_task(_watch(state, server, restarts, listeners.port, tracing))
    with _signals(server):
        try:
            await server.serve(listeners.sockets)
        finally:
            watcher.cancel()
            with suppress(asyncio.CancelledError):
                await watcher
            failed = state.engine.is_gone.is_set()
            await state.engine.stop()
    if watcher.done() and not watcher.cancelled() and watcher.result():
        return watcher.result()
    return (state.engine.exit_code or 1) if failed else 0


class _Server(uvicorn.Server):
    """uvicorn's server, which drains when it is told to stop: refuses new requests, lets running ones finish."""

    def __init__(self, config: uvicorn.Config, state: ServerState, connections: Connections) -> None:
        super().__init__(config)
        self._state = state
        self._connections = connections

    async def startup(self, sockets: list[Any] | None = None) -> None:
        """Begin to listen; another program may have taken the port meanwhile."""
        try:
            await super().startup(sockets)
        except OSError as error:
            raise cannot_listen(self._state.config, error) from error

    async def shutdown(self, sockets: list[Any] | None = None) -> None:
        """Refuse new requests, let running ones finish, and abort them after `drain_s`."""
        self._state.is_draining = True
        limit = asyncio.get_running_loop().call_later(self._state.config.drain_s, self._end_all)
        try:
            if self._state.detached:  # uvicorn would cut WebSockets at once, and knows nothing of the background
                await asyncio.wait(self._state.detached, timeout=self._state.config.drain_s + _LAST_WORDS_S)
            await super().shutdown(sockets)
        finally:
            limit.cancel()

    def _end_all(self) -> None:
        """End what runs, and leave those whose request has not arrived."""
        self._state.engine.abort_where(lambda name: True)
        while self._connections.evict():
            pass

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to `_signals`: uvicorn would raise them again at the end, before the engine has stopped."""
        yield

    def stop(self, number: signal.Signals) -> None:
        """Stop at a signal; at once if it is a second Ctrl-C."""
        if self.should_exit and number == signal.SIGINT:
            _notices.info("stopped at once")
            self._state.engine.kill()
            logging.shutdown()
            os._exit(_INTERRUPTED)  # offload threads cannot be interrupted
        if not self.should_exit:
            num_left = len(self.server_state.tasks)
            whose = "1 running request gets" if num_left == 1 else f"{num_left} running requests get"
            waits = f"; {whose} up to {self._state.config.drain_s} s (Ctrl-C again ends it at once)" if num_left else ""
            _notices.info("stopping%s", waits)
        self.should_exit = True


@contextmanager
def _signals(server: _Server) -> Iterator[None]:
    """Handle signals until the engine has ended, too."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, server.stop, number)
    try:
        yield
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """Log an exception that the event loop caught; an OSError (out of file descriptors, say) is no bug."""
    error = context.get("exception")
    if isinstance(error, OSError):
        logging.getLogger("roost.server").error("%s: %s", context.get("message", "a connection failed"), error)
    else:
        loop.default_exception_handler(context)


def restarts_max(config: ServerConfig, engine: EngineConfig) -> int:
    """How often the engine may be started again within an hour."""
    if config.engine_restarts is not None:
        return config.engine_restarts
    return RESTARTS_DEFAULT if engine.model.tp > 1 or engine.session.journal is not None else 0


async def _watch(
    state: ServerState, server: uvicorn.Server, restarts: Restarts, port: int, tracing: "Tracing | None"
) -> int:
    """Start the engine and print when it is ready; start it again when it ends, while it may be; then end the server.

    Sessions of an engine that has ended are gone, or asked of the next one, which has the journal. Returns an exit code
    where a flag does not fit the model.
    """
    engine = state.engine
    while not engine.is_gone.is_set():
        with suppress(CapacityError):
            await engine.start()
            try:
                state.open()
            except ConfigError as error:
                _notices.error("%s", error)
                server.should_exit = True
                return _BAD_FLAGS
            if tracing is not None:
                engine.follow = partial(tracing.follow, state.model_name)
            _say_ready(state, port)
        await engine.has_ended.wait()
        state.sessions.forget_all()
        if engine.is_restarting:
            times = (engine.exit_code, restarts.num_taken, restarts.limit)
            _notices.info("the engine ended with exit code %s: starting another (%d of %d within an hour)", *times)
        elif restarts.limit and not server.should_exit:
            _notices.error("the engine is not started again: that was done %d times within an hour", restarts.num_taken)
    server.should_exit = True
    return 0


def _say_ready(state: ServerState, port: int) -> None:
    started = state.engine.started
    assert started is not None
    host = f"[{state.config.host}]" if ":" in state.config.host else state.config.host
    place = f"http://{host}:{port}"
    choices = {**started.settings, "tool calls": state.formats.said}
    ready = (started.model_name, place, started.load_s)
    _notices.info("%s is ready at %s after %.1f s", *ready, extra={"fields": choices})
    _notices.info("chat and watch it at %s/live", place)
