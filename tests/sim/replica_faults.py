"""Faults of replicas: what happens in a seed, and how often; logs in which a write may be cut short."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from roost.clock import VirtualClock
from tests.support.memory_logs import MemoryLogs


class Fallen(BaseException):
    """A replica ends in the middle of what it does; nothing in the engine may catch this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetFaults:
    """Probability of each kind of fault, per round or per operation of the journal."""

    fall: float
    fall_in_operation: float
    stop: float
    drain: float
    forget: float  # the router begins anew
    full: float  # a write finds no room
    between: float  # another replica acts between two operations


NO_FAULTS = FleetFaults(fall=0, fall_in_operation=0, stop=0, drain=0, forget=0, full=0, between=0)


class SharedLogs(MemoryLogs):
    """The journal's logs, with faults in the midst of a write."""

    def __init__(self, clock: VirtualClock, written: Callable[[str, int, bytes], None]) -> None:
        super().__init__(clock.now_ns)
        self.written = written
        self.fate: Callable[[], str] = lambda: ""  # of the next write

    def append(self, key: str, epoch: int, data: bytes) -> bool:
        """Write all, or a part and fall, or a part and fail, or all and fall."""
        self.before("append")
        log = self.logs.get(key, {}).get(epoch)
        if log is None:
            return False
        fate = self.fate()
        if fate in ("torn", "full"):
            log += data[: len(data) // 2]
            if fate == "torn":
                raise Fallen
            raise OSError(28, "No space left on device")
        self.written(key, epoch, data)
        before, self.before = self.before, lambda operation: None
        super().append(key, epoch, data)
        self.before = before
        if fate == "after":
            raise Fallen
        return True


def draw_faults(seed: int) -> FleetFaults:
    """The faults of a seed; some have none."""
    rng = random.Random(f"replica faults {seed}")
    if rng.random() < 0.15:
        return NO_FAULTS
    return FleetFaults(
        fall=rng.choice([0, 0.02, 0.06]),
        fall_in_operation=rng.choice([0, 0.01, 0.04]),
        stop=rng.choice([0, 0.1, 0.3]),
        drain=rng.choice([0, 0.03]),
        forget=rng.choice([0, 0.1]),
        full=rng.choice([0, 0.05, 0.2]),
        between=rng.choice([0, 0.2, 0.5]),
    )
