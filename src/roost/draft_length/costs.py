"""Costs: the relative cost of decode and verify steps by width, for each batch size.

Absolute times drift as texts grow and machines get busy. So two running medians are kept for each load: the pace (how
long steps take now), from steps of the same width as the one before, and the relative cost of each width, from steps of
another width than the one before. A single late step does not move a median. A width below 0 is one of rounds whose
drafts are all looked up, so that no head runs. Part of the draft-length policy.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

from roost.step_times.median import Median

NUM_KNOWN = 3  # samples after which the cost of a width counts as known
# steps of a load after which a width that none of them had is unknown again; fewer at first, since machines warm up:
# what was learned after some steps is trusted for about as many more
_NUM_STEPS_KNOWN, _NUM_STEPS_FIRST = 512, 16
_NUM_BUSY = 32  # steps in a row with prefill around after which they count; steps without are more exact
# cost assumed before anything is known, relative to a step: of a draft, and of each token of any round
_DRAFT_COST, _TOKEN_COST = 0.1, 1 / 32


class Costs:
    """Relative costs of widths, by load."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # batch sizes, ascending
        self._num_busy = [_NUM_BUSY] * len(sizes)  # by batch size: steps with prefill around since the last one without
        # a load is a batch size and a kind: rounds without prefill around, rounds with chunks in the same step, or
        # rounds in steps between those with chunks; widths compare differently in each
        num_loads = 3 * len(sizes)
        self._paces = [Median() for _ in range(num_loads)]  # by load: time of a step divided by the cost of its width
        self._costs: list[dict[int, Median]] = [{} for _ in range(num_loads)]  # by load and width
        self._widths = [0] * num_loads  # by load: width of the last step
        self._num_steps = [0] * num_loads  # by load: number of steps noted
        # (load, unmeasured width) -> (measured width, expected ratio); dropped when a width is measured first
        self._guesses: dict[tuple[int, int], tuple[int, float]] = {}

    def note(self, num_rounds: int, width: int, time: int) -> None:
        """Take in the time of a step of rounds without prefill around it."""
        self._num_busy[self._size(num_rounds)] = 0
        self._note(self._at(num_rounds, has_chunks=False), width, time)

    def note_busy(self, num_rounds: int, width: int, time: int, *, has_chunks: bool) -> None:
        """Take in the estimated time of the rounds of a step with prefill in it or next to it."""
        if self.takes_busy(num_rounds):
            self._note(self._at(num_rounds, has_chunks), width, time)
        self._num_busy[self._size(num_rounds)] += 1

    def takes_busy(self, num_rounds: int) -> bool:
        """Whether steps with prefill around count now."""
        return self._num_busy[self._size(num_rounds)] >= _NUM_BUSY

    def pace(self, num_rounds: int) -> float:
        """Time of a step of rounds without prefill around it, divided by its cost; 0 if none was seen."""
        return self._paces[self._size(num_rounds)].value

    def _note(self, at: int, width: int, time: int) -> None:
        self._num_steps[at] += 1
        now, pace, costs = self._num_steps[at], self._paces[at], self._costs[at]
        if pace.num_samples == 0:
            pace.add(float(time), now)
        if width not in costs or self._is_old(costs[width], now):
            costs[width] = Median()
            self._guesses.clear()
        cost = costs[width]
        goes_on, self._widths[at] = self._widths[at] == width, width
        if not goes_on or cost.num_samples < NUM_KNOWN:
            cost.add(time / pace.value, now)
        if goes_on:
            pace.add(time / cost.value, now)
            cost.added_at = now

    def num_samples(self, num_rounds: int, widths: Sequence[int], *, has_chunks: bool) -> list[int]:
        """How many recent samples each width has with about so many rounds."""
        at = self._at(num_rounds, has_chunks)
        costs, now = self._costs[at], self._num_steps[at]
        return [
            costs[width].num_samples if width in costs and not self._is_old(costs[width], now) else 0
            for width in widths
        ]

    def of(self, num_rounds: int, widths: Sequence[int], *, has_chunks: bool) -> list[float]:
        """Relative cost of a step of each width: as measured, or as expected from other widths and loads."""
        at = self._at(num_rounds, has_chunks)
        costs = self._costs[at]
        return [costs[width].value if width in costs else self._unseen(at, width) for width in widths]

    def _unseen(self, at: int, width: int) -> float:
        """Expected cost of a width that was not measured."""
        if (at, width) not in self._guesses:
            self._guesses[at, width] = self._guess(at, width)
        near, ratio = self._guesses[at, width]
        own = self._costs[at]
        return own[near].value * ratio if own else ratio

    def _guess(self, at: int, width: int) -> tuple[int, float]:
        """The measured width of a load that is nearest to `width`, and their cost ratio in a load that has both."""
        near, num_sizes = _nearest(self._costs[at], width), len(self._sizes)
        own = at // num_sizes  # loads of the same kind first, nearest batch size first
        loads = sorted(
            range(len(self._costs)), key=lambda each: (each // num_sizes != own, abs(each % num_sizes - at % num_sizes))
        )
        both = (self._costs[load] for load in loads if width in self._costs[load] and near in self._costs[load])
        some = (self._costs[load] for load in loads if self._costs[load])
        costs = next(both, None) or next(some, {})
        size = self._sizes[at % num_sizes]
        return near, _expected(costs, size, width) / _expected(costs, size, near)

    @staticmethod
    def _is_old(cost: Median, now: int) -> bool:
        return now - cost.added_at > min(_NUM_STEPS_KNOWN, _NUM_STEPS_FIRST + cost.added_at)

    def _at(self, num_rounds: int, has_chunks: bool) -> int:
        """Index of the load that a step of so many rounds belongs to now."""
        kind = 0 if not self.takes_busy(num_rounds) else 1 if has_chunks else 2
        return kind * len(self._sizes) + self._size(num_rounds)

    def _size(self, num_rounds: int) -> int:
        return bisect_left(self._sizes, num_rounds)


def _nearest(costs: Mapping[int, Median], width: int) -> int:
    """The measured width nearest to `width`; if there is none, 1 (no drafts)."""
    return min(costs, key=lambda each: (abs(abs(each) - abs(width)), each * width < 0, each), default=1)


def _expected(costs: Mapping[int, Median], num_rounds: int, width: int) -> float:
    """The cost of a width, estimated from the nearest measured one of a load."""
    near = _nearest(costs, width)
    base = costs[near].value if costs else 1.0
    return base * _prior(num_rounds, width) / _prior(num_rounds, near)


def _prior(num_rounds: int, width: int) -> float:
    """Cost assumed before anything is known: with many rounds a step is bound by compute."""
    return 1 + _DRAFT_COST * max(0, width - 1) + _TOKEN_COST * num_rounds * abs(width)
