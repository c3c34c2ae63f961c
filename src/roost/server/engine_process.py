"""Engine process: the engine in a process of its own, as the server uses it: start it, talk to it, notice its end.

One that ends unexpectedly may be started again, on the same sockets: what was sent to the one before it is refused.
Owns the process, the sockets to it, and the names that clients gave to their requests. The process lives as long as its
standard input is open, so it cannot outlive the server; what runs in it is `server.worker`. Called on the server's
event loop.
"""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import zmq
import zmq.asyncio

from roost.clients import ClientLimits
from roost.config.options import EngineConfig
from roost.errors import CapacityError, ConfigError, RequestError
from roost.front.engine_client import EngineClient, Observer
from roost.messages import Command, Event, Finished, Refused, Submit
from roost.server.logs import LogConfig
from roost.server.output_log import OutputLog
from roost.server.wire_format import Started, pack_command, unpack

RESTARTING = "the engine ended unexpectedly and is being started again"
_STOP_S = 10  # the engine's process gets this long to end by itself
_ANSWER_S = 2  # an answer to what was read in time gets this long to arrive

Follow = Callable[[Submit, Observer | None], Observer | None]  # who observes a request, given who does already


def _only_those(submit: Submit, observer: Observer | None) -> Observer | None:
    """Nobody else follows requests."""
    return observer


class EngineProcess(EngineClient):
    """An engine in a process of its own."""

    def __init__(self, config: EngineConfig, log: LogConfig | None = None) -> None:
        super().__init__()
        self._config = config
        self._log = log or LogConfig()
        self._outputs = OutputLog(self._log.slow_s)
        self._folder = Path(tempfile.mkdtemp(prefix="roost-"))  # only this user may enter it
        self._context = zmq.asyncio.Context()
        self._commands = self._context.socket(zmq.PUSH)
        # read by a callback, which costs less than to wait
        self._events: zmq.Socket[bytes] = zmq.Context.shadow(self._context).socket(zmq.PULL)
        self._bind(self._commands, "commands")
        self._bind(self._events, "events")
        self._process: asyncio.subprocess.Process | None = None
        self._request_ids: dict[tuple[str, str], str] = {}  # of open requests, by client and the client's name for it
        self._tasks: list[asyncio.Task[None]] = []
        self.started: Started | None = None
        self.follow: Follow = _only_those
        self.may_restart: Callable[[], bool] = lambda: False  # asked when it has ended that was ready before
        self.is_restarting = False
        self.last_refusal = 500, "the engine ended unexpectedly"  # of what is open when no other is started
        self.has_ended = asyncio.Event()  # the process
        self.is_gone = asyncio.Event()  # and for good

    def _bind(self, socket: "zmq.Socket[Any]", name: str) -> None:
        socket.set_hwm(0)  # nothing is ever dropped; what is in flight is bounded by --max-queued
        try:
            socket.bind(f"ipc://{self._folder / name}")
        except zmq.ZMQError as error:
            raise ConfigError(f"no socket can be made in {self._folder}: {error}; set TMPDIR to another") from error

    async def start(self) -> None:
        """Start a process and wait until the engine is ready; raises CapacityError if it ends before."""
        self.has_ended.clear()
        command = (sys.executable, "-m", "roost.server.worker")
        self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        assert self._process.stdin is not None
        first = next(self._numbers)
        told = {"folder": str(self._folder), "first": first, "config": self._config, "log": self._log}
        settings = msgspec.json.encode(told)
        self._process.stdin.write(settings + b"\n")
        await self._process.stdin.drain()
        ready = asyncio.Event()
        self._tasks = [asyncio.create_task(self._await_end(ready))]
        asyncio.get_running_loop().add_reader(self._events.fileno(), self._read_events, ready)
        self._read_events(ready)  # what came before
        await ready.wait()
        if self.has_ended.is_set():
            raise CapacityError(503, "the engine did not start")
        self.is_restarting = False

    def limits_of(self, client: str) -> ClientLimits:
        """What a client may take, and how long its sessions live that say nothing themselves."""
        own = next((limits for limits in self._config.clients if limits.name == client), ClientLimits(name=client))
        if own.session_ttl_s is not None:
            return own
        return replace(own, session_ttl_s=self._config.session.session_ttl_s)

    def sessions_max(self, client: str) -> int:
        """How many sessions a client may have open."""
        own = self.limits_of(client).sessions
        return self._config.session.max_sessions if own is None else own

    @property
    def has_journal(self) -> bool:
        """Whether sessions go on that this server has not seen."""
        return self._config.session.journal is not None

    @property
    def queued_max(self) -> int:
        """How many requests may wait."""
        return self._config.sched.max_queued

    @property
    def session_tokens_max(self) -> int | None:
        """The most tokens that a session may have; None: what the context allows."""
        return self._config.session.max_session_tokens

    @property
    def exit_code(self) -> int | None:
        """How the process ended, None while it runs."""
        return None if self._process is None else self._process.returncode

    def check_running(self) -> None:
        """Raise CapacityError before the engine is ready and after it has ended."""
        if self.is_gone.is_set() or self.started is None:
            raise CapacityError(503, "the engine is not running" if self.is_gone.is_set() else "the model is loading")
        if self.is_restarting:
            raise CapacityError(503, RESTARTING)

    async def ask(self, command: Command, within_s: float, observer: Observer | None = None) -> Event | None:
        """Send a command that has one answer, and wait for it; None if none came.

        The engine refuses what it has not read `within_s` later, and the answer is awaited longer than that: no answer
        means that the engine was stopped between reading and answering. Whenever one comes, the observer sees it, also
        after the caller was cancelled.
        """
        answer: asyncio.Future[Event] = asyncio.get_running_loop().create_future()
        number = self.open_exchange(command, answer.set_result, observer)
        await self._send(number, command, time.monotonic_ns() + int(within_s * 1e9))
        await asyncio.wait({answer}, timeout=within_s + _ANSWER_S)
        return answer.result() if answer.done() else None

    def receive(self, number: int, event: Event) -> None:
        """An event came from the engine: it is handed on, and an output's end is logged."""
        self._outputs.observe(event)
        super().receive(number, event)

    def tell(self, command: Command) -> None:
        """Send a command that is carried out whenever it is read; nobody waits for an answer."""
        if not self.is_gone.is_set():
            with suppress(zmq.Again):
                self._commands.send(pack_command(0, command, None), flags=zmq.NOBLOCK)

    async def stream_events(
        self, submit: Submit, name: str, observer: Observer | None = None
    ) -> AsyncGenerator[Event, None]:
        """Submit a request and yield its events, the last one included; a reader that leaves ends the request.

        `name` is what the client calls it. The observer sees every event as it comes, also after the reader has left.
        """
        own = (submit.client, name)
        if own in self._request_ids:
            raise RequestError(409, "request_id", f"{name!r} is in use by a request that has not ended")
        events: asyncio.Queue[Event] = asyncio.Queue()
        observer, has_ended = self.follow(submit, observer), False
        number = self.open_exchange(submit, events.put_nowait, observer)
        self._request_ids[own] = submit.request_id
        self._outputs.begin(submit)
        try:
            await self._send(number, submit)
            while not has_ended:
                event = await events.get()
                has_ended = isinstance(event, Finished | Refused)
                yield event
        finally:
            del self._request_ids[own]
            if not has_ended:
                self.abort(submit.request_id)

    def abort_where(self, is_meant: Callable[[str], bool], client: str | None = None) -> None:
        """End the requests to which a client gave such names; None: any client."""
        for (whose, name), request_id in list(self._request_ids.items()):
            if client in (None, whose) and is_meant(name):
                self.abort(request_id)

    async def stop(self) -> None:
        """End the process: it finishes nothing more."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
            try:
                await asyncio.wait_for(self._process.wait(), _STOP_S)
            except TimeoutError:
                self._process.kill()
                await self._process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        asyncio.get_running_loop().remove_reader(self._events.fileno())
        self._events.close(linger=0)
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process this moment, for a server that ends in the next."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _send(self, number: int, command: Command, read_by: int | None = None) -> None:
        await self._commands.send(pack_command(number, command, read_by))

    def _read_events(self, ready: asyncio.Event) -> None:
        """Take in the next message, if there is one; the socket wakes the loop once, however many there are."""
        if self._events.closed or not self._has_events():
            return
        try:
            for number, event in unpack(self._events.recv()):
                if isinstance(event, Started):
                    self.started = event
                    ready.set()
                else:
                    self.receive(number, event)
        finally:
            if self._has_events():  # after those who wait for this one
                asyncio.get_running_loop().call_soon(self._read_events, ready)

    def _has_events(self) -> bool:
        return bool(int(self._events.getsockopt(zmq.EVENTS)) & zmq.POLLIN)

    async def _await_end(self, ready: asyncio.Event) -> None:
        """When the process ends, everybody who waits for it is told."""
        assert self._process is not None
        await self._process.wait()
        self.is_restarting = self.started is not None and self.may_restart()
        if not self.is_restarting:
            self.is_gone.set()
        self.has_ended.set()
        ready.set()
        if self.is_restarting:
            self.refuse_all(503, RESTARTING)
        else:
            self.refuse_all(*self.last_refusal)
