"""Lookups: how often looked-up drafts and the head's are right, for each row, and so who drafts it next.

Every lookup is compared with what was said, drafted or not, by how many tokens were found again; the head's drafts
where they were verified. A row goes by its own rounds, and by everybody's while it has few. A lookup that was right as
far as it was seen makes a row one that repeats: its next round may be wide. Deterministic. Part of the scheduler's
state; fed by settle, asked by settle and planner.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

_MATCH_LENS = (1, 2, 3, 4, 6, 8, 16, 32)  # least of each class of matches
# of drafts assumed to be right before any was seen, by class
_FIRST_SHARES = (0.15, 0.35, 0.5, 0.6, 0.75, 0.85, 0.93, 0.97)
_FIRST_HEAD_SHARE = 0.7
_MEMORY = 1 - 1 / 32  # factor by which a round reduces the weight of earlier ones
_EDGE = 0.05  # by which a lookup must be right more often than the head: what was seen of few is often luck
_FIRST_WEIGHT = 2.0  # drafts that what is assumed counts for
_COMMON_WEIGHT = 16.0  # drafts of its own that what was seen of all rows counts for
MATCH_MAX = 8  # tokens that lookups compare
NEVER = MATCH_MAX + 1  # no match is as long


class Share:
    """How often the next draft is right, where all before it were; recent rounds count most."""

    __slots__ = ("_num_right", "_num_seen")

    def __init__(self) -> None:
        self._num_right = self._num_seen = 0.0

    def note(self, num_right: int, num_seen: int) -> None:
        """Take in a round: `num_seen` drafts that could be judged, of which all but the last one were right."""
        self._num_right = self._num_right * _MEMORY + num_right
        self._num_seen = self._num_seen * _MEMORY + num_seen

    def value(self, assumed: float, weight: float) -> float:
        """The share, where `assumed` counts for `weight` drafts."""
        return (self._num_right + assumed * weight) / (self._num_seen + weight)


@dataclass(slots=True, kw_only=True)
class RowDrafts:
    """What drafts have brought one row."""

    head: Share = field(default_factory=Share)
    # by class of matches; where tokens come again, the head knows better what follows, too
    head_beside: list[Share] = field(default_factory=lambda: [Share() for _ in _MATCH_LENS])
    looked_up: list[Share] = field(default_factory=lambda: [Share() for _ in _MATCH_LENS])
    lookup_least: int = 1  # tokens that must be found again for a lookup to go before the head
    repeat_len: int = 0  # tokens that the row was last seen to repeat; 0: it is not known to repeat a text
    repeats: float = 0.0  # how often the next looked-up draft will be right, where it does


class Lookups:
    """What drafts have brought all rows, and what follows for each."""

    def __init__(self, *, has_head: bool, lookup_steps: int) -> None:
        self._has_head, self._lookup_steps = has_head, lookup_steps
        self._all = RowDrafts()

    def new_row(self) -> RowDrafts:
        """A row of which nothing was seen."""
        row = RowDrafts()
        self._decide(row)
        return row

    def note(
        self, row: RowDrafts, match_len: int, drafts: Sequence[int], said: Sequence[int], num_head_drafts: int
    ) -> None:
        """Take in a round that said some tokens, where `drafts` were looked up and the head drafted so many."""
        if num_head_drafts:
            num_right = len(said) - 1
            for each in (row, self._all):
                each.head.note(num_right, min(num_right + 1, num_head_drafts))
                if match_len:
                    each.head_beside[_class_of(match_len)].note(num_right, min(num_right + 1, num_head_drafts))
        repeat_len, row.repeat_len, row.repeats = max(match_len, row.repeat_len), 0, 0.0
        if match_len:
            num_seen, num_right = min(len(said), self._lookup_steps), 0
            while num_right < num_seen and drafts[num_right] == said[num_right]:
                num_right += 1
            at = _class_of(repeat_len)
            for each in (row, self._all):
                each.looked_up[at].note(num_right, min(num_right + 1, num_seen))
            if num_right == num_seen:
                row.repeat_len = repeat_len + num_right
                row.repeats = self._lookup_share(row, _class_of(row.repeat_len))
        self._decide(row)

    def _decide(self, row: RowDrafts) -> None:
        """From which match on a lookup is worth more than the head: there, and wherever more was found again."""
        if not self._has_head:
            return
        row.lookup_least = NEVER
        for at in reversed(range(_class_of(MATCH_MAX) + 1)):
            if self._lookup_share(row, at) < self._head_share(row, at) + _EDGE:
                break
            row.lookup_least = _MATCH_LENS[at]

    def _head_share(self, row: RowDrafts, at: int) -> float:
        usual = self._all.head.value(_FIRST_HEAD_SHARE, _FIRST_WEIGHT)
        common = self._all.head_beside[at].value(usual, _COMMON_WEIGHT)
        return row.head_beside[at].value(row.head.value(common, _COMMON_WEIGHT), _COMMON_WEIGHT)

    def _lookup_share(self, row: RowDrafts, at: int) -> float:
        common = self._all.looked_up[at].value(_FIRST_SHARES[at], _FIRST_WEIGHT)
        return row.looked_up[at].value(common, _COMMON_WEIGHT)


@dataclass(frozen=True, slots=True)
class Repeat:
    """A row that repeats a text, as far as is known when its next round is planned."""

    share: float  # how often the next looked-up draft is right
    unknown_len: int  # tokens that rounds in flight may add, which must be right as well

    def tokens(self, width: int, usual: float) -> float:
        """Expected tokens of a round of `width` nodes, which adds the `usual` ones if the row repeats no more."""
        if self.share >= 1:
            return float(width)
        still = self.share**self.unknown_len
        return still * (1 - self.share**width) / (1 - self.share) + (1 - still) * usual


def _class_of(match_len: int) -> int:
    return bisect_right(_MATCH_LENS, match_len) - 1
