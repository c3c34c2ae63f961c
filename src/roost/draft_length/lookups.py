"""Lookups: how often looked-up drafts and the head's are right, for each row, by how much was found again.

Every lookup is compared with what was said, drafted or not; the head's drafts where they were verified. A row goes by
its own rounds, and by everybody's while it has few. A lookup that was right as far as it was seen makes a row one that
repeats a text: what follows there is right more often than after any short match. Deterministic. Part of the
draft-length policy; fed by settle.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

_MATCH_LENS = (1, 2, 3, 4, 6, 8, 16, 32)  # least of each class of matches; rows that repeat have the last ones
# of drafts assumed to be right before any was seen, by class
_FIRST_SHARES = (0.15, 0.35, 0.5, 0.6, 0.75, 0.85, 0.93, 0.97)
_FIRST_HEAD_SHARE = 0.7
_MEMORY = 1 - 1 / 32  # factor by which a round reduces the weight of earlier ones
_FIRST_WEIGHT = 2.0  # drafts that what is assumed counts for
_COMMON_WEIGHT = 16.0  # drafts of its own that what was seen of all rows counts for


class DraftShare:
    """How often the next draft is right, where all before it were; recent rounds count most."""

    __slots__ = ("_num_right", "_num_seen")

    def __init__(self) -> None:
        self._num_right = self._num_seen = 0.0

    def note(self, num_right: int, num_seen: int) -> None:
        """Take in a round: of `num_seen` drafts that could be judged all were right, or all but the last one."""
        self._num_right = self._num_right * _MEMORY + num_right
        self._num_seen = self._num_seen * _MEMORY + num_seen

    def value(self, assumed: float, weight: float) -> float:
        """The share, where `assumed` counts for `weight` drafts."""
        return (self._num_right + assumed * weight) / (self._num_seen + weight)


def _by_class() -> list[DraftShare]:
    return [DraftShare() for _ in _MATCH_LENS]


@dataclass(slots=True, kw_only=True)
class RowDrafts:
    """What drafts have brought one row."""

    head: DraftShare = field(default_factory=DraftShare)
    head_beside: list[DraftShare] = field(default_factory=_by_class)  # the same by what a lookup found again beside it
    looked_up: list[DraftShare] = field(default_factory=_by_class)
    repeat_len: int = 0  # tokens that the row was last seen to repeat; 0: it is not known to repeat a text
    num_noted: int = 0  # rounds
    # what was last decided for it, and for what: rows, width, rounds that were noted
    decided: tuple[tuple[int, ...], list[int]] = ((), [])


class Lookups:
    """What drafts have brought all rows, and how often those of a row are right."""

    def __init__(self, lookup_steps: int) -> None:
        self._lookup_steps = lookup_steps
        self._all = RowDrafts()

    def note(
        self, row: RowDrafts, match_len: int, drafts: Sequence[int], said: Sequence[int], num_head_drafts: int
    ) -> None:
        """Take in a round that said some tokens, where `drafts` were looked up and the head drafted so many."""
        if num_head_drafts:
            num_right = len(said) - 1
            for each in (row, self._all):
                each.head.note(num_right, min(num_right + 1, num_head_drafts))
                if match_len:
                    each.head_beside[class_of(match_len)].note(num_right, min(num_right + 1, num_head_drafts))
        row.num_noted += 1
        found_len, row.repeat_len = max(match_len, row.repeat_len), 0
        if not match_len:
            return
        num_seen, num_right = min(len(said), self._lookup_steps), 0
        while num_right < num_seen and drafts[num_right] == said[num_right]:
            num_right += 1
        for each in (row, self._all):
            each.looked_up[class_of(found_len)].note(num_right, min(num_right + 1, num_seen))
        if num_right == num_seen:
            row.repeat_len = found_len + num_right

    def lookup_share(self, row: RowDrafts, match_len: int) -> float:
        """How often the next draft is right that was looked up after so many tokens that were found again."""
        at = class_of(match_len)
        return row.looked_up[at].value(self._all.looked_up[at].value(_FIRST_SHARES[at], _FIRST_WEIGHT), _COMMON_WEIGHT)

    def head_share(self, row: RowDrafts, match_len: int) -> float:
        """The same of the head's drafts there: where tokens come again, it knows better what follows, too."""
        at, usual = class_of(match_len), self._all.head.value(_FIRST_HEAD_SHARE, _FIRST_WEIGHT)
        common = self._all.head_beside[at].value(usual, _COMMON_WEIGHT)
        return row.head_beside[at].value(row.head.value(common, _COMMON_WEIGHT), _COMMON_WEIGHT)


def tokens_of(share: float, width: int) -> float:
    """Expected tokens that a round of `width` nodes adds, where each draft is right that often."""
    return float(width) if share >= 1 else (1 - share**width) / (1 - share)


@dataclass(frozen=True, slots=True)
class Repeat:
    """A row that repeats a text, as far as is known when its next round is planned."""

    share: float  # how often the next looked-up draft is right
    unknown_len: int  # tokens that rounds in flight may add, which must be right as well

    def tokens(self, width: int, usual: float) -> float:
        """Expected tokens of a round of `width` nodes, which adds the `usual` ones if the row repeats no more."""
        still = self.share**self.unknown_len
        return still * tokens_of(self.share, width) + (1 - still) * usual


def class_of(match_len: int) -> int:
    """Matches of one class are as good as each other; -1: nothing was found again."""
    return bisect_right(_MATCH_LENS, match_len) - 1
