"""Step limits: how large a step may be, learned from steps that broke.

A device breaks above some number of rows, or of tokens, that nobody knows beforehand. A step that broke lowers what it
exceeded of all that went through before; after many good steps a larger one is tried, later each time that breaks, so
that a passing fault limits nobody for ever and a lasting one costs few steps. What a single request proves to be its
own fault teaches nothing. Integers only. Called by settle; the planner and admission keep to it.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from operator import ge

from roost.kv.lease import TurnId
from roost.step import StepPlan

PATIENCE = 64  # good steps before a larger one is tried; twice as many after each try that broke


@dataclass(slots=True, kw_only=True)
class SizeLimit:
    """One measure of a step, its rows or its tokens."""

    most: int | None = None  # in force; None: no limit
    good: int = 0  # the largest that went through
    bad: int = 0  # the one that broke last, while there is a limit
    suspects: frozenset[TurnId] = frozenset()  # who was in it
    patience: int = PATIENCE
    num_waited: int = 0  # good steps since the limit changed
    is_tried: bool = False  # whether it was raised since a step broke

    def broke(self, size: int, suspects: frozenset[TurnId]) -> None:
        """A step of this size broke: go back to what went through, or to half where nothing of use is known."""
        if size <= self.good:  # what went through once does so no longer
            self.good = 0
        if self.is_tried:
            self.patience *= 2
        self.bad, self.most, self.suspects = size, max(1, self.good, size // 2), suspects
        self.num_waited, self.is_tried = 0, False

    def worked(self, size: int) -> None:
        """A step of this size went through: once in a while, allow half of the way to what broke."""
        self.good = max(self.good, size)
        if self.most is None:
            return
        if self.good >= self.bad:  # it has passed, or it was something else
            self.lift()
            return
        self.num_waited += 1
        if self.num_waited >= self.patience:
            further = self.most + (self.most > self.good)  # no step was as large: rounds come in widths
            self.most, self.is_tried = min(self.bad, max(further, (self.good + self.bad + 1) // 2)), True
            self.num_waited = 0

    def lift(self) -> None:
        """Allow any size again."""
        self.most, self.suspects, self.num_waited, self.is_tried = None, frozenset(), 0, False


@dataclass(slots=True, kw_only=True)
class StepLimits:
    """What a step may have; a single row is always allowed, and one token of it."""

    rows: SizeLimit = field(default_factory=SizeLimit)
    tokens: SizeLimit = field(default_factory=SizeLimit)
    unexplained: tuple[int, int] | None = None  # a step that broke, although more rows and more tokens went through

    @property
    def is_in_force(self) -> bool:
        """Whether any step may be too large."""
        return self.rows.most is not None or self.tokens.most is not None

    def has_place(self, num_rows: int, num_tokens: int, width: int) -> bool:
        """Whether a row of `width` tokens may join so many rows with so many tokens in all."""
        rows, tokens = self.rows.most, self.tokens.most
        return num_rows == 0 or ((rows is None or num_rows < rows) and (tokens is None or num_tokens + width <= tokens))

    def tokens_left(self, num_tokens: int, most: int) -> int:
        """How many of `most` tokens of prefill a step that has `num_tokens` may still take."""
        return most if self.tokens.most is None else max(0, min(most, self.tokens.most - num_tokens))

    def may_be_large(self, plan: StepPlan) -> bool:
        """Whether a step of one row, if it broke, did so for its size: a chunk longer than any that went through."""
        return bool(plan.is_prefill.all()) and _num_tokens(plan) > max(1, self.tokens.good)

    def broke(self, plan: StepPlan, turns: Iterable[TurnId]) -> None:
        """Learn from a step that broke: what is larger than ever is suspected; where nothing is, all of it, in time."""
        size = len(plan.rows), _num_tokens(plan)
        measures = list(zip((self.rows, self.tokens), size, strict=True))
        if len(plan.rows) == 1:  # it cannot have fewer rows, and a round no fewer tokens
            measures = measures[1:] if self.may_be_large(plan) else []
        larger = [(limit, number) for limit, number in measures if number > limit.good]
        if measures and not larger and self.unexplained is None:  # mostly it has passed by then
            self.unexplained = size
            return
        for limit, number in larger or measures:
            limit.broke(number, frozenset(turns))

    def worked(self, plan: StepPlan) -> None:
        """A step went through."""
        size = len(plan.rows), _num_tokens(plan)
        self.rows.worked(size[0])
        self.tokens.worked(size[1])
        if self.unexplained is not None and all(map(ge, size, self.unexplained)):
            self.unexplained = None

    def acquit(self, turn: TurnId) -> None:
        """A request broke a step of its own: those that broke with it in them were not too large."""
        for limit in (self.rows, self.tokens):
            if turn in limit.suspects:
                limit.lift()


def _num_tokens(plan: StepPlan) -> int:
    return int(plan.widths.sum())
