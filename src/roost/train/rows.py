"""Rows: answers packed one after the other into rows of one length, so that every batch has the same shape.

A row says of each token which answer it belongs to and whether the target said it. What does not fit a row is cut.
Called by the training loop.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from roost.train.answers import Answer


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Packed answers."""

    tokens: np.ndarray  # [num_rows, row_len] int32
    owners: np.ndarray  # [num_rows, row_len] int32: number of the answer within the row; -1: padding
    is_said: np.ndarray  # [num_rows, row_len] bool: the target said it

    def __len__(self) -> int:
        return len(self.tokens)

    def batches(self, size: int, seed: int) -> Iterator["Rows"]:
        """Whole batches, shuffled; what is left over waits for another shuffle."""
        order = np.random.default_rng(seed).permutation(len(self))
        for first in range(0, len(self) - size + 1, size):
            index = order[first : first + size]
            yield Rows(tokens=self.tokens[index], owners=self.owners[index], is_said=self.is_said[index])


def pack(answers: Sequence[Answer], row_len: int) -> Rows:
    """Answers in rows, in order; one that does not fit what is left of a row begins the next."""
    tokens, owners, is_said = [], [], []
    used = row_len
    for answer in answers:
        both = (*answer.prompt, *answer.output)[:row_len]
        if used + len(both) > row_len:
            tokens.append(np.zeros(row_len, dtype=np.int32))
            owners.append(np.full(row_len, -1, dtype=np.int32))
            is_said.append(np.zeros(row_len, dtype=np.bool_))
            used, number = 0, 0
        span = slice(used, used + len(both))
        tokens[-1][span], owners[-1][span] = both, number
        is_said[-1][used + min(len(answer.prompt), len(both)) : used + len(both)] = True
        used, number = used + len(both), number + 1
    return Rows(tokens=np.array(tokens), owners=np.array(owners), is_said=np.array(is_said))


def draft_vocabulary(answers: Sequence[Answer], size: int, always: Sequence[int]) -> tuple[np.ndarray, float]:
    """The ids said most often, in rising order, and the share of everything said that they cover."""
    counts = Counter(token for answer in answers for token in answer.output)
    ranked = [*always, *(token for token, _ in counts.most_common() if token not in set(always))][:size]
    covered = sum(counts[token] for token in ranked) / max(1, sum(counts.values()))
    return np.array(sorted(ranked), dtype=np.int64), covered
