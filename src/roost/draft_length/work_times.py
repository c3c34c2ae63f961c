"""Work times: how long a step of several rounds takes on a host, by the work in it, where each round has its own.

A linear model for each batch size, fitted to the last steps by least squares: a step without drafts, and what each node
more, each token that a head drafts, each of the head's passes adds to it, and that there are more nodes than rounds at
all: one node more can be a product cut otherwise. Recent steps count most, so that it follows a machine that gets busy;
a single late step does not count. Until it knows better it believes that nodes cost little where there are many of them
already. Part of the draft-length policy.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MEMORY = 1 - 1 / 64  # factor by which a step reduces the weight of earlier ones
_FIRST_STEPS = 2.0  # steps that what is assumed counts for
_LATE = 1.5  # times longer than expected: late, unless the step before was so, too
_LEAST = 0.1  # of what steps take: a step without drafts takes so long at least
# assumed shares of a step without drafts: a node more of n rounds takes 1 / (4 + 2n), and of that a drafted token
_DRAFT_SHARE = 0.25
_PASS_SHARE = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """What a step does beyond one node for each of its rounds."""

    nodes: float = 0.0  # that are verified
    drafts: float = 0.0  # tokens that the head drafts
    passes: float = 0.0  # of the head, one after the other
    wider: float = 0.0  # 1: there are such nodes; between 0 and 1: how likely


class WorkTimes:
    """Times of work, by batch size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # ascending
        self._models: dict[int, _Fit] = {}

    def note(self, num_rounds: int, work: Work, time: int) -> None:
        """Take in a step of rounds alone."""
        at = bisect_left(self._sizes, num_rounds)
        if at not in self._models:
            self._models[at] = _Fit(self._sizes[at], work, time)
        self._models[at].note(work, time)

    def of(self, num_rounds: int, work: Work) -> float:
        """The time of such a step; where none was seen, in steps without drafts."""
        return _sum(self._times(num_rounds), work)

    def of_node(self, num_rounds: int) -> float:
        """The time of one node more."""
        return self._times(num_rounds)[1]

    def of_draft(self, num_rounds: int) -> float:
        """The time of one more token that the head drafts, without its node."""
        return self._times(num_rounds)[2]

    def of_wider(self, num_rounds: int) -> float:
        """What it takes that there are more nodes than rounds, however many."""
        return self._times(num_rounds)[4]

    def _times(self, num_rounds: int) -> tuple[float, ...]:
        at = bisect_left(self._sizes, num_rounds)
        return self._models[at].times if at in self._models else _assumed(self._sizes[at], 1.0)


class _Fit:
    """Of one batch size."""

    def __init__(self, size: int, work: Work, time: int) -> None:
        self._size = size
        assumed = _assumed(size, 1.0)
        self.times = _assumed(size, time / _sum(assumed, work))  # of a step, a node, a drafted token, a pass, any node
        self._products, self._sums = np.zeros((5, 5)), np.zeros(5)
        self._was_late = True

    def note(self, work: Work, time: int) -> None:
        """Take in a step."""
        is_late = time > _LATE * _sum(self.times, work)
        if is_late and not self._was_late:
            self._was_late = True
            return
        self._was_late = is_late
        row = np.array((1.0, work.nodes, work.drafts, work.passes, work.wider))
        self._products = self._products * _MEMORY + np.outer(row, row)
        self._sums = self._sums * _MEMORY + row * time
        # what is assumed goes by how long a step takes now, as if some steps had had one node, draft and pass a round
        weights = _FIRST_STEPS * np.array((0.0, self._size, self._size, 1.0, 1.0)) ** 2
        scale = self._sums[0] / _sum(_assumed(self._size, 1.0), Work(*(self._products[0, 1:])), self._products[0, 0])
        assumed = np.array(_assumed(self._size, scale))
        products, sums = self._products + np.diag(weights), self._sums + weights * assumed
        found, least = np.linalg.solve(products, sums), _LEAST * self._sums[0] / self._products[0, 0]
        if found[0] < least:  # as little as that no step takes: the rest is fitted to it
            rest = np.linalg.solve(products[1:, 1:], sums[1:] - least * products[1:, 0])
            found = np.array([least, *rest])
        self.times = tuple(float(each) for each in found.clip(min=0))


def _assumed(size: int, scale: float) -> tuple[float, ...]:
    """Times of a step without drafts, which takes `scale`, of a node, a drafted token, a pass, and of any node."""
    node = scale / (4 + 2 * size)
    return scale, node, _DRAFT_SHARE * node, _PASS_SHARE * scale, 0.0


def _sum(times: Sequence[float], work: Work, num_steps: float = 1.0) -> float:
    parts = num_steps, work.nodes, work.drafts, work.passes, work.wider
    return sum(part * time for part, time in zip(parts, times, strict=True))
