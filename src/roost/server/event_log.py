"""Event log: the events of a response that is made in the background, for whoever reads them, from any of them on.

Grows by the task that makes the response and is read by any number of streams, each at its own pace; a reader that
leaves changes nothing. Lives as long as the response is stored. Called by the endpoints of responses.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

Event = dict[str, Any]


class EventLog:
    """All events of one response so far, in the order of their `sequence_number`."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self._is_closed = False
        self._has_grown = asyncio.Event()

    def add(self, *events: Event) -> None:
        """More events."""
        self.events += events
        self._wake()

    def close(self) -> None:
        """The last event is there."""
        self._is_closed = True
        self._wake()

    async def read(self, after: int = -1) -> AsyncGenerator[Event, None]:
        """The events with larger numbers, those that are still to come as well."""
        place = after + 1
        while True:
            while place < len(self.events):
                yield self.events[place]
                place += 1
            if self._is_closed:
                return
            await self._has_grown.wait()

    def _wake(self) -> None:
        """Let all readers go on, and wait for what comes next on another event."""
        self._has_grown.set()
        self._has_grown = asyncio.Event()
