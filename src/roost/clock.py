"""Clock: the scheduler's only source of time, passed in so that tests can control it.

Times are integer nanoseconds since an arbitrary start. Called by the engine loop.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Something that tells the time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return time.monotonic_ns()


class VirtualClock:
    """A clock for tests, which moves only when told to."""

    def __init__(self) -> None:
        self._now_ns = 0

    def now_ns(self) -> int:
        """Nanoseconds advanced so far."""
        return self._now_ns

    def advance(self, delta_ns: int) -> None:
        """Move time forward."""
        assert delta_ns >= 0, delta_ns
        self._now_ns += delta_ns
