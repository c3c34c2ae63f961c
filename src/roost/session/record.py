"""Token record: the token ids of one sequence, and their keys in the prefix cache.

Append-only while a turn runs; cut only when a turn ends or its session is rewound. The array grows in place, so a turn
neither copies nor walks its history. Owned by a session, or by a turn without one.
"""

from array import array
from collections.abc import Iterable

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

    __slots__ = ("_tokens",)

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._tokens = array("i", tokens)  # grows in place; numpy reads its memory

    def __len__(self) -> int:
        return len(self._tokens)

    def append(self, tokens: Iterable[int]) -> None:
        """Add tokens at the end."""
        self._tokens.extend(tokens)

    def cut(self, length: int) -> None:
        """Forget the tokens past `length`."""
        assert length <= len(self), (length, len(self))
        del self._tokens[length:]

    def copy(self, length: int) -> "Record":
        """The first `length` tokens, to go on differently."""
        assert 0 <= length <= len(self), (length, len(self))
        return Record(self._tokens[:length])

    def slice(self, start: int, stop: int) -> NDArray[np.int32]:
        """A copy of the tokens in [start, stop)."""
        assert 0 <= start <= stop <= len(self), (start, stop, len(self))
        return np.array(memoryview(self._tokens)[start:stop], dtype=np.int32)

    def key(self, length: int, pair: bool) -> Key:
        """The prefix tree's key of the first `length` tokens."""
        return key_of(self.slice(0, length), pair)
