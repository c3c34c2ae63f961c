"""Packing: answers packed side by side into rows of one length, so that every batch has the same shape.

A row knows for each token which answer it belongs to and whether the target generated it. Answers longer than a row are
cut. Called by the training pipeline.
"""

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from roost.train.answers import TrainingAnswer, key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedRows:
    """Packed answers."""

    tokens: np.ndarray  # [num_rows, row_len] int32
    owners: np.ndarray  # [num_rows, row_len] int32: number of the answer within the row; -1: padding
    is_said: np.ndarray  # [num_rows, row_len] bool: the target generated it

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def key(self) -> str:
        """A hash of the rows."""
        return blake2b(self.tokens.tobytes() + self.owners.tobytes(), digest_size=8).hexdigest()

    def batches(self, size: int, seed: int) -> Iterator["PackedRows"]:
        """Full batches in shuffled order; rows left over are not used in this epoch."""
        order = np.random.default_rng(seed).permutation(len(self))
        for first in range(0, len(self) - size + 1, size):
            yield self._pick(order[first : first + size])

    def parts(self, size: int) -> Iterator["PackedRows"]:
        """The rows in order, so many at a time; rows left over are not used."""
        for first in range(0, len(self) - size + 1, size):
            yield self._pick(np.arange(first, first + size))

    def _pick(self, index: np.ndarray) -> "PackedRows":
        return PackedRows(tokens=self.tokens[index], owners=self.owners[index], is_said=self.is_said[index])


def split(answers: Sequence[TrainingAnswer], share: float) -> tuple[list[TrainingAnswer], list[TrainingAnswer]]:
    """Training answers, and held-out ones: those to about `share` of the prompts, both answers to a prompt together.

    A prompt that was trained on is never held out in a later run, even if there are more prompts.
    """
    shares = [key(each.prompt) % 2**20 / 2**20 for each in answers]
    border = max(share, min(shares, default=0.0))  # at least one prompt is held out
    learn = [each for each, at in zip(answers, shares, strict=True) if at > border]
    return learn, [each for each, at in zip(answers, shares, strict=True) if at <= border]


def pack(answers: Sequence[TrainingAnswer], row_len: int) -> PackedRows:
    """Pack answers into rows by best fit: longest first, each into the fullest row that has room for it."""
    groups: list[list[TrainingAnswer]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for answer in sorted(answers, key=lambda each: -len(each.prompt) - len(each.output)):
        length = min(len(answer.prompt) + len(answer.output), row_len)
        at = bisect_left(rooms, (length, 0))
        if at == len(rooms):
            groups.append([])
            room, row = row_len, len(groups) - 1
        else:
            room, row = rooms.pop(at)
        groups[row].append(answer)
        insort(rooms, (room - length, row))
    rows = PackedRows(
        tokens=np.zeros((len(groups), row_len), dtype=np.int32),
        owners=np.full((len(groups), row_len), -1, dtype=np.int32),
        is_said=np.zeros((len(groups), row_len), dtype=np.bool_),
    )
    for row, group in enumerate(groups):
        at = 0
        for number, answer in enumerate(group):
            both = (*answer.prompt, *answer.output)[: row_len - at]
            rows.tokens[row, at : at + len(both)], rows.owners[row, at : at + len(both)] = both, number
            rows.is_said[row, at + len(answer.prompt) : at + len(both)] = True
            at += len(both)
    return rows


def draft_vocabulary(answers: Sequence[TrainingAnswer], size: int, always: Sequence[int]) -> np.ndarray:
    """The most frequent ids of the answers, in ascending order; `always` are included."""
    counts = Counter(token for answer in answers for token in answer.output)
    ranked = [*always, *(token for token, _ in counts.most_common() if token not in always)]
    return np.array(sorted(ranked[:size]), dtype=np.int64)


def share_said(answers: Sequence[TrainingAnswer], ids: Sequence[int]) -> float:
    """The share of all generated tokens that are among `ids`."""
    known = frozenset(ids)
    said = [token in known for answer in answers for token in answer.output]
    return sum(said) / max(1, len(said))
