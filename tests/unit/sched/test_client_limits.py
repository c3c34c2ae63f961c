"""Limits of clients: each counts for its own client alone, exactly, and holds nobody else up."""

from dataclasses import replace

import pytest

from roost.clients import ClientLimits
from roost.clock import VirtualClock
from roost.config.options import SessionConfig
from roost.messages import (
    Abort,
    CloseSession,
    Event,
    Finished,
    ForkSession,
    GetSession,
    GetSessions,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    SessionState,
    SessionStates,
    Submit,
)
from roost.sched.engine import Engine
from roost.sched.request import Mark
from tests.sim.wishes import SimStopFinder
from tests.support.engine_client import EngineClientDouble, resolved, witness


def engine_client(
    *limits: ClientLimits, session: SessionConfig | None = None, **sched: int | bool
) -> EngineClientDouble:
    """A engine_client whose clients have limits."""
    options = replace(resolved(session=session, **sched), clients={each.name: each for each in limits})  # type: ignore[arg-type]
    clock = VirtualClock()
    return EngineClientDouble(Engine(options, witness(options), clock, new_stop_finder=SimStopFinder), clock)


def submit(name: str, client: str = "", max_new: int = 20, **more: object) -> Submit:
    """A request for some tokens."""
    return Submit(request_id=name, tokens=(1, 2, 3), max_new_tokens=max_new, client=client, **more)  # type: ignore[arg-type]


def refusals(events: list[Event]) -> list[Event]:
    """What says that something was refused."""
    return [event for event in events if isinstance(event, Refused)]


def running(at: EngineClientDouble) -> list[str]:
    """Who runs."""
    return [request.id for request in at.engine.state.running]


def test_a_client_at_its_running_limit_is_passed_over_and_holds_nobody_up() -> None:
    at = engine_client(ClientLimits(name="a", running=1))
    for name, client in (("a1", "a"), ("a2", "a"), ("b1", "b"), ("b2", "b")):
        at.send(submit(name, client))
    assert running(at) == ["a1", "b1", "b2"]
    at.send(Abort(request_id="b1"))
    assert running(at) == ["a1", "b2"]
    assert "as many requests running" in at.engine.waiting_for and "a" not in at.engine.waiting_for.split()
    at.send(Abort(request_id="a1"))
    assert running(at) == ["a2", "b2"]
    at.run()
    assert at.finished("a2").reason == "length"


def test_where_places_are_few_the_client_that_runs_least_starts_first() -> None:
    at = engine_client(ClientLimits(name="a"), ClientLimits(name="b"), max_running=2, max_queued=8)
    for name, client in (("a1", "a"), ("a2", "a"), ("a3", "a"), ("b1", "b"), ("b2", "b")):
        at.send(submit(name, client))
    assert running(at) == ["a1", "a2"]
    at.send(Abort(request_id="a1"))
    assert running(at) == ["a2", "b1"], "b runs less than a, though it came later"
    at.send(Abort(request_id="a2"))
    assert running(at) == ["a3", "b1"], "and now a does"
    at.run()


def test_a_preempted_request_counts_again_only_when_it_runs_again() -> None:
    at = engine_client(ClientLimits(name="a", running=1))
    at.send(submit("a1", "a"))
    at.tick(3)
    at.send(submit("a2", "a"))
    at.engine.state.mark(at.engine.state.requests["a1"], Mark.PREEMPT)
    at.tick()
    assert running(at) == ["a1"], "it was the first in line, and is again"
    at.run()
    assert [at.finished(name).reason for name in ("a1", "a2")] == ["length", "length"]


def test_the_queue_of_a_client_is_full_for_that_client_alone() -> None:
    at = engine_client(ClientLimits(name="a", running=1, queued=2), max_queued=8)
    at.send(OpenSession(session_id="s", client="a"))
    at.send(submit("a1", "a", session_id="s"))
    assert running(at) == ["a1"], "who runs does not wait"
    at.send(submit("waits for the session", "a", session_id="s", queue=True))
    at.send(submit("follows", "a", shares_with="a1"))
    (refused,) = at.send(submit("one too many", "a"))
    assert isinstance(refused, Refused) and (refused.status, refused.param) == (429, "")
    assert "this key" in refused.message
    assert not refusals(at.send(submit("b1", "b")))
    at.send(Abort(request_id="follows"))
    assert not refusals(at.send(submit("fits again", "a")))
    at.run()
    assert at.finished("fits again").reason == "length"


def test_sessions_of_a_client_are_limited_forks_included() -> None:
    at = engine_client(ClientLimits(name="a", sessions=2))
    for name in ("one", "two"):
        assert isinstance(at.send(OpenSession(session_id=name, client="a"))[0], SessionState)
    for command in (
        OpenSession(session_id="three", client="a"),
        ForkSession(session_id="one", new_id="three", client="a"),
    ):
        (refused,) = at.send(command)
        assert isinstance(refused, Refused) and refused.status == 429 and "this key" in refused.message
    assert isinstance(at.send(OpenSession(session_id="three", client="b"))[0], SessionState)
    at.send(CloseSession(session_id="two", client="a"))
    assert isinstance(at.send(ForkSession(session_id="one", new_id="three", client="a"))[0], SessionState)


def test_a_clients_sessions_end_by_themselves_where_it_has_a_time() -> None:
    at = engine_client(ClientLimits(name="a", session_ttl_s=2), session=SessionConfig(session_ttl_s=9))
    said = {
        client: at.send(OpenSession(session_id="s", client=client, ttl_ms=ttl_ms))[0]
        for client, ttl_ms in (("a", None), ("b", None), ("c", 50))
    }
    assert {client: event.ttl_ms for client, event in said.items() if isinstance(event, SessionState)} == {
        **{"a": 2000, "b": 9000, "c": 50}
    }
    at.wait(2000)
    (states,) = at.send(GetSessions())
    assert isinstance(states, SessionStates) and [each.client for each in states.sessions] == ["b"]


@pytest.mark.parametrize(("priority", "is_allowed"), [(-3, False), (-2, True), (1, True), (2, False)])
def test_a_priority_outside_of_a_clients_range_is_refused_and_the_range_is_named(
    priority: int, is_allowed: bool
) -> None:
    at = engine_client(ClientLimits(name="a", priority_min=-2, priority_max=1))
    answer = at.send(submit("r", "a", max_new=1, priority=priority))
    assert not refusals(at.send(submit("other", "b", max_new=1, priority=priority)))
    if is_allowed:
        assert not refusals(answer)
        return
    (refused,) = answer
    assert isinstance(refused, Refused) and (refused.status, refused.param) == (403, "priority")
    assert "at least -2 and at most 1" in refused.message


def test_sessions_of_different_clients_may_have_one_name_and_are_reached_by_their_own_alone() -> None:
    at = engine_client()
    for client in ("a", "b"):
        assert isinstance(at.send(OpenSession(session_id="chat", client=client, cache_salt=client))[0], SessionState)
        at.send(submit(f"{client}1", client, max_new=2, session_id="chat"))
        at.run()
    (states,) = at.send(GetSessions(client="a"))
    assert isinstance(states, SessionStates)
    assert [(each.session_id, each.client, each.cache_salt) for each in states.sessions] == [("chat", "a", "a")]
    at.send(RewindSession(session_id="chat", turn=0, client="a"))
    (other,) = at.send(GetSession(session_id="chat", client="b"))
    assert isinstance(other, SessionState) and other.turns == 1
    for command in (
        GetSession(session_id="chat", client="c"),
        RewindSession(session_id="chat", turn=0, client="c"),
        ForkSession(session_id="chat", new_id="mine", client="c"),
        CloseSession(session_id="chat", client="c"),
        submit("c1", "c", session_id="chat"),
        GetSession(session_id="chat"),
        CloseSession(session_id="a\0chat", client="b"),
    ):
        (refused,) = at.send(command)
        assert isinstance(refused, Refused) and (refused.status, refused.param) == (404, "session_id"), command
    (refused,) = at.send(OpenSession(session_id="chat", client="a"))
    assert isinstance(refused, Refused) and refused.message == "session_id: a session 'chat' is open already"
    assert at.send(CloseSession(session_id="chat", client="a")) == [SessionClosed(session_id="chat")]


def test_the_cache_of_one_client_is_not_found_by_another() -> None:
    at = engine_client(overlap=False)
    prompt = tuple(range(1, 21))
    cached = {}
    for number, (client, salt) in enumerate([("a", ""), ("a", ""), ("b", ""), ("b", "a"), ("a", "x"), ("", "")]):
        at.send(Submit(request_id=f"r{number}", tokens=prompt, max_new_tokens=2, client=client, cache_salt=salt))
        at.run()
        end = at.finished(f"r{number}")
        assert isinstance(end, Finished)
        cached[number] = end.usage.cached_tokens
    assert cached.pop(1) > 0
    assert set(cached.values()) == {0}
