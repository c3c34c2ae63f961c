"""Time of one world: in some, steps take long enough for the loop to wait while one runs, and clients act meanwhile."""

import random
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

from roost.clock import VirtualClock
from roost.step import StepId, StepPlan

T = TypeVar("T")
MEANWHILE = 0.4  # how often something happens while the loop waits, and then again


class DeviceTime(VirtualClock):
    """A clock that steps and waits move forward."""

    def __init__(self, seed: int, step_ns: int, meanwhile: Callable[[], None]) -> None:
        super().__init__()
        self._rng = random.Random(f"device time {seed}")
        self._step_ns = step_ns  # of a step without prompt tokens, about; 0: steps take no time
        self._free_at = 0
        self._done_at: dict[StepId, int] = {}
        self._meanwhile = meanwhile  # told when time has passed while the loop waits: clients may act

    def launched(self, plan: StepPlan) -> None:
        """A step begins when the one before it has ended."""
        if not self._step_ns:
            return
        time = int(self._step_ns * self._rng.uniform(0.6, 1.2) * (1 + len(plan.tokens) / 64))
        self._free_at = self._done_at[plan.step] = max(self._free_at, self.now_ns()) + time

    def collected(self, step: StepId) -> None:
        """A step is waited for."""
        self.advance(max(0, self._done_at.pop(step, 0) - self.now_ns()))

    def receive(self, mailbox: "SimpleQueue[T]", until_ns: int) -> T:
        """Let clients act at some time of the wait, the last time at its end."""
        while mailbox.empty() and until_ns > self.now_ns():
            ends = self._rng.random() > MEANWHILE
            self.advance(until_ns - self.now_ns() if ends else self._rng.randint(0, until_ns - self.now_ns()))
            self._meanwhile()
        return super().receive(mailbox, until_ns)
