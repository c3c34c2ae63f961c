"""Trace: rare events of the loop (admit, preempt, reclaim, end…), for logs, dumps and the simulator.

Keeps the last few; a listener may see all of them. Called by sched.
"""

from collections import deque
from collections.abc import Callable

Note = tuple[str, str, tuple[int, ...]]  # kind, subject, numbers

_NOTES_KEPT = 256


class Trace:
    """A short memory of what happened."""

    def __init__(self, listener: Callable[[Note], None] | None = None) -> None:
        self._listener = listener
        self._last: deque[Note] = deque(maxlen=_NOTES_KEPT)

    def note(self, kind: str, subject: str, *numbers: int) -> None:
        """Something happened to `subject`."""
        note = (kind, subject, numbers)
        self._last.append(note)
        if self._listener is not None:
            self._listener(note)

    def last(self) -> list[Note]:
        """The last notes, oldest first."""
        return list(self._last)
