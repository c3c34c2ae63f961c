"""Width rules: how wide the rounds of a step may be, and what may be looked up for them.

A step has one width; wider are only rounds whose drafts may be looked up, as its plan says by the length of the match.
What a round may verify its claim covers. Reads the engine's state; never changes it.
"""

from roost.sched.request import Request
from roost.sched.state import State
from roost.spec_shape import MATCH_MAX
from roost.step import StepPlan
from tests.sim.checker import Broken

_MENU = {1, 2, 3, 4, 5, 7}  # of the width of a step, where it is chosen; more rounds than 8 have fewer
_WIDE = {9, 17}  # of rounds whose drafts are looked up


class WidthRules:
    """Watches the plans of one engine."""

    def __init__(self, state: State) -> None:
        self._state, self._resolved = state, state.resolved

    def check(self, plan: StepPlan, requests: list[Request]) -> None:
        """The rounds of a step are as wide as they may be, and no wider; each may add what its claim says."""
        rounds = [i for i in range(len(requests)) if not plan.is_prefill[i]]
        sitting = [each for each in self._state.running if each not in requests and not each.in_prefill]
        allowed, limit = self._allowed(len(rounds), len(sitting)), self._resolved.widths.limit
        own, may_draft = plan.head_width, limit is None or len(rounds) <= limit
        if rounds and own not in allowed:
            raise Broken(f"width: step {plan.step} has {len(rounds)} rounds of {own}, allowed: {allowed}")
        self._check_claims(plan, requests)
        widths = [int(plan.query_lens[i]) for i in rounds]
        if not self._resolved.spec.lookup_steps:
            if set(widths) - {own} or plan.lookup_widths is not None:
                raise Broken(f"width: step {plan.step} of rounds of {own} has {widths}, nothing is looked up")
            return
        if plan.lookup_widths is not None:
            self._check_tables(plan, rounds)
        if self._resolved.widths.narrows:
            self._check_narrowed(plan, rounds, may_draft=may_draft)
        else:
            self._check_widened(plan, {i: requests[i] for i in rounds}, may_draft=may_draft)
        if widths and max(widths) > own and self._state.step_limits.is_in_force:
            limits = self._state.step_limits
            raise Broken(f"width: step {plan.step} of rounds of {own} has {widths} while steps are limited: {limits}")

    def _allowed(self, num_rounds: int, num_sitting: int) -> set[int]:
        """Widths of a step of so many rounds; of those who sit it out, some may have been counted."""
        widths = self._resolved.widths
        most, shape = widths.limit, self._resolved.spec
        menu = {shape.tokens}
        if widths.is_auto:
            menu = {1} if widths.narrows and not shape.pair else _MENU
        allowed = menu if most is None or num_rounds <= most else set()
        if most is not None and num_rounds + num_sitting > most:
            allowed = allowed | {1}
        return allowed

    def _check_claims(self, plan: StepPlan, requests: list[Request]) -> None:
        """A round writes one token for certain, and at most what it may accept."""
        shape = self._resolved.spec
        for i, request in enumerate(requests):
            claims = [(each.size, each.most) for each in request.lease.claims if each.step == plan.step]
            width = int(plan.query_lens[i])
            due = (width, width) if plan.is_prefill[i] else (1, 1 + min(shape.depth_max, width - 1))
            if claims != [due]:
                raise Broken(f"claim: step {plan.step} claims {claims} for {request.id}, {due} are due")

    def _check_tables(self, plan: StepPlan, rounds: list[int]) -> None:
        """A plan says of each round what follows from a match: nothing without one, and no more nodes than it has."""
        tables = plan.lookup_widths
        assert tables is not None
        if tables.shape != (len(plan.rows), MATCH_MAX + 1):
            raise Broken(f"lookup: step {plan.step} has {tables.shape} widths for {len(plan.rows)} rows")
        for i, table in enumerate(tables.tolist()):
            most = int(plan.query_lens[i]) if i in rounds else 0
            if table[0] or not 0 <= min(table) <= max(table) <= most or 1 in table:
                raise Broken(f"lookup: step {plan.step} looks up {table} nodes for row {i} of {most}")

    def _check_narrowed(self, plan: StepPlan, rounds: list[int], *, may_draft: bool) -> None:
        """Where no more is verified than was drafted, a round has room for the most of it, chosen from all widths."""
        if rounds and plan.lookup_widths is None:
            raise Broken(f"lookup: step {plan.step} does not say what to look up")
        for i in rounds:
            assert plan.lookup_widths is not None
            table, width = plan.lookup_widths[i].tolist(), int(plan.query_lens[i])
            wide = _MENU | _WIDE if may_draft else set()
            if width != max(plan.head_width, *table) or not set(table) <= {0} | wide:
                raise Broken(f"width: step {plan.step} has {width} nodes for row {i} that looks up {table}: {wide}")

    def _check_widened(self, plan: StepPlan, rounds: dict[int, Request], *, may_draft: bool) -> None:
        """Else a round takes its own width or, known to repeat a text, one and the same wide one; not beside prompts.

        A head is told of each round after which matches it is not asked: then all of the round is looked up.
        """
        own, pair = plan.head_width, self._resolved.spec.pair
        if rounds and (plan.lookup_widths is None) != (own == 1 or not pair):
            raise Broken(f"lookup: step {plan.step} of width {own} says {plan.lookup_widths}")
        wide = {i: int(plan.query_lens[i]) for i in rounds if plan.query_lens[i] != own}
        for i, width in wide.items():
            is_meant = self._resolved.widths.is_auto and width in _WIDE and own > 1 and may_draft
            if not is_meant or plan.has_chunks or not rounds[i].drafts.repeat_len or len(set(wide.values())) > 1:
                raise Broken(f"width: step {plan.step} of rounds of {own} has {wide}: {rounds[i].id} repeats nothing")
        tables = {} if plan.lookup_widths is None else {i: set(plan.lookup_widths[i].tolist()) for i in rounds}
        for i, table in tables.items():
            if not table <= {0, int(plan.query_lens[i])}:
                raise Broken(f"lookup: step {plan.step} looks up a part of row {i}: {table}")
