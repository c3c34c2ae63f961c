"""Outputs under a grammar are the dense reference's, draw by masked draw, however they are drafted and interrupted.

The grammars are the simulator's automata: every state allows other tokens, some only one. What llguidance makes of
real grammars is tried with the other options.
"""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from roost.drafters.eagle import EagleDrafter
from roost.grammar.rows import GrammarRows
from roost.messages import Abort, OpenSession, Submit
from roost.sampling.params import SamplingParams
from tests.sim.automaton import END, Automaton
from tests.sim.wishes import compiles_at_once
from tests.support.graph_rehearsal import Tape, rehearsed
from tests.support.slow_reference import _changed, _choice, slow_logits
from tests.support.spec_engines import MODES, Setting, Speculating, repetitive
from tests.support.stand_in_heads import checkpoint
from tests.support.tiny_models import VOCAB
from tests.support.workload import DEPTHS

SAMPLED = SamplingParams(temperature=0.8, seed=5)
CHANGED = SamplingParams(temperature=0, logit_bias=((3, 4.0), (END, -2.0)), repetition_penalty=1.3)
NUM_NEW = 24


class Constrained(Speculating):
    """An engine whose grammars are automata."""

    def __init__(self, setting: Setting, **changes: int | bool) -> None:
        super().__init__(setting, **changes)
        self.executor.runner._grammars = GrammarRows(Automaton)
        self.engine.state.start_compiling = compiles_at_once


def asked(number: int, sampling: SamplingParams, *, seed: int = 1) -> Submit:
    """A request under a grammar of its own."""
    prompt = repetitive(number + 1)[number]
    return Submit(
        request_id=f"r{number}",
        tokens=prompt,
        max_new_tokens=NUM_NEW,
        sampling=sampling,
        stop_token_ids=frozenset({END}),
        grammar=f"automaton {seed + number} {VOCAB}",
    )


def several() -> list[Submit]:
    """Requests of every kind, some of them free."""
    kinds = [SamplingParams(temperature=0), SAMPLED, CHANGED, replace(CHANGED, temperature=0.7, seed=9)]
    submits = [asked(number, kinds[number % len(kinds)], seed=5) for number in range(10)]  # each forces something
    free = {number: replace(submits[number], grammar="", stop_token_ids=frozenset()) for number in (0, 4)}
    return [free.get(number, each) for number, each in enumerate(submits)]


@cache
def reference(submit: Submit, kind: str) -> tuple[tuple[int, ...], str]:
    """What a request must return, and why it ends: an automaton follows the output from its first token."""
    automaton = Automaton(submit.grammar) if submit.grammar else None
    output: tuple[int, ...] = ()
    while len(output) < NUM_NEW:
        logits = slow_logits(kind, submit.tokens + output)[-1]
        if automaton is not None:
            logits = np.where(automaton.allowed(), logits, -np.inf)
        token = _choice(_changed(logits, submit, output), submit.sampling, len(submit.tokens) + len(output))
        output += (token,)
        if automaton is not None:
            assert automaton.consume(token)
        if token in submit.stop_token_ids:
            return output, "stop"
    return output, "length"


def check(served: Speculating, submits: list[Submit]) -> None:
    """Outputs and ends are the reference's."""
    for submit in submits:
        output, reason = reference(submit, served.setting.kind)
        assert (submit.request_id, served.output(submit.request_id)) == (submit.request_id, output)
        assert served.finish(submit.request_id).reason == reason
    assert served.engine.state.totals.failed_steps == 0


@DEPTHS
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("preempt_ticks", [0, 3])
def test_outputs_are_the_references_with_any_drafts_and_preemptions(mode: str, depth: int, preempt_ticks: int) -> None:
    served, submits = Constrained(Setting(mode=mode, depth=depth)), several()
    served.serve(submits, preempt_ticks)
    check(served, submits)
    if MODES[mode].speculates:
        assert sum(served.finish(each.request_id).spec.drafts_forced for each in submits) > 0
    assert all(served.finish(each.request_id).spec.drafts_forced == 0 for each in submits if not each.grammar)


@DEPTHS
@pytest.mark.parametrize("mode", MODES)
def test_where_every_draft_is_right_and_prompts_come_in_pieces(mode: str, depth: int) -> None:
    setting = Setting(mode=mode, depth=depth, head="sure", page_size=1, chunk=5)
    served, submits = Constrained(setting), several()
    served.serve(submits)
    check(served, submits)


@DEPTHS
@pytest.mark.parametrize("mode", ["joint", "n-gram"])
@pytest.mark.parametrize("preempt_ticks", [0, 3])
def test_rounds_that_are_narrowed_to_what_was_looked_up_or_forced_follow_their_grammars(
    mode: str, depth: int, preempt_ticks: int
) -> None:
    served, submits = Constrained(Setting(mode=mode, depth=depth), auto=True), several()
    assert served.engine.state.resolved.widths.narrows
    served.serve(submits, preempt_ticks)
    check(served, submits)
    assert sum(served.finish(each.request_id).spec.drafts_forced for each in submits) > 0


@DEPTHS
@pytest.mark.parametrize("mode", MODES)
def test_a_row_that_another_request_left_has_its_own_grammar(mode: str, depth: int) -> None:
    served, submits = Constrained(Setting(mode=mode, depth=depth), max_running=2), several()
    for submit in submits:
        served.post(submit)
    for _ in range(4):
        served.engine.tick()
    served.post(Abort(request_id="r0"))
    served.run()
    check(served, submits[1:])


@DEPTHS
@pytest.mark.parametrize("mode", MODES)
def test_a_turn_of_a_session_follows_its_own_output_alone(mode: str, depth: int) -> None:
    served = Constrained(Setting(mode=mode, depth=depth))
    served.post(OpenSession(session_id="s"))
    history: tuple[int, ...] = ()
    for number in range(3):
        turn = replace(asked(number, SAMPLED), session_id="s")
        served.serve([turn])
        whole = replace(turn, tokens=history + turn.tokens, session_id=None)
        output, reason = reference(whole, served.setting.kind)
        assert (served.output(turn.request_id), served.finish(turn.request_id).reason) == (output, reason)
        history = whole.tokens + output


@pytest.mark.parametrize("graphs", [True, False], ids=["graphs", "eager"])
@DEPTHS
@pytest.mark.parametrize("mode", MODES)
def test_steps_that_are_captured_see_their_drafts_in_between(
    mode: str, depth: int, graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting, submits = Setting(mode=mode, depth=depth), several()
    checkpoint(setting.kind).model(), [reference(each, setting.kind) for each in submits]  # before it runs otherwise
    rehearsed(monkeypatch, graphs=graphs)
    replayed: list[Tape] = []
    replay = Tape.replay
    monkeypatch.setattr(Tape, "replay", lambda tape: (replayed.append(tape), replay(tape))[1])
    served = Constrained(setting, max_running=4, chunk=20)
    served.serve(submits)
    check(served, submits)
    assert bool(replayed) == graphs
    if MODES[mode].speculates:
        assert sum(served.finish(each.request_id).spec.drafts_forced for each in submits) > 0
    served.executor.close()


class Dictated(Automaton):
    """One that leaves no choice at all, and has no end."""

    def allowed(self) -> NDArray[np.bool_]:
        """One token."""
        return np.arange(VOCAB) == 2 + len(self._states) % 5

    def forced(self) -> list[int]:
        """As far as anybody looks."""
        return [2 + (len(self._states) + place) % 5 for place in range(40)]


def test_what_is_dictated_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    draft = EagleDrafter._draft
    monkeypatch.setattr(EagleDrafter, "_draft", lambda self, *args: (passes.append(1), draft(self, *args))[1])
    served, submit = Constrained(Setting(mode="chain", depth=1)), asked(0, SAMPLED)
    passes.clear()  # those of a graph that was captured at the start
    served.executor.runner._grammars = GrammarRows(Dictated)
    served.serve([submit])
    assert served.output("r0") == tuple(2 + (1 + place) % 5 for place in range(NUM_NEW))
    spec = served.finish("r0").spec
    assert not passes and spec.drafts_forced == spec.drafts_accepted == spec.drafts_offered > 0


class Breaking(Automaton):
    """One that cannot go on after a few tokens."""

    def error(self) -> str:
        """Why not."""
        return "too complex" if len(self._states) > 4 else ""


@DEPTHS
@pytest.mark.parametrize("mode", MODES)
def test_a_grammar_that_cannot_go_on_ends_its_own_request_alone(mode: str, depth: int) -> None:
    served, submits = Constrained(Setting(mode=mode, depth=depth)), several()
    broken = max((each for each in submits if each.grammar), key=lambda each: len(reference(each, "forgetful")[0]))
    served.executor.runner._grammars = GrammarRows(
        lambda text: (Breaking if text == broken.grammar else Automaton)(text)
    )
    served.serve(submits)
    check(served, [each for each in submits if each is not broken])
    end = served.finish(broken.request_id)
    assert end.reason == "error" and "too complex" in end.message


def test_logprobs_are_the_models_own_whatever_a_grammar_forbids() -> None:
    served = Constrained(Setting(mode="chain", depth=1))
    submit = replace(asked(0, SamplingParams(temperature=0)), num_top_logprobs=2)
    served.serve([submit])
    output, _ = reference(replace(submit, num_top_logprobs=None), served.setting.kind)
    tokens = submit.tokens + output
    rows = torch.from_numpy(slow_logits(served.setting.kind, tokens)).log_softmax(-1)
    events = [event for event in served.events if getattr(event, "logprobs", None)]
    own = [entry.logprob for event in events for entry in event.logprobs]  # type: ignore[union-attr]
    places = range(len(submit.tokens) - 1, len(tokens) - 1)
    assert own == pytest.approx([float(rows[place, tokens[place + 1]]) for place in places], abs=1e-4)
