"""Sessions as the server knows them: how long they live, what of them is kept, how many may wait."""

import asyncio
from types import SimpleNamespace

import pytest

from roost.errors import CapacityError, RequestError
from roost.front.options import TurnOf
from roost.front.session import ClientSession
from roost.messages import Finished, Refused, SpecStats, Tokens, Usage
from roost.server import request_history
from roost.server.keys import Client
from roost.server.request_history import RequestHistory, RunningRequest
from roost.server.session_table import CHECK_AT_MIN, WAITING_MAX, ServerSession, SessionTable, TurnLock

ENDED = Finished(
    request_id="r0",
    reason="length",
    usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1),
    max_new_tokens=1,
    spec=SpecStats(),
)


class Clock:
    """A time that stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        """The time."""
        return self.now


class Connected:
    """A request whose client stays and says nothing."""

    state = SimpleNamespace(client=Client())

    async def receive(self) -> dict[str, str]:
        """Nothing, for ever."""
        await asyncio.Event().wait()
        raise AssertionError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(request_history, "time", clock)
    return clock


def test_a_session_that_does_not_stream_lives_while_it_is_used(clock: Clock) -> None:
    sessions = SessionTable()
    sessions.add(ServerSession(ClientSession("a"), history=RequestHistory(10)))
    sessions.add(ServerSession(ClientSession("b"), history=RequestHistory(None)))
    sessions.add(ServerSession(ClientSession("c")))
    history = sessions.find("a").history
    assert history is not None
    clock.now += 9
    request = RunningRequest(history, "r0", (1,))
    request.on_sent()
    clock.now += 60
    request.on_event(Tokens(request_id="r0", tokens=(2,)))
    assert sessions.expired() == [] and history.idle_s == 0, "no request is too long for it"
    request.on_event(ENDED)
    clock.now += 9
    assert sessions.expired() == [] and history.idle_s == 9
    assert history.find("r0") == (1, 2)
    clock.now += 11
    first = sessions.find("a")
    assert sessions.expired() == [first], "the others have all the time"
    sessions.add(ServerSession(ClientSession("a")))
    sessions.forget(first)
    assert sessions.expired() == [] and sessions.find("a") is not first, "another has its name now"


def test_looking_for_sessions_that_are_gone_costs_each_opening_the_same() -> None:
    sessions, num_looks = SessionTable(), 0
    for number in range(5000):
        if sessions.needs_check:
            num_looks += 1
            before = sessions.snapshot()
            sessions.forget_missing(before, {each.key for each in before})
        sessions.add(ServerSession(ClientSession(str(number))))
    assert 0 < num_looks < 10
    sessions.forget_missing(sessions.snapshot(), {("", "0")})
    assert [each.id for each in sessions.snapshot()] == ["0"]


@pytest.mark.parametrize("num_open", [CHECK_AT_MIN - 1, CHECK_AT_MIN, CHECK_AT_MIN + 1])
def test_sessions_that_are_gone_are_looked_for_once_there_are_many(num_open: int) -> None:
    sessions = SessionTable()
    for number in range(num_open):
        sessions.add(ServerSession(ClientSession(str(number))))
    assert sessions.needs_check == (num_open >= CHECK_AT_MIN)
    sessions.forget_missing(sessions.snapshot(), {("", "0"), ("", "1")})
    assert not sessions.needs_check and len(sessions.snapshot()) == 2


@pytest.mark.parametrize("num_waiting", [WAITING_MAX - 1, WAITING_MAX])
def test_no_more_turns_wait_for_a_session_than_may(num_waiting: int) -> None:
    sessions = SessionTable()
    sessions.add(ServerSession(ClientSession("a")))
    sessions.find("a").num_waiting = num_waiting

    async def one_more() -> None:
        async with sessions.lock_for_turn(Connected(), TurnOf(session_id="a"), None, timeout_s=None):  # type: ignore[arg-type]
            pass

    if num_waiting < WAITING_MAX:
        asyncio.run(one_more())
    else:
        with pytest.raises(CapacityError, match=f"{WAITING_MAX} turns wait"):
            asyncio.run(one_more())
    assert sessions.find("a").num_waiting == num_waiting


@pytest.mark.parametrize("num_more", [0, 1])
def test_no_more_turns_of_a_client_wait_for_its_sessions_than_may(num_more: int) -> None:
    sessions = SessionTable()
    for name, client, num_waiting in (("a", "", 1), ("b", "", 1 + num_more), ("c", "another", 50)):
        sessions.add(ServerSession(ClientSession(name), client=client))
        sessions.find(name, client).num_waiting = num_waiting
    busy = sessions.find("a")
    busy.holder = TurnLock(busy, None, Staying())  # type: ignore[arg-type]
    busy.is_free.clear()

    async def one_more() -> None:
        of = TurnOf(session_id="a", queue=True)
        async with sessions.lock_for_turn(Staying(), of, None, timeout_s=0.001, waiting_max=3):  # type: ignore[arg-type]
            pass

    with pytest.raises(CapacityError if num_more else RequestError) as refused:
        asyncio.run(one_more())
    assert ("of this key wait: it may have 3" in str(refused.value)) == bool(num_more)


class Staying(Connected):
    """A request whose client is asked whether it is still there."""

    async def is_disconnected(self) -> bool:
        """It is there."""
        return False


@pytest.mark.parametrize(("status", "param"), [(413, "tokens"), (404, "session_id"), (499, ""), (500, ""), (503, "")])
def test_a_turn_whose_outcome_is_unknown_has_its_session_asked_for_again(status: int, param: str) -> None:
    sessions = SessionTable(learns=True)
    sessions.add(ServerSession(ClientSession("a")))
    before = sessions.find("a")

    async def refused() -> None:
        async with sessions.lock_for_turn(Connected(), TurnOf(session_id="a"), None, timeout_s=None) as lock:  # type: ignore[arg-type]
            lock.on_sent()
            lock.on_event(Refused(request_id="r0", status=status, message="", param=param))

    asyncio.run(refused())
    is_known = sessions.get("a") is before
    assert is_known == (status < 500 and param != "session_id")
    if not is_known:
        with pytest.raises(CapacityError, match="has changed while it was waited for"):
            before.check_open()


def test_when_the_engine_has_ended_no_session_is_known_any_more() -> None:
    sessions = SessionTable()
    sessions.add(ServerSession(ClientSession("a")))
    before = sessions.find("a")
    sessions.forget_all()
    with pytest.raises(RequestError, match="there is no session 'a'"):
        sessions.find("a")
    with pytest.raises(CapacityError):
        before.check_open()
