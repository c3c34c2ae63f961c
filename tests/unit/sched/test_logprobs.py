"""Log-probabilities: each prompt token that was asked for gets its own once, in order; outputs get theirs if asked."""

import numpy as np
import pytest

from roost import messages
from roost.messages import OpenSession, PromptLogprobs, Submit, TokenLogprob, Tokens
from roost.sched.request import Mark
from tests.sim.model import states_of
from tests.support.engine_client import MODEL, EngineClientDouble, Recorder, engine_client, resolved

PROMPT = tuple(mix * 7 % 50 for mix in range(1, 15))


def _submit(name: str = "a", **more: object) -> Submit:
    base = {"tokens": PROMPT, "max_new_tokens": 4, **more}
    return Submit(request_id=name, **base)  # type: ignore[arg-type]


def _scored(at: EngineClientDouble, name: str) -> list[int]:
    """Prompt positions that were scored, in the order they came."""
    parts = [event for event in at.events if isinstance(event, PromptLogprobs) and event.request_id == name]
    return [event.start + i for event in parts for i in range(len(event.logprobs))]


def _expected(tokens: list[int], first: int, top: int) -> list[TokenLogprob]:
    """Log-probabilities of tokens[first:]."""
    states = states_of(MODEL, np.array(tokens)).tolist()
    return [
        TokenLogprob(logprob=MODEL.logprob(states[i - 1], tokens[i]), top_logprobs=tuple(MODEL.top(states[i - 1], top)))
        for i in range(first, len(tokens))
    ]


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [1, 3, 5, 64])
@pytest.mark.parametrize("first", [0, 1, 6, 12, 13, 14])
def test_the_prompt_tokens_after_the_first_of_interest_are_scored_once_and_in_order(
    first: int, chunk: int, overlap: bool
) -> None:
    at = engine_client(chunk=chunk, overlap=overlap)
    at.send(_submit(prompt_logprobs_from=first, num_top_logprobs=2))
    at.run()
    assert _scored(at, "a") == list(range(first + 1, 14))
    logprobs = [entry for event in at.events if isinstance(event, PromptLogprobs) for entry in event.logprobs]
    assert logprobs == (_expected(list(PROMPT), first + 1, 2) if first < 13 else [])
    kinds = [type(event) for event in at.events]
    assert PromptLogprobs not in kinds[kinds.index(Tokens) :]


def test_a_cached_prompt_is_run_again_from_the_first_position_of_interest() -> None:
    at = engine_client()
    at.send(_submit("before"))
    at.run()
    for name, first, cached in (("all", 0, 0), ("some", 9, 8), ("none", None, 12), ("last", 13, 12)):
        at.send(_submit(name, prompt_logprobs_from=first))
        at.run()
        assert at.finished(name).usage.cached_tokens == cached
        assert _scored(at, name) == list(range((14 if first is None else first) + 1, 14))


@pytest.mark.parametrize("ticks", range(1, 8))
def test_a_preemption_neither_loses_nor_repeats_a_score(ticks: int) -> None:
    at = engine_client(chunk=3)
    at.send(_submit(prompt_logprobs_from=2, max_new_tokens=8))
    at.tick(ticks)
    at.engine.state.mark(at.engine.state.requests["a"], Mark.PREEMPT)
    at.run()
    assert at.engine.state.totals.preemptions == 1 and _scored(at, "a") == list(range(3, 14))


@pytest.mark.parametrize("step", range(6))
def test_a_broken_step_neither_loses_nor_repeats_a_score(step: int) -> None:
    at = engine_client(Recorder(resolved(chunk=3), frozenset([step])), chunk=3)
    at.send(_submit(prompt_logprobs_from=2))
    at.run()
    assert at.engine.state.totals.failed_steps > 0 and _scored(at, "a") == list(range(3, 14))


def test_a_request_that_is_resumed_after_its_logprobs_finds_its_output_in_place() -> None:
    at = engine_client()
    at.send(_submit(prompt_logprobs_from=0, max_new_tokens=20))
    while len(at.output("a")) < 7:
        at.tick()
    at.engine.state.mark(at.engine.state.requests["a"], Mark.PREEMPT)
    at.run()
    starts = [numbers[0] for kind, _, numbers in at.engine.state.trace.last() if kind == "admit"]
    assert starts == [0, 20]


def test_a_turn_logprobs_what_it_does_not_inherit() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("first", session_id="s"))
    at.run()
    at.send(_submit("second", session_id="s", tokens=(9, 8, 7, 6), prompt_logprobs_from=0))
    inherited = at.engine.state.requests["second"].lease.settled_len
    assert inherited >= 17
    at.run()
    assert _scored(at, "second") == list(range(inherited + 1, 22))


def test_a_request_of_no_new_tokens_has_its_prompt_scored() -> None:
    at = engine_client()
    at.send(_submit(prompt_logprobs_from=0, max_new_tokens=0))
    at.run()
    assert _scored(at, "a") == list(range(1, 14)) and at.finished("a").reason == "length"


def test_each_output_token_has_its_score_with_as_many_alternatives_as_were_asked_for() -> None:
    at = engine_client()
    for name, top in (("none", None), ("zero", 0), ("three", 3)):
        at.engine.post(_submit(name, num_top_logprobs=top), at.events.append)
    at.run()
    for name, top in (("none", None), ("zero", 0), ("three", 3)):
        sent = [event for event in at.events if isinstance(event, Tokens) and event.request_id == name]
        logprobs = [entry for event in sent for entry in event.logprobs]
        assert logprobs == ([] if top is None else _expected([*PROMPT, *at.output(name)], 14, top))


def test_the_logprobs_of_tokens_past_the_end_are_not_sent() -> None:
    at = engine_client()
    at.send(_submit(num_top_logprobs=0, max_new_tokens=2))
    at.run()
    assert sum(len(event.logprobs) for event in at.events if isinstance(event, Tokens)) == 2


def test_the_engine_makes_no_object_for_a_scored_position(monkeypatch: pytest.MonkeyPatch) -> None:
    at = engine_client()
    with monkeypatch.context() as patched:
        patched.setattr(messages, "TokenLogprob", None)  # whoever reads them makes them
        at.send(_submit(prompt_logprobs_from=0, num_top_logprobs=3))
        at.run()
    scored = [event for event in at.events if isinstance(event, PromptLogprobs | Tokens)]
    assert sum(len(event.logprobs) for event in scored) == 13 + 4
    assert [entry for event in scored for entry in event.logprobs] == _expected([*PROMPT, *at.output("a")], 1, 3)
