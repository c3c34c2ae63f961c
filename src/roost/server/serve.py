"""Serve: the life of a server, from its socket to its last request.

It listens at once and says 503 until the model is there. On SIGTERM it takes nothing new and gives what runs some time
to end. If the engine ends unexpectedly, so does the server. Called by the command line.
"""

import asyncio
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import uvicorn

from roost.config import EngineConfig, ServerConfig
from roost.errors import CapacityError
from roost.server.app import make_app
from roost.server.desk import Desk
from roost.server.keys import NO_KEYS, Keys
from roost.server.link import Link

HEADER_BYTES_MAX = 32 * 1024
_LAST_WORDS_S = 5  # for answers to leave, after what still ran was ended


def serve(engine: EngineConfig, config: ServerConfig, keys: Keys = NO_KEYS) -> int:
    """Serve until told to stop; returns the exit code."""
    return asyncio.run(_serve(replace(engine, clients=keys.limits(engine)), config, keys))


async def _serve(engine: EngineConfig, config: ServerConfig, keys: Keys) -> int:
    desk = Desk(config, Link(engine), keys)
    server = _Server(
        uvicorn.Config(
            make_app(desk),
            host=config.host,
            port=config.port,
            log_level=config.log_level,
            http="h11",
            ws="none",
            h11_max_incomplete_event_size=HEADER_BYTES_MAX,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=config.drain_s + _LAST_WORDS_S,
        ),
        desk,
    )
    watcher = asyncio.create_task(_watch(desk, server))
    try:
        await server.serve()
    finally:
        watcher.cancel()
        with suppress(asyncio.CancelledError):
            await watcher
        failed = desk.link.is_gone.is_set()
        await desk.link.stop()
    return (desk.link.exit_code or 1) if failed else 0


class _Server(uvicorn.Server):
    """A server that refuses new work from the moment it is told to stop."""

    def __init__(self, config: uvicorn.Config, desk: Desk) -> None:
        super().__init__(config)
        self._desk = desk

    async def shutdown(self, sockets: list[object] | None = None) -> None:  # type: ignore[override]
        """Say that nothing new is taken, let what runs end, and end it when its time is up."""
        desk = self._desk
        desk.is_draining = True
        limit = asyncio.get_running_loop().call_later(desk.config.drain_s, desk.link.abort_where, lambda name: True)
        try:
            await super().shutdown(sockets)  # type: ignore[arg-type]
        finally:
            limit.cancel()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Stop at a signal, and only that: raised once more, as usual, it would end us before the engine is closed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)


async def _watch(desk: Desk, server: uvicorn.Server) -> None:
    """Start the engine, say when it is ready, and end the server if the engine ends."""
    with suppress(CapacityError):
        await desk.link.start()
        desk.open()
        started = desk.link.started
        assert started is not None
        for name, value in started.settings.items():
            print(f"  {name:<14} {value}", file=sys.stderr)
        place = f"http://{desk.config.host}:{_port(server) or desk.config.port}"
        print(f"roost: {started.model_name} is ready at {place} after {started.load_s:.1f} s", file=sys.stderr)
    await desk.link.is_gone.wait()
    server.should_exit = True


def _port(server: uvicorn.Server) -> int | None:
    """The port that is listened at: with --port 0 the system chose it."""
    ports: list[int] = [socket.getsockname()[1] for each in server.servers for socket in each.sockets]
    return ports[0] if ports else None
