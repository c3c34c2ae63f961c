"""Offload: work on large inputs, run on threads beside the event loop.

Large work shares a few threads, and the largest has one thread of its own: that bounds the memory it takes, and smaller
work never waits for it. The work must release the GIL or come in small pieces. Owned by the context that endpoints
share; used to read bodies and to render and tokenise texts.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

INLINE_MAX = 8 * 1024  # bytes or characters: up to here, work runs on the event loop itself
MEDIUM_MAX = 1024 * 1024  # up to here, on the shared threads; above, on the one thread for the largest
NUM_THREADS = 2  # shared ones

Value = TypeVar("Value")


class OffloadThreads:
    """The threads for work on large inputs."""

    def __init__(self) -> None:
        self._medium = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="roost-medium")
        self._large = ThreadPoolExecutor(1, thread_name_prefix="roost-large")

    async def run(self, length: int, work: Callable[[], Value]) -> Value:
        """The result of work on `length` bytes or characters; the event loop is blocked only if they are few."""
        if length <= INLINE_MAX:
            return work()
        threads = self._medium if length <= MEDIUM_MAX else self._large
        return await asyncio.get_running_loop().run_in_executor(threads, work)
