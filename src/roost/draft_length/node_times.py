"""Node times: what one node more costs a step of several rounds, in tokens that all would have had meanwhile.

The time of a node is that by which steps differ that follow each other and differ in nodes, or at first a share of a
step, or that of a prompt token; the tokens a time are those of the last steps of as many rounds. Times are absolute
here: what is wanted is their product, and both grow on a busy machine. Part of the draft-length policy.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

from roost.step_times.median import weighted_median

_NUM_PAIRS = 31  # pairs of steps of which the time of a node is the median
_FIRST_NODES = 16  # nodes that what is assumed at first counts for among those
_MEMORY = 1 - 1 / 32  # factor by which a step reduces the weight of earlier ones
_NODE_SHARE = 1 / 32  # of the time of a step without nodes that a node is assumed to take


class NodeTimes:
    """Times of nodes, by batch size."""

    def __init__(self, sizes: Sequence[int]) -> None:
        self._sizes = sizes  # ascending
        # by batch size: (time of a node, nodes that two steps differed in)
        self._pairs: list[deque[tuple[float, int]]] = [deque(maxlen=_NUM_PAIRS) for _ in sizes]
        self._last: list[tuple[tuple[int, ...], int, int]] = [((), 0, 0)] * len(sizes)  # kind of step, nodes, time
        # of the last steps
        self._tokens, self._time, self._num_steps = [0.0] * len(sizes), [0.0] * len(sizes), [0.0] * len(sizes)

    def note(self, num_rounds: int, kind: tuple[int, ...], num_nodes: int, num_tokens: int, time: int) -> None:
        """Take in a step of rounds alone; those of one kind differ in nothing but nodes."""
        at = bisect_left(self._sizes, num_rounds)
        kind_before, nodes_before, time_before = self._last[at]
        self._last[at] = (num_rounds, *kind), num_nodes, time
        if kind_before == (num_rounds, *kind) and num_nodes != nodes_before:
            apart = num_nodes - nodes_before
            self._pairs[at].append((max(0.0, (time - time_before) / apart), abs(apart)))
        self._tokens[at] = self._tokens[at] * _MEMORY + num_tokens
        self._time[at] = self._time[at] * _MEMORY + time
        self._num_steps[at] = self._num_steps[at] * _MEMORY + 1

    def price(self, num_rounds: int, tokens: float, prompt_token_time: float | None) -> float:
        """Tokens that all rounds would have added in the time of one node more; they add `tokens` in a step."""
        at = bisect_left(self._sizes, num_rounds)
        if not self._time[at]:
            return tokens * _share(num_rounds)
        return self.of_one(num_rounds, prompt_token_time) * self._tokens[at] / self._time[at]

    def of_one(self, num_rounds: int, prompt_token_time: float | None) -> float:
        """The time of one node more in a step of so many rounds, of which some were seen."""
        at = bisect_left(self._sizes, num_rounds)
        assumed = _share(num_rounds) * self._time[at] / self._num_steps[at]
        if prompt_token_time is not None:  # alone in a step it takes too long, and many of them less than a node
            assumed = min(assumed, prompt_token_time)
        return weighted_median([(assumed, _FIRST_NODES), *self._pairs[at]])


def _share(num_rounds: int) -> float:
    """What part of a step of so many rounds a node more is assumed to take."""
    return _NODE_SHARE / (1 + _NODE_SHARE * num_rounds)
