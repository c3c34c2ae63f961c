"""Link: the server's end of the engine's process: start it, talk to it, notice when it is gone.

Every command opens a numbered conversation; what comes back is put into its inbox, and shown to its watcher whether or
not anybody still waits. The process lives as long as its standard input is open, so it cannot outlive the server.
Called on the server's event loop.
"""

import asyncio
import shutil
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
import zmq.asyncio

from roost.clients import ClientLimits
from roost.config.options import EngineConfig
from roost.errors import CapacityError, ConfigError, RequestError
from roost.messages import Abort, Command, Event, Finished, Refused, Submit
from roost.server.wire import Started, pack_command, unpack

_STOP_S = 10  # the engine's process gets this long to end by itself
_ANSWER_S = 2  # an answer to what was read in time gets this long to arrive

Inbox = asyncio.Queue[Event]


class Watcher(Protocol):
    """Who follows a request, or a command, whether or not anybody stays to hear of it."""

    def began(self) -> None:
        """It is on its way to the engine: a terminal event, or an answer, will come."""

    def saw(self, event: Event) -> None:
        """Its next event."""


class Link:
    """The engine's process as the server sees it."""

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="roost-"))  # only this user may enter it
        self._context = zmq.asyncio.Context()
        self._commands = self._socket(zmq.PUSH, "commands")
        self._events = self._socket(zmq.PULL, "events")
        self._process: asyncio.subprocess.Process | None = None
        self._inboxes: dict[int, Inbox] = {}
        self._answers: dict[int, asyncio.Future[Event]] = {}  # of commands, to come
        self._watchers: dict[int, Watcher] = {}  # of what has not ended, though who asked for it may have left
        self._names: dict[tuple[str, str], str] = {}  # of those that have not ended: whose, its name, and the engine's
        self._numbers = count(1)  # of conversations; 0 is for what nobody answers or asked for
        self._ids = count()
        self._tasks: list[asyncio.Task[None]] = []
        self.started: Started | None = None
        self.is_gone = asyncio.Event()

    def _socket(self, kind: int, name: str) -> zmq.asyncio.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(0)  # nothing is ever dropped; what is in flight is bounded by --max-queued
        try:
            socket.bind(f"ipc://{self._folder / name}")
        except zmq.ZMQError as error:
            raise ConfigError(f"no socket can be made in {self._folder}: {error}; set TMPDIR to another") from error
        return socket

    async def start(self) -> None:
        """Start the process and wait until the engine is ready; raises CapacityError if it ends before."""
        command = (sys.executable, "-m", "roost.server.worker")
        self._process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE)
        assert self._process.stdin is not None
        settings = msgspec.json.encode({"folder": str(self._folder), "config": self._config})
        self._process.stdin.write(settings + b"\n")
        await self._process.stdin.drain()
        ready = asyncio.Event()
        self._tasks = [asyncio.create_task(self._receive(ready)), asyncio.create_task(self._watch(ready))]
        await ready.wait()
        if self.started is None:
            raise CapacityError(503, "the engine did not start")

    def limits_of(self, client: str) -> ClientLimits:
        """What a client may take, and how long its sessions live that say nothing themselves."""
        own = next((limits for limits in self._config.clients if limits.name == client), ClientLimits(name=client))
        if own.session_ttl_s is not None:
            return own
        return replace(own, session_ttl_s=self._config.session.session_ttl_s)

    @property
    def exit_code(self) -> int | None:
        """How the process ended, None while it runs."""
        return None if self._process is None else self._process.returncode

    async def ask(self, command: Command, within_s: float, watcher: Watcher | None = None) -> Event | None:
        """Send a command that has one answer, and wait for it; None if none came.

        What the engine has not read `within_s` later it refuses, and the answer is awaited longer than that: no answer
        means that the engine was stopped between reading and answering. Whenever one comes, the watcher sees it, also
        after the caller was cancelled.
        """
        self._check_running()
        number, answer = next(self._numbers), asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        if watcher is not None:
            self._watchers[number] = watcher
            watcher.began()
        await self._send(number, command, time.monotonic_ns() + int(within_s * 1e9))
        await asyncio.wait({answer}, timeout=within_s + _ANSWER_S)
        return answer.result() if answer.done() else None

    def tell(self, command: Command) -> None:
        """Send a command that is carried out whenever it is read; nobody waits for an answer."""
        if not self.is_gone.is_set():
            with suppress(zmq.Again):
                self._commands.send(pack_command(0, command, None), flags=zmq.NOBLOCK)

    def new_id(self) -> str:
        """A name for a request that no other has or had."""
        return f"r{next(self._ids)}"

    async def converse(self, submit: Submit, name: str, watcher: Watcher | None = None) -> AsyncGenerator[Event, None]:
        """Submit a request and give its events, the terminal one last; a reader that leaves ends the request.

        The watcher sees every event as it comes, also those after the reader has left.
        """
        own = (submit.client, name)
        if own in self._names:
            raise RequestError(409, "request_id", f"{name!r} is in use by a request that has not ended")
        self._check_running()
        number, inbox, ended = next(self._numbers), Inbox(), False
        self._inboxes[number] = inbox
        self._names[own] = submit.request_id
        if watcher is not None:
            self._watchers[number] = watcher
            watcher.began()
        try:
            await self._send(number, submit)
            while not ended:
                event = await inbox.get()
                ended = isinstance(event, Finished | Refused)
                yield event
        finally:
            self._inboxes.pop(number, None)
            del self._names[own]
            if not ended:
                self.abort(submit.request_id)

    def abort_where(self, is_meant: Callable[[str], bool], client: str | None = None) -> None:
        """End the requests to which a client gave such names; None: any client."""
        asked = [(name, found) for (whose, name), found in self._names.items() if client in (None, whose)]
        for request_id in [request_id for name, request_id in asked if is_meant(name)]:
            self.abort(request_id)

    def abort(self, request_id: str) -> None:
        """End a request, if it has not ended yet."""
        self.tell(Abort(request_id=request_id))

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
        self._context.destroy(linger=0)
        shutil.rmtree(self._folder, ignore_errors=True)

    def kill(self) -> None:
        """End the process this moment, for a server that ends in the next."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _check_running(self) -> None:
        if self.is_gone.is_set() or self.started is None:
            raise CapacityError(503, "the engine is not running" if self.is_gone.is_set() else "the model is loading")

    async def _send(self, number: int, command: Command, read_by: int | None = None) -> None:
        await self._commands.send(pack_command(number, command, read_by))

    async def _receive(self, ready: asyncio.Event) -> None:
        while True:
            for number, event in unpack(await self._events.recv()):
                if isinstance(event, Started):
                    self.started = event
                    ready.set()
                else:
                    self._hand_out(number, event)

    def _hand_out(self, number: int, event: Event) -> None:
        answer = self._answers.pop(number, None)
        if (watcher := self._watchers.get(number)) is not None:
            watcher.saw(event)
            if answer is not None or isinstance(event, Finished | Refused):
                del self._watchers[number]
        if answer is not None:
            answer.set_result(event)
        if (inbox := self._inboxes.get(number)) is not None:
            inbox.put_nowait(event)

    async def _watch(self, ready: asyncio.Event) -> None:
        """When the process ends, everybody who waits for it is told."""
        assert self._process is not None
        await self._process.wait()
        self.is_gone.set()
        ready.set()
        for number in {*self._inboxes, *self._answers, *self._watchers}:
            self._hand_out(number, Refused(request_id="", status=500, message="the engine ended unexpectedly"))
