"""Aside: work on much data, beside the event loop and a little at a time.

Long work has few threads, and the longest one of its own: so much memory it takes at most, and what is shorter does not
wait for it. What it does must let go of the GIL or come in small pieces. Owned by the desk; used for bodies and texts.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LONG = 8 * 1024  # bytes or characters that take longer than others should wait
VERY_LONG = 1024 * 1024
NUM_THREADS = 2  # for what is long; one more has what is very long

Value = TypeVar("Value")


class Aside:
    """The threads of long work."""

    def __init__(self) -> None:
        self._long = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="roost-long")
        self._very_long = ThreadPoolExecutor(1, thread_name_prefix="roost-very-long")

    async def do(self, length: int, work: Callable[[], Value]) -> Value:
        """The result of work on so many bytes or characters; if they are many, the event loop goes on meanwhile."""
        if length <= LONG:
            return work()
        threads = self._long if length <= VERY_LONG else self._very_long
        return await asyncio.get_running_loop().run_in_executor(threads, work)
