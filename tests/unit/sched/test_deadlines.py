"""Deadlines: a request whose time is up ends as a timeout, once, wherever it is, and costs nobody else anything."""

import pytest

from roost.messages import Abort, Finished, OpenSession, Refused, Submit, Usage
from roost.sched.request import Mark
from tests.support.engine_client import EngineClientDouble, engine_client


def _submit(name: str, timeout_ms: int | None = None, **more: object) -> Submit:
    base = {"tokens": (1, 2, 3, 4, 5), "max_new_tokens": 20, **more}
    return Submit(request_id=name, timeout_ms=timeout_ms, **base)  # type: ignore[arg-type]


def _queued() -> EngineClientDouble:
    at = engine_client(max_running=1)
    at.send(_submit("other"))
    at.send(_submit("late", 10))
    assert at.engine.state.requests["late"] in at.engine.state.queued
    return at


def _waiting_for_a_session() -> EngineClientDouble:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("other", session_id="s"))
    at.send(_submit("late", 10, session_id="s", queue=True))
    return at


def _following() -> EngineClientDouble:
    at = engine_client(chunk=1)
    at.send(_submit("other"))
    at.send(_submit("late", 10, shares_with="other"))
    assert at.engine.state.requests["late"].leader is not None
    return at


def _in_prefill() -> EngineClientDouble:
    at = engine_client(chunk=1)
    at.send(_submit("late", 10))
    at.send(_submit("other"))
    at.tick()
    assert at.engine.state.requests["late"].in_prefill
    return at


def _decoding() -> EngineClientDouble:
    at = engine_client()
    at.send(_submit("other"))
    at.send(_submit("late", 10))
    at.tick(4)
    assert at.engine.state.requests["late"].output_len > 0
    return at


def _suspended() -> EngineClientDouble:
    at = engine_client(max_running=2)
    at.send(_submit("late", 10))
    at.send(_submit("other"))
    at.tick(3)
    at.engine.state.mark(at.engine.state.requests["late"], Mark.PREEMPT)
    at.send(_submit("before", priority=1))  # has its place by the time it could come back
    assert at.output("late") and at.engine.state.requests["late"] in at.engine.state.queued
    return at


PLACES = (_queued, _waiting_for_a_session, _following, _in_prefill, _decoding, _suspended)


@pytest.mark.parametrize("place", PLACES, ids=lambda place: place.__name__[1:])
def test_a_request_whose_time_is_up_ends_once_wherever_it_is(place: object) -> None:
    at = place()  # type: ignore[operator]
    at.wait(9)
    assert "late" in at.engine.state.requests
    at.wait(1)
    finished = at.finished("late")
    assert finished.reason == "timeout" and "10 ms" in finished.message and finished.matched is None
    at.run()
    assert at.finished("late") is finished and at.finished("other").reason == "length"
    assert finished.usage.completion_tokens == len(at.output("late"))


def test_a_turn_whose_time_is_up_leaves_nothing_in_its_session() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("late", 10, session_id="s"))
    at.tick(4)
    assert at.output("late")
    at.wait(10)
    at.send(_submit("next", session_id="s", max_new_tokens=1))
    at.run()
    assert at.finished("next").usage.prompt_tokens == 5


def test_an_abort_and_a_deadline_in_the_same_tick_end_a_request_once() -> None:
    at = engine_client()
    at.send(_submit("late", 10))
    at.engine.post(Abort(request_id="late"), at.events.append)
    at.wait(10)
    assert at.finished("late").reason == "abort"


def test_a_turn_that_is_refused_because_another_ran_out_of_time_is_not_ended_again() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("late", 10, session_id="s"))
    at.send(_submit("empty", 10, session_id="s", tokens=(), queue=True))
    at.wait(10)
    at.run()
    assert at.finished("late").reason == "timeout"
    assert isinstance(at.end("empty"), Refused)


def test_a_request_that_ends_in_time_is_not_ended_by_its_deadline() -> None:
    at = engine_client()
    at.send(_submit("quick", 10, max_new_tokens=2))
    at.run()
    at.wait(10)
    assert at.finished("quick").reason == "length"


def test_time_that_was_spent_waiting_counts() -> None:
    at = engine_client(max_running=1)
    at.send(_submit("other", max_new_tokens=3))
    at.send(_submit("late", 10))
    at.wait(9)
    at.tick(6)
    assert at.output("late")
    at.wait(1)
    assert at.finished("late").reason == "timeout"


def test_the_followers_of_a_leader_whose_time_is_up_start() -> None:
    at = engine_client(chunk=1)
    at.send(_submit("late", 10))
    at.send(_submit("follower", shares_with="late", max_new_tokens=2))
    at.wait(10)
    at.run()
    assert at.finished("follower").reason == "length"


def test_a_timeout_in_the_queue_says_what_it_would_have_cost() -> None:
    at = _queued()
    at.wait(10)
    assert at.finished("late").usage == Usage(prompt_tokens=5, cached_tokens=0, completion_tokens=0)
    assert not [event for event in at.events if isinstance(event, Finished) and event.request_id == "other"]
