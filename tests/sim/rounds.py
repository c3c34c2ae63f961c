"""Rounds: holds every live round against the oracle: what it accepts, what is counted of it, what is learned of it.

What drafts bring is learned from each live round that looked some up, once, and from no other. Watches what settle
tells the draft-length policy; never changes it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roost.draft_length.lookups import RowDrafts
from roost.sched.request import Request
from roost.sched.state import State
from roost.step import StepPlan
from roost.step_times.times import TimedStep
from tests.sim.checker import Broken, Checker
from tests.sim.drafting import Drafting
from tests.sim.model import Model
from tests.sim.prediction import Oracle, PredictedRound
from tests.sim.wishes import first_stop

LearnedStep = tuple[list[int], list[int]]  # accept lengths of what was not looked up, nodes of what was planned wider


@dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """What the policy is told of one round."""

    request_id: str
    match_len: int
    found: tuple[int, ...]
    said: tuple[int, ...]
    num_head: int  # drafts of the head that were verified


class Rounds:
    """Watches the rounds of one engine."""

    def __init__(self, state: State, checker: Checker, model: Model) -> None:
        self._state, self._checker = state, checker
        self._drafting = Drafting(state.resolved)
        self._oracle = Oracle(model, self._drafting)
        self._names: dict[int, str] = {}  # by what was learned of a request: whose it is
        self._due: list[Lesson] = []  # of the step just collected
        self._learned: list[Lesson] = []
        # of each step: tokens that its live rounds brought, but for those whose drafts were looked up
        self._steps_due: list[LearnedStep] = []
        self._steps_learned: list[LearnedStep] = []
        self._watch_learning()

    def launched(self, requests: Sequence[Request]) -> None:
        """Remember whose is what is learned."""
        self._names |= {id(request.drafts): request.id for request in requests}

    def collected(self, plan: StepPlan) -> None:
        """A step was collected; its live rows follow."""
        wide = [int(width) for width in plan.query_lens if width > plan.head_width]
        is_widened = not plan.has_chunks and not self._state.resolved.widths.narrows and plan.shape.lookup_steps > 0
        self._steps_due.append(([], wide if is_widened else []))

    def sampled(self, plan: StepPlan, place: int, request: Request, tokens: list[int]) -> None:
        """A live row sampled: so many tokens, and these, are due."""
        ask, predicted = self._checker.asks[request.id], self._oracle.predict_round(plan, place, request)
        expected = predicted.tokens
        if len(tokens) != len(expected):
            raise Broken(f"accept: {request.id} accepted {len(tokens)} tokens, the oracle says {len(expected)}")
        if tokens != expected:
            raise Broken(f"tokens: {request.id} sampled {tokens}, the oracle says {expected}")
        ask.counts.forced += predicted.num_forced
        if predicted.drafted.num_nodes > 1:
            self._count(request, predicted)
        is_other = plan.lookup_widths is not None and predicted.drafted.is_used
        if not plan.is_prefill[place] and not is_other:
            self._steps_due[-1][0].append(len(tokens))
        if self._drafting.looks_up_for(plan, place):
            self._due.append(self._lesson(request, predicted))
        end, _ = first_stop(ask.submit, ask.output + tokens) or (request.max_new_tokens, None)
        ask.overshot = min(request.max_new_tokens, end) - len(ask.output) < len(tokens)

    def _count(self, request: Request, predicted: PredictedRound) -> None:
        """Count a round that carried drafts."""
        counts, spec = self._checker.asks[request.id].counts, self._state.resolved.spec
        drafted = predicted.drafted
        counts.rounds += 1
        has_head = spec.pair and not drafted.is_tree and not drafted.is_used  # behind its drafts there is nothing
        num_correct = len(predicted.tokens) - 1  # more than the head drafted where a grammar forced the rest
        num_head = max(spec.head_steps_of(drafted.num_nodes), num_correct)
        counts.offered += num_head if has_head else drafted.num_nodes - 1
        if spec.pair and drafted.is_used:
            counts.lookups += 1
            counts.looked_up += drafted.num_looked_up
            counts.found_right += predicted.num_found_right

    def _lesson(self, request: Request, predicted: PredictedRound) -> Lesson:
        drafted, spec = predicted.drafted, self._state.resolved.spec
        return Lesson(
            request_id=request.id,
            match_len=drafted.match_len,
            found=tuple(predicted.found),
            said=tuple(predicted.tokens),
            num_head=spec.head_steps_of(drafted.num_nodes) if spec.pair and not drafted.is_used else 0,
        )

    def _watch_learning(self) -> None:
        lookups = self._state.draft_policy.lookups
        note = lookups.note

        def watched(
            row: RowDrafts, match_len: int, drafts: Sequence[int], said: Sequence[int], num_head_drafts: int
        ) -> None:
            note(row, match_len, drafts, said, num_head_drafts)
            self._learned.append(
                Lesson(
                    request_id=self._names.get(id(row), "nobody"),
                    match_len=match_len,
                    found=tuple(drafts),
                    said=tuple(said),
                    num_head=num_head_drafts,
                )
            )

        lookups.note = watched  # type: ignore[method-assign]

        policy = self._state.draft_policy
        collected = policy.collected

        def watched_step(
            step: TimedStep, accept_lens: list[int], looked_up: Sequence[Any] = (), wide: Sequence[int] = ()
        ) -> None:
            self._steps_learned.append((list(accept_lens), list(wide)))
            collected(step, accept_lens, looked_up, wide)

        policy.collected = watched_step  # type: ignore[method-assign]

    def after_tick(self) -> None:
        """What was due was learned, in order, and nothing else."""
        steps_due, steps, self._steps_due, self._steps_learned = self._steps_due, self._steps_learned, [], []
        if self._state.resolved.widths.is_auto and steps_due != steps:
            raise Broken(f"learning: steps brought {steps_due}, of which {steps} was learned")
        due, learned, self._due, self._learned = self._due, self._learned, [], []
        if due != learned:
            wrong = [each for each in due + learned if each not in due or each not in learned]
            raise Broken(f"learning: {len(due)} rounds are due, {len(learned)} were learned, they differ in {wrong}")
