"""Trace: rare events of the scheduler loop (admit, preempt, reclaim, end…), for error reports and the simulator.

Keeps the last few; a listener is called with each. Called by sched.
"""

from collections import deque
from collections.abc import Callable

Note = tuple[str, str, tuple[int, ...]]  # kind, subject, numbers

_NOTES_KEPT = 256


class Trace:
    """The last events of the scheduler."""

    def __init__(self, listener: Callable[[Note], None] | None = None) -> None:
        self._listener = listener
        self._last: deque[Note] = deque(maxlen=_NOTES_KEPT)

    def note(self, kind: str, subject: str, *numbers: int) -> None:
        """Record that something happened to `subject`."""
        note = (kind, subject, numbers)
        self._last.append(note)
        if self._listener is not None:
            self._listener(note)

    def last(self) -> list[Note]:
        """The last notes, oldest first."""
        return list(self._last)
