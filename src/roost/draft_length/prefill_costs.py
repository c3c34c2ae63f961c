"""Prefill costs: what a prompt token adds to the time of a step, so that the rest is the cost of the rounds beside it.

It is learned from pairs of steps of one width with different numbers of prompt tokens and about as many rounds: in
their difference everything else cancels out. If all chunks are alike there are no pairs, and a shorter chunk is asked
for now and then. Until there are enough pairs, a step of chunks alone gives an upper bound, which makes drafts
look too expensive rather than too cheap. Part of the draft-length policy.
"""

from bisect import bisect_left
from collections import deque
from itertools import accumulate

_NUM_KEPT = 32  # pairs remembered
_NUM_KNOWN = 5  # pairs needed before they are used
_NUM_ALONE = 7  # steps without rounds remembered
_APART = 8  # in a pair, chunk tokens differ by more than this many times what round tokens differ by
_PAIR_WITHIN, _FIRST_WITHIN = 128, 8  # most steps without a new pair; and until pairs are used
_REST_LEAST = 1 / 16  # of a step: a smaller rest is too inexact to say anything about the rounds


class ChunkCost:
    """The time of a prompt token."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, int]] = {}  # by width (0: no rounds), the last step: rounds, tokens, time
        self._pairs: deque[tuple[float, int]] = deque(maxlen=_NUM_KEPT)  # (time of a token, tokens they differ in)
        self._num_unpaired = 0  # steps of chunks and rounds since the last pair
        self._alone: deque[float] = deque(maxlen=_NUM_ALONE)  # time of a token in steps without rounds

    def note(self, num_rounds: int, width: int, num_tokens: int, time: int) -> None:
        """Take in the time of a step of `num_rounds` rounds of one width and `num_tokens` prompt tokens."""
        if not num_tokens:
            return
        if not num_rounds:
            self._alone.append(time / num_tokens)
        self._num_unpaired += num_rounds > 0
        if width in self._last:
            rounds_before, tokens_before, time_before = self._last[width]
            apart = abs(num_tokens - tokens_before)
            if apart > _APART * abs(num_rounds - rounds_before) * width:
                self._pairs.append(((time - time_before) / (num_tokens - tokens_before), apart))
                self._num_unpaired = 0
        self._last[width] = num_rounds, num_tokens, time

    @property
    def wants_pair(self) -> bool:
        """Whether chunks have been alike for so long that a shorter one is worth its cost."""
        return self._num_unpaired >= (_PAIR_WITHIN if len(self._pairs) >= _NUM_KNOWN else _FIRST_WITHIN)

    def rest(self, num_tokens: int, time: int) -> int | None:
        """The time of a step without its prompt tokens; None if that is unknown or too inexact."""
        if not num_tokens:
            return time
        cost = self._of_a_token()
        if cost is None:
            return None
        rest = time - num_tokens * cost
        return int(rest) if rest > _REST_LEAST * time else None

    def _of_a_token(self) -> float | None:
        """Time of a prompt token: the median over pairs, weighted by tokens, which one late step does not move."""
        if len(self._pairs) < _NUM_KNOWN:
            return sorted(self._alone)[len(self._alone) // 2] if self._alone else None
        pairs = sorted(self._pairs)
        passed = list(accumulate(apart for _, apart in pairs))
        return max(0.0, pairs[bisect_left(passed, passed[-1] / 2)][0])
