"""Uneven times: how much longer a step takes whose rounds have several widths than their nodes would make it.

Where steps are captured, one of a single width is one graph, and any other is drafted, verified and drawn from in
pieces, which costs the host and the device something whatever the widths. Part of the draft-length policy.
"""

from bisect import bisect_left
from collections.abc import Sequence

from roost.step_times.median import Median

_KNOWN_FOR = 512  # steps after which what was measured is tried again


class UnevenTimes:
    """Times of such steps over those that were expected, by batch size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # ascending
        self._ratios = [Median() for _ in sizes]

    def note(self, num_rounds: int, ratio: float, now: int) -> None:
        """Take in a step, the `now`-th of all."""
        at = bisect_left(self._sizes, num_rounds)
        if self._is_old(at, now):
            self._ratios[at] = Median()
        self._ratios[at].add(ratio, now)

    def of(self, num_rounds: int, now: int) -> float:
        """How much longer such a step takes; as long as expected where nothing is known."""
        at = bisect_left(self._sizes, num_rounds)
        known = self._ratios[at].num_samples and not self._is_old(at, now)
        return max(1.0, self._ratios[at].value) if known else 1.0

    def _is_old(self, at: int, now: int) -> bool:
        return now - self._ratios[at].added_at > _KNOWN_FOR
