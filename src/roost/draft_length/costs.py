"""Costs: what steps of rounds take, each width beside the others, by how many rounds share the step.

Time drifts: texts grow longer, machines get busy. So two things are kept apart for each load: how long steps take
now, told by steps of one width in a row, and how widths compare, told by a step of another width than the one before.
Both are running medians: a late step, and the early one that follows it, change nothing. Part of drafting.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence

NUM_KEPT = 7  # samples of a median
NUM_KNOWN = 3  # samples from which on a width counts as known
# steps of a load after which a width that was not among them is unknown again; sooner at first, since machines
# warm up: what was learned within some steps holds for about as many more
_NUM_STEPS_KNOWN, _NUM_STEPS_FIRST = 512, 16
_NUM_BUSY = 32  # steps with prefill in a row from which on they count: rounds alone are measured better
# before anything is known, in a unit of its own: what a draft is taken to cost, and what a token of any round
_DRAFT_COST, _TOKEN_COST = 0.1, 1 / 32


class Median:
    """The median of the last samples, the lower one of two: a first run is rather too slow than too fast."""

    def __init__(self) -> None:
        self._samples: list[float] = []
        self.value = 0.0
        self.num_samples = 0
        self.added_at = 0  # as told

    def add(self, sample: float, at: int) -> None:
        """One more."""
        self.added_at = at
        self._samples = [*self._samples[-NUM_KEPT + 1 :], sample]
        self.num_samples = len(self._samples)
        self.value = sorted(self._samples)[(self.num_samples - 1) // 2]


class Costs:
    """Relative costs of widths."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # of batches, rising
        self._num_busy = [_NUM_BUSY] * len(sizes)  # by batch size: busy steps since the last one of rounds among rounds
        # a load is a batch size of rounds among rounds, of rounds with chunks, or of rounds between chunks: what costs
        # little in the one may not in the others
        num_loads = 3 * len(sizes)
        self._paces = [Median() for _ in range(num_loads)]  # by load: time of a step over its width's cost
        self._costs: list[dict[int, Median]] = [{} for _ in range(num_loads)]  # by load and width
        self._widths = [0] * num_loads  # by load: that of the last step
        self._num_steps = [0] * num_loads  # by load: steps noted
        # by load and a width not measured: one that was, and how they should compare; until there is another
        self._guesses: dict[tuple[int, int], tuple[int, float]] = {}

    def note(self, num_rounds: int, width: int, time: int) -> None:
        """A step of rounds, with no prefill about, took some time."""
        self._num_busy[self._size(num_rounds)] = 0
        self._note(self._at(num_rounds, has_chunks=False), width, time)

    def note_busy(self, num_rounds: int, width: int, time: int, *, has_chunks: bool) -> None:
        """The rounds of a step took some time, as far as that can be told from the prefill beside or before it."""
        if self.takes_busy(num_rounds):
            self._note(self._at(num_rounds, has_chunks), width, time)
        self._num_busy[self._size(num_rounds)] += 1

    def takes_busy(self, num_rounds: int) -> bool:
        """Whether a busy step counts now."""
        return self._num_busy[self._size(num_rounds)] >= _NUM_BUSY

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
        """How often each width was measured lately with about so many rounds, as far as is kept."""
        at = self._at(num_rounds, has_chunks)
        costs, now = self._costs[at], self._num_steps[at]
        return [
            costs[width].num_samples if width in costs and not self._is_old(costs[width], now) else 0
            for width in widths
        ]

    def of(self, num_rounds: int, widths: Sequence[int], *, has_chunks: bool) -> list[float]:
        """What a step of each width costs, in a unit of its load: as measured, or as others let expect."""
        at = self._at(num_rounds, has_chunks)
        costs = self._costs[at]
        return [costs[width].value if width in costs else self._unseen(at, width) for width in widths]

    def _unseen(self, at: int, width: int) -> float:
        """What a width should cost that was not measured."""
        if (at, width) not in self._guesses:
            self._guesses[at, width] = self._guess(at, width)
        near, ratio = self._guesses[at, width]
        own = self._costs[at]
        return own[near].value * ratio if own else ratio

    def _guess(self, at: int, width: int) -> tuple[int, float]:
        """The width of a load that is most like another, and how they compare where both were measured."""
        near, num_sizes = _nearest(self._costs[at], width), len(self._sizes)
        own = at // num_sizes  # of the same kind and the nearest first
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
        """The load that so many rounds are now."""
        kind = 0 if not self.takes_busy(num_rounds) else 1 if has_chunks else 2
        return kind * len(self._sizes) + self._size(num_rounds)

    def _size(self, num_rounds: int) -> int:
        return bisect_left(self._sizes, num_rounds)


def _nearest(costs: Mapping[int, Median], width: int) -> int:
    """The measured width that is most like another; without any, that of a step without drafts."""
    return min(costs, key=lambda each: (abs(each - width), each), default=1)


def _expected(costs: Mapping[int, Median], num_rounds: int, width: int) -> float:
    """The cost of a width by the one most like it, among those of one batch size."""
    near = _nearest(costs, width)
    base = costs[near].value if costs else 1.0
    return base * _prior(num_rounds, width) / _prior(num_rounds, near)


def _prior(num_rounds: int, width: int) -> float:
    """What a step is taken to cost before anything is known: many rounds are bound by computing."""
    return 1 + _DRAFT_COST * (width - 1) + _TOKEN_COST * num_rounds * width
