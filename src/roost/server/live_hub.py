"""Live hub: asks the engine for frames while anybody watches, and tells all who do.

A frame is built once for all watchers, at most four times a second; a newcomer has a whole one built. Who does not keep
up is let go, and comes back. What the server alone knows is added here: health, refusals, texts of a drafted tree.
Called by the live page's routes.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import suppress
from typing import Any, Protocol

from roost.errors import CapacityError
from roost.messages import Event, Frame, GetFrame

PERIOD_S = 0.25  # between frames
ANSWER_S = 1.0  # for which an answer is waited for, until the engine is shown as stalled
WATCHERS_MAX = 64
_BEHIND_MAX = 16  # frames that a watcher may be behind

Json = dict[str, Any]


class Watchable(Protocol):
    """What the hub needs of its server."""

    def tell(self, command: GetFrame) -> None:
        """Send a command whose answer nobody waits for."""
        ...

    async def ask(self, command: GetFrame, limit_s: float) -> Event:
        """The engine's answer; CapacityError where there is none in time."""
        ...

    def dressed(self, told: Json) -> Json:
        """A frame with what the server knows."""
        ...

    @property
    def health(self) -> str:
        """Whether the engine is "loading", "ok" or "gone"; gone where the server stops, too."""
        ...


class LiveHub:
    """All who watch, and the task that asks for them."""

    def __init__(self, host: Watchable, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._host, self._sleep = host, sleep
        self._watchers: set[asyncio.Queue[Json | None]] = set()
        self._task: asyncio.Task[None] | None = None
        self._wants_whole = True

    async def frames(self) -> AsyncGenerator[Json, None]:
        """Frames from now on, the first a whole one; ends with the engine, or for who does not keep up."""
        if len(self._watchers) >= WATCHERS_MAX:
            raise CapacityError(503, f"{WATCHERS_MAX} watch already")
        queue: asyncio.Queue[Json | None] = asyncio.Queue(_BEHIND_MAX)
        self._watchers.add(queue)
        self._wants_whole = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())
        try:
            while (told := await queue.get()) is not None:
                yield told
        finally:
            self._watchers.discard(queue)

    async def _run(self) -> None:
        """Ask while anybody watches."""
        try:
            while self._watchers and self._host.health != "gone":
                self._send(await self._frame())
                await self._sleep(PERIOD_S)
        finally:
            for queue in self._watchers:  # the engine is gone, or this is a bug: they come back
                _end(queue)
            self._wants_whole = True
            with suppress(CapacityError):
                self._host.tell(GetFrame(watching=False))

    async def _frame(self) -> Json:
        if self._host.health == "loading":
            self._wants_whole = True  # another engine, of which nothing was told
            return {"whole": False, "health": "loading"}
        is_whole, self._wants_whole = self._wants_whole, False
        asked = asyncio.create_task(self._host.ask(GetFrame(whole=is_whole), ANSWER_S))
        stalled = {"whole": False, "health": "stalled"}
        while not (await asyncio.wait({asked}, timeout=ANSWER_S))[0]:
            self._send(stalled)  # it may be in a long step
        if asked.exception() is None and isinstance(answer := asked.result(), Frame):
            return self._host.dressed(answer.told)
        self._wants_whole = True  # what has changed meanwhile is told to nobody
        return stalled if self._host.health == "ok" else {"whole": False, "health": self._host.health}

    def _send(self, told: Json) -> None:
        for queue in list(self._watchers):
            if not _put(queue, told):
                self._watchers.discard(queue)
                _end(queue)


def _end(queue: "asyncio.Queue[Json | None]") -> None:
    """Have a watcher hear that there is nothing more; a frame that it has not read makes room for that."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(None)


def _put(queue: "asyncio.Queue[Json | None]", told: Json | None) -> bool:
    try:
        queue.put_nowait(told)
    except asyncio.QueueFull:
        return False
    return True
