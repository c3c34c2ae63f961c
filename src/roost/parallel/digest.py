"""Digest: what came of steps, folded into a few bytes, so that ranks can compare it.

Step numbers, rows, lengths and tokens: what every rank must have found alike, bit for bit. Log-probabilities are not in
it. Kept by rank 0 and by each follower, from one check to the next.
"""

from hashlib import blake2b

from roost.step import StepId, StepResult

_SIZE = 16


class StepDigest:
    """Of the steps since the last check."""

    def __init__(self) -> None:
        self._hash = blake2b(digest_size=_SIZE)
        self.first: StepId | None = None
        self.last: StepId | None = None
        self.num_steps = 0

    def add(self, result: StepResult) -> None:
        """One more step."""
        if self.first is None:
            self.first = result.step
        self.last = result.step
        self.num_steps += 1
        self._hash.update(int(result.step).to_bytes(8, "little"))
        for column in (result.rows, result.accept_lens, result.lengths, result.tokens):
            self._hash.update(column.tobytes())

    def text(self) -> str:
        """All of it."""
        return self._hash.hexdigest()
