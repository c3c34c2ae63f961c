"""Stops: token ids and stop strings end the output at the first token that completes one, not before min_new_tokens."""

import pytest

from roost.messages import OpenSession, Refused, Submit
from roost.sched.engine import Engine
from roost.sched.request import Mark
from tests.support.engine_client import Recorder, engine_client, resolved, witness


def _submit(name: str = "a", **more: object) -> Submit:
    base = {"tokens": (2, 2, 3), "max_new_tokens": 8, **more}
    return Submit(request_id=name, **base)  # type: ignore[arg-type]


def _free_output() -> list[int]:
    """What the model says after the prompt, if nothing stops it."""
    at = engine_client()
    at.send(_submit())
    at.run()
    return at.output("a")


OUTPUT = _free_output()
assert len(set(OUTPUT)) == len(OUTPUT) and 0 not in OUTPUT, "the tests below want different tokens"


def _run(**more: object) -> tuple[list[int], str, int | str | None]:
    at = engine_client()
    at.send(_submit(**more))
    at.run()
    finished = at.finished("a")
    return at.output("a"), finished.reason, finished.matched


def test_a_stop_id_ends_the_output_and_is_named() -> None:
    assert _run(stop_token_ids=frozenset(OUTPUT[2:4])) == (OUTPUT[:3], "stop", OUTPUT[2])


def test_a_stop_string_ends_the_output_at_the_token_that_completes_it() -> None:
    text = f"{OUTPUT[2]} {OUTPUT[3]}"
    assert _run(stop=("7 7", text)) == (OUTPUT[:4], "stop", text)


def test_of_a_stop_id_and_a_stop_string_at_the_same_token_the_id_is_named() -> None:
    assert _run(stop=(str(OUTPUT[2]),), stop_token_ids=frozenset(OUTPUT[2:3])) == (OUTPUT[:3], "stop", OUTPUT[2])


def test_an_output_that_meets_no_stop_ends_at_its_limit_and_names_none() -> None:
    text = f"{OUTPUT[1]} {OUTPUT[3]}"
    assert _run(stop=(text,)) == (OUTPUT, "length", None)


@pytest.mark.parametrize("stop", [{"stop_token_ids": frozenset(OUTPUT[2:4])}, {"stop": tuple(map(str, OUTPUT[2:4]))}])
def test_nothing_stops_the_first_min_new_tokens(stop: dict[str, object]) -> None:
    assert _run(min_new_tokens=2, **stop)[0] == OUTPUT[:3]
    assert _run(min_new_tokens=3, **stop)[0] == OUTPUT[:4]
    assert _run(min_new_tokens=4, **stop)[0] == OUTPUT


def test_a_stop_string_that_begins_before_min_new_tokens_does_not_count() -> None:
    text = f"{OUTPUT[2]} {OUTPUT[3]}"
    assert _run(min_new_tokens=2, stop=(text,))[0] == OUTPUT[:4]
    assert _run(min_new_tokens=3, stop=(text,))[0] == OUTPUT


def test_a_stop_at_the_last_token_allowed_is_a_stop() -> None:
    assert _run(stop=(str(OUTPUT[7]),)) == (OUTPUT, "stop", str(OUTPUT[7]))


def test_a_limit_before_the_stop_string_is_complete_is_the_end() -> None:
    assert _run(max_new_tokens=3, stop=(f"{OUTPUT[2]} {OUTPUT[3]}",)) == (OUTPUT[:3], "length", None)


@pytest.mark.parametrize("trouble", ["preempt", "failure"])
def test_a_stop_string_is_found_across_a_preemption_and_a_broken_step(trouble: str) -> None:
    at = engine_client(Recorder(resolved(), frozenset([3] if trouble == "failure" else [])))
    at.send(_submit(stop=(f"{OUTPUT[2]} {OUTPUT[3]}",)))
    while len(at.output("a")) < 2:
        at.tick()
    if trouble == "preempt":
        at.engine.state.mark(at.engine.state.requests["a"], Mark.PREEMPT)
    at.run()
    assert at.engine.state.totals.preemptions == 1
    assert at.output("a") == OUTPUT[:4] and at.finished("a").reason == "stop"


def test_a_turn_that_stops_at_a_text_keeps_what_was_returned_as_history() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("first", session_id="s", stop=(f"{OUTPUT[2]} {OUTPUT[3]}",)))
    at.run()
    at.send(_submit("second", session_id="s", tokens=(5,)))
    at.run()
    assert at.finished("second").usage.prompt_tokens == 3 + 4 + 1


def test_an_engine_without_a_tokenizer_refuses_stop_strings() -> None:
    options, answer = resolved(), []
    engine = Engine(options, witness(options), engine_client().clock)
    engine.post(_submit(stop=("x",)), answer.append)
    engine.tick()
    (refused,) = answer
    assert isinstance(refused, Refused) and (refused.status, refused.param) == (400, "stop")
