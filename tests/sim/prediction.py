"""Prediction: the oracle of a request's round: what it must accept, and what is counted and learned of it.

Made from the request's own tokens, the plan and the model; slots of KV are nothing it knows.
"""

from dataclasses import dataclass
from itertools import takewhile

from roost.sched.request import Request
from roost.step import StepPlan
from tests.sim.automaton import Automaton, choose
from tests.sim.drafting import DraftedRound, Drafting, guesses, look_up
from tests.sim.model import Model, Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictedRound:
    """One round."""

    tokens: list[int]  # accepted, the bonus token last
    num_forced: int  # accepted drafts that a grammar left no choice about
    drafted: DraftedRound
    found: list[int]  # the looked-up drafts, used or not

    @property
    def num_found_right(self) -> int:
        """How many of the looked-up drafts that were verified are accepted tokens."""
        pairs = zip(self.found[: self.drafted.num_looked_up], self.tokens[:-1], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


class Oracle:
    """Predicts the rounds of one configuration."""

    def __init__(self, model: Model, drafting: Drafting) -> None:
        self._model, self.drafting = model, drafting

    def predict_round(self, plan: StepPlan, place: int, request: Request) -> PredictedRound:
        """What the next round of a request brings, which is at this place of a step; or the end of its prompt."""
        record, sequence, state = request.turn.record, Sequence(self._model), 0
        for token in record.slice(0, len(record)).tolist():
            state = sequence.push(token)[2]
        automaton = Automaton(request.submit.grammar) if request.submit.grammar else None
        if automaton is not None:
            for token in record.slice(request.turn.prompt_len, len(record)).tolist():
                automaton.consume(token)
        if plan.is_prefill[place]:
            drafted = DraftedRound(num_nodes=1, num_head=0)
            return PredictedRound(
                tokens=self._said(sequence, state, [], automaton), num_forced=0, drafted=drafted, found=[]
            )
        return self._predict(plan, place, sequence, state, automaton)

    def _predict(
        self, plan: StepPlan, place: int, sequence: Sequence, state: int, automaton: Automaton | None
    ) -> PredictedRound:
        model, shape = self._model, plan.shape
        way = automaton.forced() if automaton is not None else []
        drafted = self.drafting.of(plan, place, model.match_len(state), len(way))
        is_looked_up = self.drafting.looks_up_for(plan, place)
        found = look_up(sequence, state, shape.depth_max) if is_looked_up else []
        paths = drafted.paths(guesses(sequence, state, drafted.num_head, model.draft_knows), found)
        places: list[int] = []
        if automaton is not None and drafted.is_tree and way:  # the rest of the tree hangs on its root
            paths = [way[: shape.accept_max_of(drafted.num_nodes) - 1]]
            places = list(range(len(paths[0])))
        elif automaton is not None and not drafted.is_tree:
            places = _put_forced(automaton, paths[0])
        said = [self._said(sequence, state, path, automaton) for path in paths]
        tokens = max(said, key=len)
        num_forced = sum(each < len(tokens) - 1 for each in places)
        return PredictedRound(tokens=tokens, num_forced=num_forced, drafted=drafted, found=found)

    def _said(self, sequence: Sequence, state: int, path: list[int], automaton: Automaton | None) -> list[int]:
        """The tokens that a round with this path accepts, the bonus token last."""
        length, tokens = len(sequence), list[int]()
        while True:
            token = self._model.next_token(state)
            tokens.append(token if automaton is None else choose(token, automaton.allowed()))
            if len(tokens) > len(path) or path[len(tokens) - 1] != tokens[-1]:
                break
            if automaton is not None:
                automaton.consume(tokens[-1])
            state = sequence.push(tokens[-1])[2]
        sequence.cut(length)
        if automaton is not None:
            automaton.rollback(len(tokens) - 1)
        return tokens


def _put_forced(automaton: Automaton, chain: list[int]) -> list[int]:
    """Put forced tokens into a chain of drafts, wherever they stand on the way; returns their places."""
    places: list[int] = []
    num_consumed = 0
    for place in range(len(chain)):
        only = automaton.only()
        if only is not None:
            chain[place] = only
            places.append(place)
        if not automaton.consume(chain[place]):
            break
        num_consumed += 1
    automaton.rollback(num_consumed)
    return places
