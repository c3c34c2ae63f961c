"""Clock: the scheduler's only source of time, passed in so that tests can control it.

Times are integer nanoseconds since an arbitrary start. Called by the engine loop.
"""

import time
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

T = TypeVar("T")


class Clock(Protocol):
    """Something that tells the time."""

    def now_ns(self) -> int:
        """Nanoseconds since an arbitrary start; never goes back."""
        ...

    def receive(self, mailbox: "SimpleQueue[T]", until_ns: int) -> T:
        """The next of a mailbox, waiting for it until a time of this clock; raises Empty if nothing came by then."""
        ...


class SystemClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        """Nanoseconds of the monotonic clock."""
        return time.monotonic_ns()

    def receive(self, mailbox: "SimpleQueue[T]", until_ns: int) -> T:
        """Sleep until there is something, or until that time."""
        return mailbox.get(timeout=max(0, until_ns - self.now_ns()) / 1e9)


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

    def receive(self, mailbox: "SimpleQueue[T]", until_ns: int) -> T:
        """What is there already; if nothing is, all that time passes."""
        if mailbox.empty():
            self.advance(max(0, until_ns - self._now_ns))
            raise Empty
        return mailbox.get()
