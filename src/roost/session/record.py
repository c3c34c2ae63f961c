"""Token record: the token ids of one sequence, and their keys in the prefix cache.

Append-only while a turn runs; cut only when a turn ends or its session is rewound. It is a growing array, so a turn
neither copies nor walks its history. Owned by a session, or by a turn without one.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from roost.kv.node import Key


def key_of(tokens: NDArray[np.int32], pair: bool) -> Key:
    """The prefix-cache key of some tokens: one entry per KV slot whose content they determine.

    A pair drafter's slot depends on the next token too, so the last token has no entry then.
    """
    wide = tokens.astype(np.int64)
    return wide[:-1] << 32 | wide[1:] if pair else wide


class Record:
    """Tokens of one sequence."""

    __slots__ = ("_len", "_tokens")

    def __init__(self, tokens: Sequence[int] | NDArray[np.int32] = ()) -> None:
        self._tokens: NDArray[np.int32] = np.array(tokens, dtype=np.int32)
        self._len = len(tokens)

    def __len__(self) -> int:
        return self._len

    def append(self, tokens: Sequence[int]) -> None:
        """Add tokens at the end."""
        grown = self._len + len(tokens)
        if grown > len(self._tokens):
            self._tokens = np.resize(self._tokens, max(grown, 2 * self._len, 16))
        self._tokens[self._len : grown] = tokens
        self._len = grown

    def cut(self, length: int) -> None:
        """Drop the tokens past `length`."""
        assert length <= self._len, (length, self._len)
        self._len = length

    def copy(self) -> "Record":
        """A record with the same tokens, for a fork."""
        return Record(self._tokens[: self._len])

    def slice(self, start: int, stop: int) -> NDArray[np.int32]:
        """A copy of the tokens in [start, stop)."""
        assert 0 <= start <= stop <= self._len, (start, stop, self._len)
        return self._tokens[start:stop].copy()

    def key(self, length: int, pair: bool) -> Key:
        """The prefix-cache key of the first `length` tokens."""
        return key_of(self._tokens[:length], pair)
