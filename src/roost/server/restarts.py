"""Restarts: how often an engine that ended unexpectedly may be started again.

So many times within an hour: an engine that ends again and again ends its server, as one that may not be restarted
does at once, and whoever supervises the server hears of it. Asked by the engine's process.
"""

import time
from collections import deque
from collections.abc import Callable

WINDOW_S = 3600


class Restarts:
    """Those of one server."""

    def __init__(self, limit: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.limit = limit
        self._clock = clock
        self._taken: deque[float] = deque()  # when, within the window

    @property
    def num_taken(self) -> int:
        """How many there were lately."""
        while self._taken and self._clock() - self._taken[0] > WINDOW_S:
            self._taken.popleft()
        return len(self._taken)

    def take(self) -> bool:
        """Whether there may be one more now, which counts then."""
        if self.num_taken >= self.limit:
            return False
        self._taken.append(self._clock())
        return True
