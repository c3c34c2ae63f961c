"""Step limits: how many rows and tokens a step may have, learned from steps that failed on the device.

A device may fail (run out of memory, say) above a size that nobody knows beforehand. When a step fails that was larger
than all that succeeded, its size becomes a limit. After many good steps a larger one is tried; each failed try doubles
the wait, so a passing fault does not limit the engine for ever and a lasting one costs few steps. Failures that a
single request causes by itself set no limit. Integers only. Called by settle; planner and admission obey.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import ge

from roost.kv.lease import TurnId
from roost.step import StepPlan

PATIENCE = 64  # good steps before a larger one is tried; doubled after each try that failed


@dataclass(slots=True, kw_only=True)
class SizeLimit:
    """The limit of one measure of a step: its rows or its tokens."""

    most: int | None = None  # in force; None: no limit
    good: int = 0  # the largest that succeeded
    bad: int = 0  # the one that failed last, while there is a limit
    suspects: frozenset[TurnId] = frozenset()  # the requests that were in it
    patience: int = PATIENCE
    num_waited: int = 0  # good steps since the limit changed
    is_tried: bool = False  # whether it was raised since a step failed

    def broke(self, size: int, suspects: frozenset[TurnId]) -> None:
        """A step of this size failed: go back to the largest that succeeded, or to half of the size if that is more."""
        if size <= self.good:  # this size has succeeded before, but does so no longer
            self.good = 0
        if self.is_tried:
            self.patience *= 2
        self.bad, self.most, self.suspects = size, max(1, self.good, size // 2), suspects
        self.num_waited, self.is_tried = 0, False

    def worked(self, size: int) -> None:
        """A step of this size succeeded: after enough of them, raise the limit half-way to the size that failed."""
        self.good = max(self.good, size)
        if self.most is None:
            return
        if self.good >= self.bad:  # the fault has passed, or size was not the cause
            self.lift()
            return
        self.num_waited += 1
        if self.num_waited >= self.patience:
            further = self.most + (self.most > self.good)  # no step had that size: rounds come in widths
            self.most, self.is_tried = min(self.bad, max(further, (self.good + self.bad + 1) // 2)), True
            self.num_waited = 0

    def lift(self) -> None:
        """Allow any size again."""
        self.most, self.suspects, self.num_waited, self.is_tried = None, frozenset(), 0, False


@dataclass(slots=True, kw_only=True)
class StepLimits:
    """The limits of a step. A single row with one token is always allowed."""

    rows: SizeLimit = field(default_factory=SizeLimit)
    tokens: SizeLimit = field(default_factory=SizeLimit)
    unexplained: tuple[int, int] | None = None  # rows and tokens of a failed step, although larger ones succeeded

    @property
    def is_in_force(self) -> bool:
        """Whether any step may be too large."""
        return self.rows.most is not None or self.tokens.most is not None

    def has_place(self, num_rows: int, num_tokens: int, width: int) -> bool:
        """Whether a row of `width` tokens may join a step of `num_rows` rows and `num_tokens` tokens."""
        rows, tokens = self.rows.most, self.tokens.most
        return num_rows == 0 or ((rows is None or num_rows < rows) and (tokens is None or num_tokens + width <= tokens))

    def tokens_left(self, num_tokens: int, most: int) -> int:
        """How many of `most` prefill tokens may join a step that has `num_tokens` tokens."""
        return most if self.tokens.most is None else max(0, min(most, self.tokens.most - num_tokens))

    def may_be_large(self, plan: StepPlan) -> bool:
        """Whether a failed step of one row may have been too large: a chunk longer than any that succeeded."""
        return bool(plan.is_prefill.all()) and _num_tokens(plan) > max(1, self.tokens.good)

    def broke(self, plan: StepPlan, turns: Iterable[TurnId]) -> None:
        """Learn from a failed step: limit the measures that were larger than ever before.

        If neither was, the first such failure is only noted, and a second one limits both.
        """
        size = len(plan.rows), _num_tokens(plan)
        measures = list(zip((self.rows, self.tokens), size, strict=True))
        if len(plan.rows) == 1:  # it cannot have fewer rows; a chunk can have fewer tokens, a round cannot
            measures = measures[1:] if self.may_be_large(plan) else []
        larger = [(limit, number) for limit, number in measures if number > limit.good]
        if measures and not larger and self.unexplained is None:  # most such faults pass
            self.unexplained = size
            return
        for limit, number in larger or measures:
            limit.broke(number, frozenset(turns))

    def worked(self, plan: StepPlan) -> None:
        """A step succeeded."""
        size = len(plan.rows), _num_tokens(plan)
        self.rows.worked(size[0])
        self.tokens.worked(size[1])
        if self.unexplained is not None and all(map(ge, size, self.unexplained)):
            self.unexplained = None

    def acquit(self, turn: TurnId) -> None:
        """A request made a step fail by itself: lift limits from failed steps that it was in."""
        for limit in (self.rows, self.tokens):
            if turn in limit.suspects:
                limit.lift()


def _num_tokens(plan: StepPlan) -> int:
    return int(plan.query_lens.sum())
