"""Setups: the device is told how a row is sampled whenever the row begins, and only then."""

import pytest

from roost.messages import GREEDY, OpenSession, Submit
from roost.sampling.params import SamplingParams
from roost.sched.request import Mark
from roost.step import RowSetup
from tests.support.engine_client import EngineClientDouble, Recorder, engine_client, resolved

PENALISES = SamplingParams(temperature=0, frequency_penalty=1.0)


def _submit(name: str = "a", **more: object) -> Submit:
    base = {"tokens": (1, 2, 3, 4, 5), "max_new_tokens": 8, "sampling": PENALISES, **more}
    return Submit(request_id=name, **base)  # type: ignore[arg-type]


def _at(broken: frozenset[int] = frozenset(), **options: int | str) -> tuple[EngineClientDouble, Recorder]:
    recorder = Recorder(resolved(**options), broken)  # type: ignore[arg-type]
    return engine_client(recorder, **options), recorder


def _setups(recorder: Recorder) -> list[tuple[int, RowSetup]]:
    return [(int(plan.step), setup) for plan in recorder.plans for setup in plan.setups]


def test_a_row_is_set_up_in_the_first_step_that_names_it_and_in_no_other() -> None:
    at, recorder = _at(chunk=2)
    at.send(_submit(min_new_tokens=2, stop_token_ids=frozenset([7, 3])))
    at.run()
    ((step, setup),) = _setups(recorder)
    assert step == 0 and setup.row == recorder.plans[0].rows[0]
    assert (setup.prompt_len, setup.min_len, setup.stop_ids) == (5, 7, (3, 7))
    assert setup.sampling == PENALISES and setup.tokens.tolist() == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(("spec", "sent"), [("none", []), ("ngram", [1, 2, 3, 4, 5])])
def test_without_penalties_the_tokens_travel_only_to_a_drafter_that_looks_things_up(spec: str, sent: list[int]) -> None:
    at, recorder = _at(spec=spec)
    at.send(_submit(sampling=GREEDY))
    at.run()
    ((_, setup),) = _setups(recorder)
    assert setup.tokens.tolist() == sent


@pytest.mark.parametrize("trouble", ["preempt", "failure"])
def test_a_row_that_begins_again_is_set_up_with_the_output_so_far(trouble: str) -> None:
    at, recorder = _at(frozenset([3] if trouble == "failure" else []))
    at.send(_submit(min_new_tokens=4))
    while len(at.output("a")) < 3:
        at.tick()
    if trouble == "preempt":
        at.engine.state.mark(at.engine.state.requests["a"], Mark.PREEMPT)
    at.run()
    (_, first), (_, again) = _setups(recorder)
    sent = len(again.tokens) - 5
    assert sent >= 3 and again.tokens.tolist() == [1, 2, 3, 4, 5, *at.output("a")[:sent]]
    assert (first.prompt_len, first.min_len) == (again.prompt_len, again.min_len) == (5, 9)


def test_a_row_whose_first_step_broke_is_set_up_again() -> None:
    at, recorder = _at(frozenset([0]))
    at.send(_submit())
    at.run()
    assert [setup.tokens.tolist() for _, setup in _setups(recorder)] == [[1, 2, 3, 4, 5]] * 2


def test_a_turn_is_set_up_with_its_history_as_prompt() -> None:
    at, recorder = _at()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("first", session_id="s", max_new_tokens=3))
    at.run()
    at.send(_submit("second", session_id="s", tokens=(9,), min_new_tokens=1))
    at.run()
    _, setup = _setups(recorder)[-1]
    assert setup.tokens.tolist() == [1, 2, 3, 4, 5, *at.output("first"), 9]
    assert (setup.prompt_len, setup.min_len) == (9, 10)
