"""Medians over the last few samples, which a single late step does not move.

Plain numbers. Used by all that is learned from the times of steps.
"""

from collections.abc import Iterable
from itertools import accumulate

NUM_KEPT = 7  # samples of a median


class Median:
    """The median of the last samples; of two, the lower: a first run is more often too slow than too fast."""

    __slots__ = ("_samples", "added_at", "num_samples", "value")

    def __init__(self) -> None:
        self._samples: list[float] = []
        self.value = 0.0
        self.num_samples = 0
        self.added_at = 0  # `at` of the last sample

    def add(self, sample: float, at: int = 0) -> None:
        """Add a sample, taken at step number `at`."""
        self.added_at = at
        self._samples = [*self._samples[-NUM_KEPT + 1 :], sample]
        self.num_samples = len(self._samples)
        self.value = sorted(self._samples)[(self.num_samples - 1) // 2]


def weighted_median(samples: Iterable[tuple[float, int]]) -> float:
    """The lower median of (value, weight), of which there must be one at least."""
    values = sorted(samples)
    passed = list(accumulate(weight for _, weight in values))
    return next(value for (value, _), sum_here in zip(values, passed, strict=True) if 2 * sum_here >= passed[-1])
