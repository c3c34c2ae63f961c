"""Prompt tokens: what each one adds to the time of a step; the rest is the time of the rounds beside them.

It is learned from pairs of steps of one width with different numbers of prompt tokens and about as many rounds: in
their difference everything else cancels out. If all chunks are alike there are no pairs, and a shorter chunk is asked
for now and then, where it matters. Until there are enough pairs, a step of chunks alone gives an upper bound, which
makes drafts look too expensive rather than too cheap. Part of the step times.
"""

from collections import deque

from roost.step_times.median import NUM_KEPT, weighted_median

_NUM_PAIRS = 32  # remembered
_NUM_KNOWN = 5  # pairs needed before they are used
_NUM_KNOWN_ALONE = 3  # steps of chunks alone after which their time is good enough to wait for
_APART = 8  # in a pair, chunk tokens differ by more than this many times what round tokens differ by
_PAIR_WITHIN, _FIRST_WITHIN = 128, 8  # most steps without a new pair; and until pairs are used
_REST_LEAST = 1 / 16  # of a step: a smaller rest is too inexact to say anything about the rounds


class PromptTokenTime:
    """The time of a prompt token."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[int, int, int]] = {}  # by width (0: no rounds), the last step: rounds, tokens, time
        self._pairs: deque[tuple[float, int]] = deque(maxlen=_NUM_PAIRS)  # (time of a token, tokens they differ in)
        self._num_unpaired = 0  # steps of chunks and rounds since the last pair
        self._alone: deque[tuple[float, int]] = deque(maxlen=NUM_KEPT)  # (time of a token, tokens), without rounds
        self._beside: float | None = None  # the same beside rounds, if it is known
        self._by_itself: float | None = None  # the same in a step without rounds

    def note(self, num_rounds: int, width: int, num_tokens: int, time: int) -> None:
        """Take in the time of a step of `num_rounds` rounds of one width and `num_tokens` prompt tokens."""
        if not num_tokens:
            return
        if not num_rounds:
            self.note_alone(num_tokens, time)
        self._num_unpaired += num_rounds > 0
        if width in self._last:
            rounds_before, tokens_before, time_before = self._last[width]
            apart = abs(num_tokens - tokens_before)
            if apart > _APART * abs(num_rounds - rounds_before) * width:
                self._pairs.append(((time - time_before) / (num_tokens - tokens_before), apart))
                self._num_unpaired = 0
                if len(self._pairs) >= _NUM_KNOWN:
                    self._beside = max(0.0, weighted_median(self._pairs))
        self._last[width] = num_rounds, num_tokens, time

    def note_alone(self, num_tokens: int, time: int) -> None:
        """Take in the time of a step without rounds."""
        self._alone.append((time / num_tokens, num_tokens))
        self._by_itself = weighted_median(self._alone)

    @property
    def wants_pair(self) -> bool:
        """Whether chunks have been alike for so long that a shorter one is worth its cost."""
        return self._num_unpaired >= (_PAIR_WITHIN if len(self._pairs) >= _NUM_KNOWN else _FIRST_WITHIN)

    @property
    def beside_rounds(self) -> float | None:
        """Time that a prompt token adds to a step with rounds; None if it is not known."""
        return self._by_itself if self._beside is None else self._beside

    @property
    def by_itself(self) -> float | None:
        """Time of a prompt token in a step without rounds, with its part of everything else; None if not known."""
        return self._beside if self._by_itself is None else self._by_itself

    def of_chunks(self, num_tokens: int) -> float | None:
        """Time of a step of chunks alone, at least; None if too little is known."""
        if self._by_itself is None or len(self._alone) < _NUM_KNOWN_ALONE:
            return None
        return self._by_itself * min(num_tokens, max(tokens for _, tokens in self._alone))

    def rest(self, num_tokens: int, time: int) -> int | None:
        """The time of a step without its prompt tokens; None if that is unknown or too inexact."""
        if not num_tokens:
            return time
        cost = self.beside_rounds
        if cost is None:
            return None
        rest = time - num_tokens * cost
        return int(rest) if rest > _REST_LEAST * time else None
