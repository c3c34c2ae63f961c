"""The witness's model of two layers, whose next token depends on every KV slot that is read.

Layer 1 turns (token, position) into a value; layer 2's value at a position hashes all layer-1 values visible there; the
next token hashes both layers' visible values. A recurrent layer 2 folds its values into a state, from which no value
can be taken out again. A wrong, stale or missing slot or state anywhere changes what comes after it.
The same functions, fed with tokens instead of slots, are the oracle.
"""

from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from roost.spec_shape import MATCH_MAX

U64 = NDArray[np.uint64]
MASK = 2**64 - 1


def mix(a: int, b: int) -> int:
    """A 64-bit hash of two numbers."""
    x = (a * 0x9E3779B97F4A7C15 + b * 0xC2B2AE3D27D4EB4F + 0x165667B19E3779F9) & MASK
    x ^= x >> 29
    x = x * 0xBF58476D1CE4E5B9 & MASK
    return x ^ (x >> 32)


def mix_all(a: U64, b: U64) -> U64:
    """`mix`, element by element."""
    with np.errstate(over="ignore"):
        x = a * np.uint64(0x9E3779B97F4A7C15) + b * np.uint64(0xC2B2AE3D27D4EB4F) + np.uint64(0x165667B19E3779F9)
        x ^= x >> np.uint64(29)
        x *= np.uint64(0xBF58476D1CE4E5B9)
    return x ^ (x >> np.uint64(32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """Vocabulary size, the attention window of each layer, and how often drafts are right."""

    vocab: int
    window_1: int | None  # of layer 1; None: full attention
    window_2: int | None  # of layer 2
    recurrent: bool = False  # whether layer 2 is
    draft_skill: float  # share of positions at which the drafter knows the next token
    lookup_skill: float | None = None  # share at which a lookup brings it; None: where the drafter knows it

    def next_token(self, state: int) -> int:
        """The target's next token."""
        return mix(state, 1) % self.vocab

    def draft_knows(self, state: int) -> bool:
        """Whether the drafter proposes the target's next token here; decided by the seed."""
        return mix(state, 2) / 2**64 < self.draft_skill

    def match_len(self, state: int) -> int:
        """How many tokens a lookup finds again here; decided by the seed."""
        return min(MATCH_MAX, mix(state, 20) % (MATCH_MAX + 2))

    def lookup_knows(self, state: int) -> bool:
        """Whether what is looked up has the target's next token here; decided by the seed."""
        if self.lookup_skill is None:
            return self.draft_knows(state)
        return mix(state, 4) / 2**64 < self.lookup_skill

    def wrong_token(self, state: int, salt: int) -> int:
        """A token that is not the target's next one."""
        offset = 1 + mix(state, 3 + salt) % (self.vocab - 1)
        return (self.next_token(state) + offset) % self.vocab

    def logprob(self, state: int, token: int) -> float:
        """The log-probability of a token after this state, exact in float32."""
        return -(mix(state, 100 + token) % 2**20) / 2**16

    def top(self, state: int, count: int) -> list[tuple[int, float]]:
        """The top alternatives after this state, with their log-probabilities."""
        return [(mix(state, 5000 + i) % self.vocab, -(mix(state, 6000 + i) % 2**20) / 2**16) for i in range(count)]


def visible(window: int | None, position: int) -> int:
    """First position that a query at `position` sees."""
    return 0 if window is None else max(0, position - window + 1)


class Sequence:
    """Layer values of a growing sequence; those before position `start` are given."""

    def __init__(
        self,
        model: Model,
        start_1: int = 0,
        values_1: U64 | None = None,
        values_2: U64 | None = None,
        state_2: int = 0,
    ) -> None:
        """`values_1` are layer 1's values from position `start_1` on; layer 2's end at the same position.

        `state_2` is what came before them in a recurrent layer.
        """
        self.model = model
        ones = [] if values_1 is None else [int(v) for v in np.cumsum(values_1, dtype=np.uint64)]
        twos = [] if values_2 is None else [int(v) for v in values_2]
        self._length = start_1 + len(ones)
        self._start = (start_1, self._length - len(twos))
        self._sums: tuple[list[int], list[int]] = ([0, *ones], [state_2])  # running sums, or states
        for value in twos:
            self._append(1, value)

    def __len__(self) -> int:
        return self._length

    def push(self, token: int) -> tuple[int, int, int]:
        """Append a token; returns its values in both layers and the state after it."""
        position = self._length
        one = mix(token, position)
        self._append(0, one)
        seen_1 = self._sum(0, visible(self.model.window_1, position), position + 1)
        two = mix(seen_1, position)
        self._append(1, two)
        self._length += 1
        seen_2 = self._sum(1, visible(self.model.window_2, position), position + 1)
        return one, two, mix(seen_1 ^ (seen_2 * 3 & MASK), position)

    def cut(self, length: int) -> None:
        """Drop what was pushed past `length`."""
        for layer in (0, 1):
            del self._sums[layer][length - self._start[layer] + 1 :]
        self._length = length

    def state_at(self, position: int) -> int:
        """The state of a recurrent layer before a position."""
        return self._sums[1][position - self._start[1]]

    def _append(self, layer: int, value: int) -> None:
        sums = self._sums[layer]
        sums.append(mix(sums[-1], value) if self._is_recurrent(layer) else (sums[-1] + value) & MASK)

    def _sum(self, layer: int, first: int, last: int) -> int:
        sums, start = self._sums[layer], self._start[layer]
        before = 0 if self._is_recurrent(layer) else sums[first - start]
        return (sums[last - start] - before) & MASK

    def _is_recurrent(self, layer: int) -> bool:
        return layer == 1 and self.model.recurrent


def states_of(model: Model, tokens: NDArray[np.int64]) -> U64:
    """The state after each token of a sequence, all at once."""
    positions = np.arange(len(tokens), dtype=np.uint64)
    ones = mix_all(tokens.astype(np.uint64), positions)
    seen_1 = _windowed(ones, model.window_1)
    twos = mix_all(seen_1, positions)
    seen_2 = _folded(twos) if model.recurrent else _windowed(twos, model.window_2)
    return mix_all(seen_1 ^ (seen_2 * np.uint64(3)), positions)


def _folded(values: U64) -> U64:
    return np.array(list(accumulate(values.tolist(), mix, initial=0))[1:], dtype=np.uint64)


def _windowed(values: U64, window: int | None) -> U64:
    sums = np.cumsum(values, dtype=np.uint64)
    if window is None or len(values) <= window:
        return sums
    seen = sums.copy()
    seen[window:] -= sums[:-window]
    return seen
