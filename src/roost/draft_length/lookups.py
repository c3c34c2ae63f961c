"""Lookups: how often looked-up drafts and the head's are right, for each row, by how much was found again.

The first draft of a round is judged apart from later ones: few matches go on, but those that do go on for long. Every
lookup is compared with what was said, drafted or not; the head's drafts where they were verified. A row goes by its own
rounds, and by everybody's while it has few. A lookup that was right as far as it was seen makes a row one that repeats
a text: what follows there is right more often than after any short match. Deterministic. Part of the draft-length
policy; fed by settle.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

# how often the first draft of a round is right, and a later one where the one before it was
Share = tuple[float, float]

_MATCH_LENS = (1, 2, 3, 4, 6, 8, 16, 32)  # least of each class of matches; rows that repeat have the last ones
# of drafts assumed to be right before any was seen, by class; a match whose next token is right is a longer one
_FIRST_SHARES = (
    (0.15, 0.35),
    (0.35, 0.5),
    (0.5, 0.6),
    (0.6, 0.75),
    (0.75, 0.85),
    (0.85, 0.93),
    (0.93, 0.97),
    (0.97, 0.98),
)
_FIRST_HEAD_SHARE = (0.7, 0.7)
NEVER: Share = (0.0, 0.0)
_MEMORY = 1 - 1 / 32  # factor by which a round reduces the weight of earlier ones
_FIRST_WEIGHT = 2.0  # drafts that what is assumed counts for
_COMMON_WEIGHT = 8.0  # drafts of its own that what was seen of all rows counts for


class DraftShare:
    """How often drafts are right; recent rounds count most."""

    __slots__ = ("_first_right", "_first_seen", "_later_right", "_later_seen")

    def __init__(self) -> None:
        self._first_right = self._first_seen = self._later_right = self._later_seen = 0.0

    def note(self, num_right: int, num_seen: int) -> None:
        """Take in a round: of `num_seen` drafts that could be judged all were right, or all but the last one."""
        self._first_right = self._first_right * _MEMORY + (num_right > 0)
        self._first_seen = self._first_seen * _MEMORY + 1
        if num_seen > 1:
            self._later_right = self._later_right * _MEMORY + num_right - 1
            self._later_seen = self._later_seen * _MEMORY + num_seen - 1

    def value(self, assumed: Share, weight: float) -> Share:
        """The share, where `assumed` counts for `weight` drafts."""
        first, later = assumed
        return (
            (self._first_right + first * weight) / (self._first_seen + weight),
            (self._later_right + later * weight) / (self._later_seen + weight),
        )


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
    # what was decided for it, by length of a match; for a load of steps, and by what: see the policy
    decided: dict[tuple[int, ...], tuple[tuple[int, int], list[int]]] = field(default_factory=dict)


class Lookups:
    """What drafts have brought all rows, and how often those of a row are right."""

    def __init__(self, lookup_steps: int) -> None:
        self._lookup_steps = lookup_steps
        self._all = RowDrafts()
        self._common: tuple[list[Share], list[Share]] | None = None  # shares of all rows, by class; None: to be made

    def note(
        self, row: RowDrafts, match_len: int, drafts: Sequence[int], said: Sequence[int], num_head_drafts: int
    ) -> None:
        """Take in a round that said some tokens, where `drafts` were looked up and the head drafted so many."""
        self._common = None
        num_said, num_right, of_all = len(said), 0, self._all
        if num_head_drafts:
            num_seen = min(num_said, num_head_drafts)
            num_correct = min(num_said - 1, num_head_drafts)  # behind its drafts a grammar may have forced more
            row.head.note(num_correct, num_seen)
            of_all.head.note(num_correct, num_seen)
            if match_len:
                at = class_of(match_len)
                row.head_beside[at].note(num_correct, num_seen)
                of_all.head_beside[at].note(num_correct, num_seen)
        row.num_noted += 1
        found_len, row.repeat_len = max(match_len, row.repeat_len), 0
        if not match_len:
            return
        num_judged, at = min(num_said, self._lookup_steps), class_of(found_len)
        while num_right < num_judged and drafts[num_right] == said[num_right]:
            num_right += 1
        num_seen = min(num_right + 1, num_judged)
        row.looked_up[at].note(num_right, num_seen)
        of_all.looked_up[at].note(num_right, num_seen)
        if num_right == num_judged:
            row.repeat_len = found_len + num_right

    def lookup_share(self, row: RowDrafts, match_len: int) -> Share:
        """How often drafts are right that were looked up after so many tokens that were found again."""
        at = class_of(match_len)
        return row.looked_up[at].value(self._of_all()[0][at], _COMMON_WEIGHT)

    def head_share(self, row: RowDrafts, match_len: int) -> Share:
        """The same of the head's drafts there: where tokens come again, it knows better what follows, too."""
        at = class_of(match_len)
        return row.head_beside[at].value(row.head.value(self._of_all()[1][at], _COMMON_WEIGHT), _COMMON_WEIGHT)

    def _of_all(self) -> tuple[list[Share], list[Share]]:
        """Shares of all rows: of what was looked up, and of the head beside it."""
        if self._common is None:
            usual = self._all.head.value(_FIRST_HEAD_SHARE, _FIRST_WEIGHT)
            looked_up = zip(self._all.looked_up, _FIRST_SHARES, strict=True)
            self._common = (
                [share.value(first, _FIRST_WEIGHT) for share, first in looked_up],
                [share.value(usual, _COMMON_WEIGHT) for share in self._all.head_beside],
            )
        return self._common


def tokens_of(share: Share, width: int) -> float:
    """Expected tokens that a round of `width` nodes adds, where drafts are right that often."""
    first, later = share
    return 1 + first * (width - 1 if later >= 1 else (1 - later ** (width - 1)) / (1 - later))


@dataclass(frozen=True, slots=True)
class Repeat:
    """A row that repeats a text, as far as is known when its next round is planned."""

    share: Share  # how often looked-up drafts are right
    unknown_len: int  # tokens that rounds in flight may add, which must be right as well

    def tokens(self, width: int, usual: float) -> float:
        """Expected tokens of a round of `width` nodes, which adds the `usual` ones if the row repeats no more."""
        still = self.share[1] ** self.unknown_len
        return still * tokens_of(self.share, width) + (1 - still) * usual


_CLASSES = [sum(length >= least for least in _MATCH_LENS) - 1 for length in range(_MATCH_LENS[-1] + 1)]


def class_of(match_len: int) -> int:
    """Matches of one class are as good as each other; -1: nothing was found again."""
    return _CLASSES[match_len] if match_len < len(_CLASSES) else len(_MATCH_LENS) - 1
