"""Grammar rows: the matcher of every row whose output must match something, between its first token and its last.

A row that begins feeds its own output so far to a new matcher, so nothing is saved when a request is preempted, resumed
or aborted. After a step each matcher of it goes on by the tokens that its row accepted, before the next masks are
asked for; a row that began anew meanwhile has another matcher, which that does not reach. Within a step a matcher walks
along drafts and comes back. No torch. Called by the runner, and by the simulator's device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from roost.grammar.matcher import Mask, Matcher, NewMatcher, allows
from roost.step import RowSetup

Masks = NDArray[np.int32]  # [num_nodes, num_words]
Accepted = Callable[[], list[list[int]]]  # waits for the tokens that some rows accepted


@dataclass(slots=True, eq=False)
class _Row:
    """A row's matcher, as far as its output is known."""

    matcher: Matcher
    refused: int | None = None  # the token of its output that it did not take

    def go_on(self, tokens: Sequence[int]) -> None:
        """Consume tokens of the output."""
        for token in tokens:
            if self.refused is None and not self.matcher.consume(token):
                self.refused = token

    @property
    def error(self) -> str:
        """Why it cannot go on; empty if it can."""
        if self.refused is None:
            return self.matcher.error()
        return self.matcher.error() or f"the grammar does not take token {self.refused}, which it allowed"


@dataclass(frozen=True, slots=True)
class _Step:
    """A step whose tokens the matchers of its rows have not consumed."""

    rows: list[_Row]
    accepted: Accepted


class GrammarRows:
    """The matchers of an engine."""

    def __init__(self, new_matcher: NewMatcher) -> None:
        self._new_matcher = new_matcher
        self._rows: dict[int, _Row] = {}  # those that have a grammar
        self._last_step: _Step | None = None

    def begin(self, setup: RowSetup) -> None:
        """A row begins, or begins again: its matcher has seen its output so far."""
        self._rows.pop(setup.row, None)
        if setup.grammar:
            row = self._rows[setup.row] = _Row(self._new_matcher(setup.grammar))
            row.go_on(setup.tokens[setup.prompt_len :].tolist())

    def places(self, rows: Sequence[int]) -> list[int]:
        """Which of these rows have a grammar."""
        return [place for place, row in enumerate(rows) if row in self._rows] if self._rows else []

    def follow(self, rows: Sequence[int], accepted: Accepted) -> None:
        """A step of some rows that have a grammar is on its way; what they accept can be waited for."""
        self.catch_up()
        self._last_step = _Step([self._rows[row] for row in rows], accepted)

    def catch_up(self) -> None:
        """Have every matcher where its row's output ends: waits for what the last step accepted."""
        step, self._last_step = self._last_step, None
        if step is not None:
            for row, tokens in zip(step.rows, step.accepted(), strict=True):
                row.go_on(tokens)

    def force(self, row: int, chain: list[int]) -> list[int]:
        """Put the tokens that a grammar leaves no choice about into a row's drafts `chain`; returns their places.

        Everywhere on the way where only one token may come, that is the draft: it will be accepted if all before
        it are. A draft that is forbidden ends the walk: nothing after it can be accepted.
        """
        matcher, num_consumed = self._matcher(row), 0
        forced: list[int] = []
        places: list[int] = []
        for place in range(len(chain)):
            forced = forced or matcher.forced()
            if forced:
                chain[place] = forced.pop(0)
                places.append(place)
            if not matcher.consume(chain[place]):
                break
            num_consumed += 1
        matcher.rollback(num_consumed)
        return places

    def only_way(self, row: int, num_tokens: int) -> list[int]:
        """The next tokens of a row, `num_tokens` at most, as far as its grammar leaves one way."""
        return self._matcher(row).forced()[:num_tokens]

    def fill(self, row: int, tokens: Sequence[int], parents: Sequence[int], masks: Masks) -> None:
        """Write which tokens may come after each node of a row; the root's own token is consumed already.

        Depth first, and back. What comes after a draft that is forbidden is nobody's to ask: its mask stays.
        """
        matcher = self._matcher(row)
        children: list[list[int]] = [[] for _ in tokens]
        for node in range(1, len(tokens)):
            children[parents[node]].append(node)

        def visit(node: int) -> None:
            mask: Mask = masks[node]
            matcher.fill(mask)
            for child in children[node]:
                if allows(mask, tokens[child]) and matcher.consume(tokens[child]):
                    visit(child)
                    matcher.rollback(1)

        visit(0)

    def error(self, row: int) -> str:
        """Why a row cannot go on; empty if it can."""
        return self._rows[row].error

    def _matcher(self, row: int) -> Matcher:
        """A row's matcher, where its output ends."""
        self.catch_up()  # masks would be a step late
        return self._rows[row].matcher
