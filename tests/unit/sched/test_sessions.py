"""Sessions between turns: looked at, rewound, forked, limited, and gone when their time is up."""

import pytest

from roost.clock import VirtualClock
from roost.config.options import SessionConfig
from roost.messages import (
    Abort,
    CloseSession,
    Command,
    Event,
    Finished,
    FlushCache,
    ForkSession,
    GetSession,
    GetSessions,
    GetStats,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    SessionState,
    SessionStates,
    Stats,
    Submit,
    Usage,
)
from roost.step import StepResult, Ticket
from tests.support.engine_client import EngineClientDouble, Recorder, engine_client, resolved

MS = 1_000_000


class Slow(Recorder):
    """A device on which every step takes a second."""

    clock: VirtualClock

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step, then collect it."""
        self.clock.advance(1000 * MS)
        return super().collect(ticket)


def _turn(name: str, tokens: tuple[int, ...] = (1, 2, 3), **more: object) -> Submit:
    base = {"session_id": "s", "max_new_tokens": 4, **more}
    return Submit(request_id=name, tokens=tokens, **base)  # type: ignore[arg-type]


def _state(at: EngineClientDouble, session_id: str = "s") -> SessionState:
    (state,) = at.send(GetSession(session_id=session_id))
    assert isinstance(state, SessionState), state
    return state


def _refused(at: EngineClientDouble, command: Command) -> Refused:
    (refused,) = at.send(command)
    assert isinstance(refused, Refused), refused
    return refused


def _talk(at: EngineClientDouble, *names: str, **more: object) -> list[Finished]:
    """Whole turns, one after the other."""
    ends = []
    for name in names:
        at.send(_turn(name, **more))
        at.run()
        ends.append(at.finished(name))
    return ends


def _opened(limits: SessionConfig | None = None, **more: object) -> EngineClientDouble:
    at = engine_client(session=limits or SessionConfig())
    (state,) = at.send(OpenSession(session_id="s", **more))  # type: ignore[arg-type]
    assert isinstance(state, SessionState), state
    return at


# --- how they stand ---------------------------------------------------------------------------------------------------


def test_a_new_session_is_answered_with_how_it_stands() -> None:
    (state,) = engine_client().send(OpenSession(session_id="s", cache_salt="x", ttl_ms=70, max_tokens=9))
    assert state == SessionState(
        session_id="s",
        length=0,
        resident=0,
        turns=0,
        state="idle",
        idle_ms=0,
        ttl_ms=70,
        max_tokens=9,
        cache_salt="x",
    )


def test_a_session_says_what_its_turn_does_and_what_it_holds() -> None:
    at = engine_client(max_running=1)
    at.send(OpenSession(session_id="s"))
    at.send(Submit(request_id="other", tokens=(9,), max_new_tokens=8))
    at.send(_turn("a"))
    waiting = _state(at)
    assert (waiting.state, waiting.length, waiting.resident, waiting.idle_ms) == ("waiting", 0, 0, 0)
    while at.engine.state.turns and at.engine.state.requests["a"].row is None:
        at.tick()
    at.tick(2)
    running = _state(at)
    assert running.state == "running" and running.length > 3 and running.resident >= 3 and running.turns == 0
    at.run()
    at.wait(12)
    done = _state(at)
    assert (done.state, done.length, done.turns, done.idle_ms) == ("idle", 7, 1, 12)
    assert done.resident == 7
    at.send(FlushCache())
    assert (_state(at).length, _state(at).resident) == (7, 0)


def test_a_session_that_closes_under_its_turn_says_so() -> None:
    at = _opened()
    at.send(_turn("a", max_new_tokens=20))
    at.tick(2)
    answers: list[Event] = []
    for command in (CloseSession(session_id="s"), GetSession(session_id="s"), RewindSession(session_id="s", turn=0)):
        at.engine.post(command, answers.append)
    at.tick()
    state, refused, closed = answers
    assert isinstance(state, SessionState) and state.state == "closing"
    assert isinstance(refused, Refused) and refused.status == 410
    assert closed == SessionClosed(session_id="s")
    assert _refused(at, GetSession(session_id="s")).status == 404


def test_all_sessions_are_listed_as_they_were_opened() -> None:
    at = _opened()
    at.send(OpenSession(session_id="b"))
    at.send(OpenSession(session_id="a"))
    (states,) = at.send(GetSessions())
    assert isinstance(states, SessionStates)
    assert [state.session_id for state in states.sessions] == ["s", "b", "a"]


def test_the_sums_tell_how_sessions_came_and_went() -> None:
    at = _opened()
    _talk(at, "a")
    at.send(ForkSession(session_id="s", new_id="t"))
    at.send(OpenSession(session_id="u", ttl_ms=5))
    at.send(CloseSession(session_id="t"))
    at.wait(5)
    at.send(_turn("b"))
    (running,) = at.send(GetStats())
    at.run()
    (stats,) = at.send(GetStats())
    assert isinstance(stats, Stats) and isinstance(running, Stats)
    assert (stats.sessions, stats.sessions_opened, stats.sessions_closed, stats.sessions_expired) == (1, 3, 1, 1)
    assert (running.sessions_resident, running.session_tokens) == (1, 0)
    assert (stats.sessions_resident, stats.session_tokens, stats.sessions_reclaimed) == (1, 14, 0)
    at.send(FlushCache())
    (stats,) = at.send(GetStats())
    assert isinstance(stats, Stats)
    assert (stats.sessions_resident, stats.session_tokens, stats.sessions_reclaimed) == (0, 0, 1)


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_session_goes_when_its_time_is_up_and_nothing_sees_it_after() -> None:
    at = _opened(ttl_ms=10)
    at.clock.advance(9 * MS)
    assert _state(at).idle_ms == 9
    at.clock.advance(1 * MS)
    assert _refused(at, _turn("a")).status == 404
    assert _refused(at, GetSession(session_id="s")).status == 404
    assert isinstance(at.send(OpenSession(session_id="s"))[0], SessionState)


def test_a_command_that_wakes_the_engine_finds_no_session_past_its_time() -> None:
    at = _opened(ttl_ms=10)
    at.clock.advance(10 * MS)
    answers: list[Event] = []
    at.engine._receive((GetSession(session_id="s"), answers.append))  # what `run` does before it ticks
    (refused,) = answers
    assert isinstance(refused, Refused) and refused.status == 404


def test_the_time_of_a_session_counts_from_its_last_turns_end() -> None:
    at = _opened(ttl_ms=10)
    at.clock.advance(8 * MS)
    at.send(_turn("a", max_new_tokens=9))
    at.clock.advance(50 * MS)
    at.tick()
    assert _state(at).state == "running"
    at.run()
    at.clock.advance(9 * MS)
    assert _state(at).idle_ms == 9
    at.send(_turn("b", max_new_tokens=9))
    at.send(Abort(request_id="b"))
    at.clock.advance(9 * MS)
    assert _state(at).state == "idle"
    at.clock.advance(1 * MS)
    assert _refused(at, GetSession(session_id="s")).status == 404


@pytest.mark.parametrize(("broken", "reason"), [((), "length"), ((0, 1, 2, 3), "error")])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_last_turns_end_is_after_its_last_step_however_long_that_took(
    broken: tuple[int, ...], reason: str, overlap: bool
) -> None:
    device = Slow(resolved(overlap=overlap), frozenset(broken))
    at = engine_client(device, overlap=overlap)
    device.clock = at.clock
    at.send(OpenSession(session_id="s", ttl_ms=10))
    at.send(_turn("a", max_new_tokens=1))
    while at.engine.state.requests:
        at.tick()
    assert at.finished("a").reason == reason
    at.clock.advance(9 * MS)
    assert _state(at).idle_ms == 9


def test_a_queued_turn_keeps_its_session() -> None:
    at = engine_client(max_running=1)
    at.send(OpenSession(session_id="s", ttl_ms=10))
    at.send(Submit(request_id="other", tokens=(9,), max_new_tokens=20))
    at.send(_turn("a"))
    at.clock.advance(100 * MS)
    assert _state(at).state == "waiting"
    at.run()
    assert at.finished("a").reason == "length"


def test_what_a_session_held_is_free_when_its_time_is_up() -> None:
    at = _opened(ttl_ms=10)
    _talk(at, "a")
    assert at.engine.state.store.leases
    at.wait(10)
    assert not at.engine.state.store.leases and not at.engine.state.sessions.table


def test_sessions_without_a_ttl_get_the_servers() -> None:
    at = _opened(SessionConfig(session_ttl_s=1))
    assert _state(at).ttl_ms == 1000
    at.send(OpenSession(session_id="own", ttl_ms=5000))
    at.wait(1000)
    assert list(at.engine.state.sessions.table) == ["own"]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_one_session_too_many_is_refused_by_the_name_of_its_limit() -> None:
    at = _opened(SessionConfig(max_sessions=2))
    at.send(OpenSession(session_id="t"))
    for command in (OpenSession(session_id="u"), ForkSession(session_id="s", new_id="u")):
        refused = _refused(at, command)
        assert refused.status == 429 and "--max-sessions" in refused.message
    at.send(CloseSession(session_id="t"))
    assert isinstance(at.send(ForkSession(session_id="s", new_id="u"))[0], SessionState)


@pytest.mark.parametrize(
    ("limits", "own", "name"),
    [(SessionConfig(max_session_tokens=12), None, "--max-session-tokens 12"), (None, 12, "max_tokens 12")],
)
def test_a_turn_over_its_sessions_limit_is_refused_and_the_session_lives_on(
    limits: SessionConfig | None, own: int | None, name: str
) -> None:
    at = _opened(limits, max_tokens=own)
    refused = _refused(at, _turn("a", max_new_tokens=10))
    assert refused.status == 413 and name in refused.message and "maximum allowed length" in refused.message
    (first,) = _talk(at, "b", max_new_tokens=4)
    assert first.usage.prompt_tokens == 3
    (rest,) = _talk(at, "c", tokens=(7,), max_new_tokens=None)
    assert (rest.max_new_tokens, rest.usage.completion_tokens) == (4, 4)
    assert _refused(at, _turn("d", tokens=(7,), max_new_tokens=0)).status == 413
    assert _refused(at, _turn("e", tokens=(), max_new_tokens=None)).status == 413
    assert (_state(at).length, _state(at).turns) == (12, 2)
    at.send(RewindSession(session_id="s", turn=1))
    (again,) = _talk(at, "f", tokens=(7,), max_new_tokens=4)
    assert again.usage.completion_tokens == 4


def test_a_session_cannot_ask_for_more_than_the_server_allows() -> None:
    at = _opened(SessionConfig(max_session_tokens=12))
    refused = _refused(at, OpenSession(session_id="t", max_tokens=13))
    assert (refused.status, refused.param) == (400, "max_tokens") and "[1, 12]" in refused.message


def test_idle_sessions_keep_no_more_than_they_may_and_the_last_used_keep_it() -> None:
    at = engine_client(session=SessionConfig(max_resident_tokens=15))
    for name in ("s", "t", "u"):
        at.send(OpenSession(session_id=name))
        at.send(_turn(name + "1", session_id=name))
        at.run()
    assert [_state(at, name).resident for name in ("s", "t", "u")] == [0, 7, 7]
    at.send(_turn("t2", tokens=(5,), session_id="t", max_new_tokens=2))
    at.run()
    assert [_state(at, name).resident for name in ("s", "t", "u")] == [0, 10, 0]
    at.send(_turn("s2", tokens=(5,)))
    at.run()
    assert at.finished("s2").usage == Usage(prompt_tokens=8, cached_tokens=4, completion_tokens=4)


def test_a_turn_that_ends_in_the_queue_uses_its_session() -> None:
    at = engine_client(session=SessionConfig(max_resident_tokens=15), max_running=1)
    for name in ("s", "t"):
        at.send(OpenSession(session_id=name))
        at.send(_turn(name + "1", session_id=name))
        at.run()
    at.send(Submit(request_id="other", tokens=(9,), max_new_tokens=20))
    at.clock.advance(MS)
    at.send(_turn("s2"))
    at.send(Abort(request_id="s2"))
    at.send(Abort(request_id="other"))
    at.send(OpenSession(session_id="u"))
    at.send(_turn("u1", session_id="u"))
    at.run()
    assert [_state(at, name).resident for name in ("s", "t", "u")] == [7, 0, 7]


# --- numbers ----------------------------------------------------------------------------------------------------------


def test_a_turn_that_was_committed_is_not_run_again() -> None:
    at = _opened()
    first, second = _talk(at, "a", "b")
    for number, end in ((0, first), (1, second)):
        refused = _refused(at, _turn("again", turn=number))
        assert (refused.status, refused.param, refused.usage) == (409, "turn", end.usage)
    assert _state(at).turns == 2
    late = _refused(at, _turn("late", turn=3))
    assert (late.status, late.param, late.usage) == (409, "turn", None) and "is 2" in late.message
    (third,) = _talk(at, "c", turn=2)
    assert third.usage.prompt_tokens == 17


def test_a_turn_sent_twice_at_once_runs_once() -> None:
    at = _opened()
    at.send(_turn("a", turn=0))
    at.send(_turn("again", turn=0, queue=True))
    at.send(_turn("next", turn=1, queue=True))
    at.run()
    refused = at.end("again")
    assert isinstance(refused, Refused) and (refused.status, refused.usage) == (409, at.finished("a").usage)
    assert at.finished("next").usage.prompt_tokens == 10


def test_the_number_of_an_aborted_turn_is_the_next_ones() -> None:
    at = _opened()
    at.send(_turn("a", turn=0, max_new_tokens=20))
    at.send(Abort(request_id="a"))
    (again,) = _talk(at, "again", turn=0)
    assert again.usage.prompt_tokens == 3


def test_an_append_is_prefilled_committed_and_inherited() -> None:
    at = _opened()
    (appended,) = _talk(at, "a", tokens=tuple(range(10)), max_new_tokens=0)
    assert (appended.reason, appended.usage.completion_tokens) == ("length", 0)
    assert (_state(at).length, _state(at).resident, _state(at).turns) == (10, 10, 1)
    (turn,) = _talk(at, "b", tokens=(7,))
    assert turn.usage.cached_tokens == 10


def test_a_turn_says_from_where_its_prompt_was_really_scored() -> None:
    at = _opened()
    (first,) = _talk(at, "a", prompt_logprobs_from=1)
    (second,) = _talk(at, "b", prompt_logprobs_from=2)
    (inside,) = _talk(at, "c", prompt_logprobs_from=15)
    (plain,) = _talk(at, "d")
    assert [each.prompt_logprobs_from for each in (first, second, inside, plain)] == [1, 7, 15, None]


def test_a_turn_that_ran_its_history_again_for_logprobs_loses_nothing_when_it_is_aborted() -> None:
    at = _opened()
    _talk(at, "a", tokens=tuple(range(40)))
    at.engine.state.sessions.reclaim(at.engine.state.sessions.table["s"])
    at.send(_turn("gone", tokens=(5,), prompt_logprobs_from=0))
    at.tick()
    at.send(Abort(request_id="gone"))
    at.run()
    assert at.finished("gone").usage.cached_tokens == 0
    (after,) = _talk(at, "b", tokens=(6,))
    assert after.usage == Usage(prompt_tokens=45, cached_tokens=44, completion_tokens=4)


# --- rewind and fork --------------------------------------------------------------------------------------------------


def _fresh(*tokens: int) -> list[int]:
    """What a session of its own says after a history."""
    at = _opened()
    _talk(at, "fresh", tokens=tokens)
    return at.output("fresh")


def _record(at: EngineClientDouble, session_id: str = "s") -> tuple[int, ...]:
    record = at.engine.state.sessions.table[session_id].record
    return tuple(record.slice(0, len(record)).tolist())


@pytest.mark.parametrize(("turn", "length"), [(0, 0), (1, 7), (2, 14), (3, 21)])
def test_a_rewind_by_turns_keeps_exactly_those(turn: int, length: int) -> None:
    at = _opened()
    _talk(at, "a", "b", "c")
    whole = _record(at)
    (state,) = at.send(RewindSession(session_id="s", turn=turn))
    assert isinstance(state, SessionState)
    assert (state.turns, state.length, state.resident) == (turn, length, length)
    assert _record(at) == whole[:length]
    (after,) = _talk(at, "d", tokens=(9, 9), turn=turn)
    assert after.usage == Usage(prompt_tokens=length + 2, cached_tokens=length, completion_tokens=4)
    assert at.output("d") == _fresh(*whole[:length], 9, 9)


@pytest.mark.parametrize("length", range(15))
def test_a_rewind_by_length_cuts_anywhere(length: int) -> None:
    at = _opened()
    _talk(at, "a", "b")
    whole = _record(at)
    (state,) = at.send(RewindSession(session_id="s", length=length))
    assert isinstance(state, SessionState)
    assert (state.turns, state.length) == ((length >= 7) + (length >= 14), length)
    _talk(at, "c", tokens=(9, 9))
    assert at.output("c") == _fresh(*whole[:length], 9, 9)
    assert _state(at).turns == state.turns + 1


def test_a_rewind_names_what_it_cannot_do() -> None:
    at = _opened()
    _talk(at, "a")
    bad = [{"turn": 2}, {"turn": -1}, {"length": 8}, {"length": -1}, {}, {"turn": 1, "length": 7}]
    told = [_refused(at, RewindSession(session_id="s", **each)) for each in bad]
    assert [each.status for each in told] == [400] * 6
    assert [each.param for each in told] == ["turn", "turn", "length", "length", "turn", "turn"]
    assert "[0, 1]" in told[0].message and "[0, 7]" in told[2].message
    assert (_state(at).length, _state(at).turns) == (7, 1)


def test_a_rewound_turn_may_have_its_number_again() -> None:
    at = _opened()
    _talk(at, "a", "b", turn=None)
    at.send(RewindSession(session_id="s", turn=1))
    (again,) = _talk(at, "c", turn=1)
    assert _refused(at, _turn("d", turn=1)).usage == again.usage


def test_a_fork_goes_its_own_way_from_the_same_tokens() -> None:
    at = _opened(ttl_ms=10**6, max_tokens=40, cache_salt="x")
    _talk(at, "a", "b")
    whole = _record(at)
    at.clock.advance(3 * MS)
    (fork,) = at.send(ForkSession(session_id="s", new_id="t"))
    assert fork == SessionState(
        session_id="t",
        length=14,
        resident=0,
        turns=2,
        state="idle",
        idle_ms=0,
        ttl_ms=10**6,
        max_tokens=40,
        cache_salt="x",
    )
    assert _state(at).idle_ms == 3
    at.send(_turn("c", tokens=(9, 9), session_id="t"))
    at.run()
    _talk(at, "d", tokens=(8,))
    assert at.output("c") == _fresh(*whole, 9, 9) and at.output("d") == _fresh(*whole, 8)
    assert at.finished("c").usage.cached_tokens == 12  # whole pages; the partial one is computed again
    assert at.finished("d").usage.cached_tokens == 14
    assert (_record(at)[:15], _record(at, "t")[:16]) == ((*whole, 8), (*whole, 9, 9))
    assert [_state(at, name).turns for name in ("s", "t")] == [3, 3]
    at.send(RewindSession(session_id="t", turn=0))
    assert [_state(at, name).turns for name in ("s", "t")] == [3, 0]
    at.send(CloseSession(session_id="s"))
    assert _refused(at, ForkSession(session_id="t", new_id="t")).param == "new_id"


def test_a_turn_that_never_ran_is_a_use_of_its_session_all_the_same() -> None:
    at = engine_client(max_running=1)
    for name in ("a", "b"):
        at.send(OpenSession(session_id=name))
        at.send(Submit(request_id=f"first {name}", tokens=(1, 2, 3), max_new_tokens=2, session_id=name))
        at.run()
        at.wait(5)
    assert [session.id for session in at.engine.state.sessions.idle()] == ["a", "b"]
    at.send(Submit(request_id="long", tokens=(4, 5), max_new_tokens=30))
    at.send(Submit(request_id="waits", tokens=(6,), max_new_tokens=2, session_id="a"))
    at.wait(5)
    at.send(Abort(request_id="waits"))
    assert [session.id for session in at.engine.state.sessions.idle()] == ["b", "a"], "the next to be reclaimed first"
    at.run()
