"""Sessions that go on in another engine: from what was acknowledged, once, whoever fails meanwhile."""

from dataclasses import replace

import pytest

from roost.clock import VirtualClock
from roost.config.options import SessionConfig
from roost.messages import (
    CloseSession,
    Event,
    Finished,
    ForkSession,
    GetHistory,
    GetSession,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    SessionHistory,
    SessionState,
    Submit,
)
from roost.sched.engine import Engine
from roost.session.journal import SessionJournal
from tests.sim.wishes import SimStopFinder
from tests.support.engine_client import EngineClientDouble, resolved, witness
from tests.support.memory_logs import MemoryLogs


def engine_on(logs: MemoryLogs, clock: VirtualClock | None = None, **limits: int) -> EngineClientDouble:
    """An engine with a journal that others share."""
    small, clock = resolved(session=SessionConfig(**limits)), clock or VirtualClock()
    engine = Engine(small, witness(small), clock, new_stop_finder=SimStopFinder, journal=SessionJournal(logs))
    return EngineClientDouble(engine, clock)


def turn(engine: EngineClientDouble, name: str, *tokens: int, **options: int | bool | str | None) -> list[int]:
    """Run a turn of the session; its output."""
    submit = Submit(request_id=name, session_id="s", tokens=tokens, max_new_tokens=3)
    engine.send(replace(submit, **options))  # type: ignore[arg-type]
    engine.run()
    assert isinstance(engine.end(name), Finished), engine.end(name)
    return engine.output(name)


def refused(events: list[Event]) -> tuple[int, str]:
    """The status and the message of a refusal."""
    (event,) = events
    assert isinstance(event, Refused), event
    return event.status, event.message


def test_turns_go_on_in_another_engine_as_if_there_were_one() -> None:
    logs = MemoryLogs()
    alone, first = engine_on(MemoryLogs()), engine_on(logs)
    for each in (alone, first):
        each.send(OpenSession(session_id="s", ttl_ms=5000, client=""))
    wanted = [turn(alone, f"t{number}", 1 + number, 2) for number in range(4)]
    assert [turn(first, "t0", 1, 2, note="hello"), turn(first, "t1", 2, 2)] == wanted[:2]
    second = engine_on(logs)
    assert turn(second, "t2", 3, 2, turn=2, known_len=10) == wanted[2]
    (state,) = second.send(GetSession(session_id="s"))
    assert isinstance(state, SessionState) and (state.turns, state.length, state.ttl_ms) == (3, 15, 5000)
    assert turn(first, "t3", 4, 2, turn=3) == wanted[3], "its own copy is old: it takes the session back"
    (history,) = engine_on(logs).send(GetHistory(session_id="s"))
    assert isinstance(history, SessionHistory) and history.length == 20
    assert [each.note for each in history.turns] == ["hello", "", "", ""]
    assert [each.last_token for each in history.turns] == [each[-1] for each in wanted]
    assert [each.usage.completion_tokens for each in history.turns] == [3] * 4


def test_a_turn_that_ends_after_its_session_has_moved_is_not_acknowledged() -> None:
    logs = MemoryLogs()
    first, second = engine_on(logs), engine_on(logs)
    first.send(OpenSession(session_id="s"))
    turn(first, "t0", 1)
    first.send(Submit(request_id="lost", session_id="s", tokens=(2,), max_new_tokens=5))
    first.send(Submit(request_id="waits", session_id="s", tokens=(2,), max_new_tokens=5, queue=True))
    output = turn(second, "t1", 3)
    for command in (GetSession(session_id="s"), Submit(request_id="r", session_id="s", tokens=(1,), turn=0)):
        assert refused(first.send(command))[0] == 410, "its own copy says nothing any more"
    first.run()
    for name in ("lost", "waits"):
        end = first.end(name)
        assert isinstance(end, Refused) and end.status == 410 and "another replica owns it now" in end.message
    assert first.engine.state.sessions.table == {}
    assert turn(second, "t2", 4) != output
    (state,) = second.send(GetSession(session_id="s"))
    assert isinstance(state, SessionState) and (state.turns, state.length) == (3, 12)


def test_rewinds_forks_and_closes_are_found_by_the_next_engine() -> None:
    logs = MemoryLogs()
    first = engine_on(logs)
    first.send(OpenSession(session_id="s", cache_salt="x"))
    first.send(OpenSession(session_id="short-lived", journaled=False))
    turn(first, "t0", 1)
    turn(first, "t1", 1)
    first.send(ForkSession(session_id="s", new_id="f"))
    first.send(RewindSession(session_id="s", length=3))
    second = engine_on(logs)
    states = [second.send(GetSession(session_id=name))[0] for name in ("s", "f")]
    assert [(each.length, each.turns) for each in states if isinstance(each, SessionState)] == [(3, 0), (8, 2)]
    assert refused(second.send(GetSession(session_id="short-lived")))[0] == 404
    assert refused(second.send(OpenSession(session_id="f"))) == (409, "session_id: a session 'f' is open already")
    third = engine_on(logs)
    assert refused(third.send(ForkSession(session_id="s", new_id="f")))[0] == 409
    assert third.send(CloseSession(session_id="f")) == [SessionClosed(session_id="f")]
    assert refused(second.send(Submit(request_id="r", session_id="f", tokens=(1,))))[0] == 404
    assert refused(second.send(RewindSession(session_id="f", turn=0)))[0] == 404
    third.send(CloseSession(session_id="s"))
    assert logs.logs == {}


def test_sessions_of_the_same_name_stay_their_clients_own() -> None:
    logs = MemoryLogs()
    first = engine_on(logs)
    for client, tokens in (("a", (1, 2)), ("b", (3,))):
        first.send(OpenSession(session_id="s", client=client, cache_salt=client))
        turn(first, f"of {client}", *tokens, client=client)
    second = engine_on(logs)
    for client, length in (("a", 5), ("b", 4)):
        (state,) = second.send(GetSession(session_id="s", client=client))
        assert isinstance(state, SessionState)
        assert (state.client, state.cache_salt, state.length) == (client, client, length)
    assert refused(second.send(GetSession(session_id="s")))[0] == 404
    assert refused(second.send(GetSession(session_id="s", client="c")))[0] == 404


def test_a_full_disk_ends_the_turn_that_met_it_and_nobody_else() -> None:
    logs = MemoryLogs()
    first = engine_on(logs)
    first.send(OpenSession(session_id="s"))
    turn(first, "t0", 1)
    logs.room = 30
    first.send(Submit(request_id="unlucky", session_id="s", tokens=(2,), max_new_tokens=3))
    first.send(Submit(request_id="other", tokens=(2,), max_new_tokens=3))
    first.run()
    end = first.end("unlucky")
    assert isinstance(end, Refused) and (end.status, "No space left" in end.message) == (503, True)
    assert first.finished("other").reason == "length"
    assert refused(first.send(OpenSession(session_id="n")))[0] == 503
    assert refused(first.send(RewindSession(session_id="s", turn=0)))[0] == 503
    logs.room = None
    assert turn(first, "t1", 2, known_len=4)
    (state,) = engine_on(logs).send(GetSession(session_id="s"))
    assert isinstance(state, SessionState) and (state.turns, state.length) == (2, 8)


def test_time_goes_on_while_no_engine_has_a_session() -> None:
    clock = VirtualClock()
    logs = MemoryLogs(clock.now_ns)
    first = engine_on(logs, clock)
    first.send(OpenSession(session_id="s", ttl_ms=100))
    first.wait(60)
    second = engine_on(logs, clock)
    (state,) = second.send(GetSession(session_id="s"))
    assert isinstance(state, SessionState) and state.idle_ms == 60
    second.wait(50)
    assert second.engine.state.sessions.table == {} and logs.logs == {}
    assert refused(first.send(GetSession(session_id="s")))[0] == 404


def test_a_session_that_cannot_be_read_is_an_error_until_it_is_closed() -> None:
    logs = MemoryLogs()
    engine_on(logs).send(OpenSession(session_id="s"))
    ((log,),) = (logs.values() for logs in logs.logs.values())
    log[20] ^= 1
    second = engine_on(logs)
    assert refused(second.send(Submit(request_id="r", session_id="s", tokens=(1,))))[0] == 500
    assert second.send(CloseSession(session_id="s")) == [SessionClosed(session_id="s")]
    assert second.send(OpenSession(session_id="s"))[0] != [] and logs.logs != {}


def test_no_more_sessions_are_taken_over_than_may_be_open() -> None:
    logs = MemoryLogs()
    first = engine_on(logs)
    for name in ("a", "b"):
        first.send(OpenSession(session_id=name))
    second = engine_on(logs, max_sessions=1)
    assert isinstance(second.send(GetSession(session_id="a"))[0], SessionState)
    assert refused(second.send(GetSession(session_id="b"))) == (429, "1 sessions are open: --max-sessions")
    assert refused(second.send(GetSession(session_id="c")))[0] == 404
    assert isinstance(first.send(GetSession(session_id="b"))[0], SessionState)


@pytest.mark.parametrize("known_len", [3, 5])
def test_a_sender_who_knows_an_old_session_is_told_to_look_again(known_len: int) -> None:
    engine = engine_on(MemoryLogs())
    engine.send(OpenSession(session_id="s"))
    turn(engine, "t0", 1)
    answer = engine.send(Submit(request_id="r", session_id="s", tokens=(1,), known_len=known_len))
    status, message = refused(answer)
    assert status == 409 and f"it has 4 tokens, not {known_len}; send the turn again" in message
