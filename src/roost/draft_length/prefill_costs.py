"""Chunks: what a prompt token adds to the time of a step, so that the rest can be put down to the rounds beside it.

Two steps of one width that have prompt tokens, not as many, and hardly differ in rounds tell it by their difference:
whatever both have in common drops out. Where chunks are all alike nothing is concluded, and a shorter one is asked for
now and then. Until such pairs were seen, a step of chunks alone bounds it from above: drafts look rather too dear than
too cheap. Part of drafting.
"""

from bisect import bisect_left
from collections import deque
from itertools import accumulate

_NUM_KEPT = 32  # pairs remembered
_NUM_KNOWN = 5  # pairs from which on they are believed
_NUM_ALONE = 7  # steps of chunks alone remembered
_APART = 8  # times as much as their rounds two steps of a pair differ in their chunks, in tokens
_PAIR_WITHIN, _FIRST_WITHIN = 128, 8  # steps: so often a pair is wanted, and so often until they are believed
_REST_LEAST = 1 / 16  # of a step: of less than that nothing can be said


class ChunkCost:
    """The time of a prompt token."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, int]] = {}  # by width (0: no rounds), of the last step: see `note`
        self._pairs: deque[tuple[float, int]] = deque(maxlen=_NUM_KEPT)  # time of a token; tokens they differ in
        self._num_unpaired = 0  # steps of chunks and rounds since the last pair
        self._alone: deque[float] = deque(maxlen=_NUM_ALONE)  # time of a token, if all of the step was the chunks'

    def note(self, num_rounds: int, width: int, num_tokens: int, time: int) -> None:
        """A step of rounds of one width and so many prompt tokens took some time."""
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
        """Whether chunks have been alike for so long that a shorter one is worth it."""
        return self._num_unpaired >= (_PAIR_WITHIN if len(self._pairs) >= _NUM_KNOWN else _FIRST_WITHIN)

    def rest(self, num_tokens: int, time: int) -> int | None:
        """What a step took but for its prompt tokens; None if that cannot be said."""
        if not num_tokens:
            return time
        cost = self._of_a_token()
        if cost is None:
            return None
        rest = time - num_tokens * cost
        return int(rest) if rest > _REST_LEAST * time else None

    def _of_a_token(self) -> float | None:
        """The median over pairs, each by its tokens: a late step, and the early one that follows it, change nothing."""
        if len(self._pairs) < _NUM_KNOWN:
            return sorted(self._alone)[len(self._alone) // 2] if self._alone else None
        pairs = sorted(self._pairs)
        passed = list(accumulate(apart for _, apart in pairs))
        return max(0.0, pairs[bisect_left(passed, passed[-1] / 2)][0])
