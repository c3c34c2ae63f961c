"""Sessions as the server knows them: how long they live, what of them is kept, how many may wait."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace

import pytest

from roost.errors import CapacityError, RequestError
from roost.front.answer import RepeatedTurn
from roost.front.options import TurnOf
from roost.messages import Finished, Refused, SessionState, SpecStats, Tokens, Usage
from roost.server import turns
from roost.server.keys import Client
from roost.server.turns import (
    BRANCHES_MAX,
    CHECK_AT_MIN,
    WAITING_MAX,
    Branch,
    Branches,
    Conversation,
    Conversations,
    Turn,
)

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
    monkeypatch.setattr(turns, "time", clock)
    return clock


def test_a_session_that_does_not_stream_lives_while_it_is_used(clock: Clock) -> None:
    conversations = Conversations()
    conversations.open(Conversation("a", branches=Branches(10)))
    conversations.open(Conversation("b", branches=Branches(None)))
    conversations.open(Conversation("c"))
    branches = conversations.find("a").branches
    assert branches is not None
    clock.now += 9
    request = Branch(branches, "r0", (1,))
    request.began()
    clock.now += 60
    request.saw(Tokens(request_id="r0", tokens=(2,)))
    assert conversations.overdue() == [] and branches.idle_s == 0, "no request is too long for it"
    request.saw(ENDED)
    clock.now += 9
    assert conversations.overdue() == [] and branches.idle_s == 9
    assert branches.find("r0") == (1, 2)
    clock.now += 11
    first = conversations.find("a")
    assert conversations.overdue() == [first], "the others have all the time"
    conversations.open(Conversation("a"))
    conversations.forget(first)
    assert conversations.overdue() == [] and conversations.find("a") is not first, "another has its name now"


def test_looking_for_sessions_that_are_gone_costs_each_opening_the_same() -> None:
    conversations, num_looks = Conversations(), 0
    for number in range(5000):
        if conversations.are_many:
            num_looks += 1
            before = conversations.snapshot()
            conversations.forget_missing(before, {each.key for each in before})
        conversations.open(Conversation(str(number)))
    assert 0 < num_looks < 10
    conversations.forget_missing(conversations.snapshot(), {("", "0")})
    assert [each.id for each in conversations.snapshot()] == ["0"]


def told(
    branches: Branches, name: str, new: tuple[int, ...], after: str | None = None, *, replaces: bool = False
) -> Branch:
    """A request that goes on from another, begun."""
    parent = None if after is None else branches.number_of(after, may_run=replaces)
    before = () if after is None else branches.find(after, may_run=replaces)
    branch = Branch(branches, name, (*before, *new), parent=parent, replaces=replaces)
    branch.began()
    return branch


def ended(branch: Branch, *output: int) -> None:
    """It says something and ends."""
    branch.saw(Tokens(request_id="r0", tokens=output))
    branch.saw(ENDED)


def names(branches: Branches) -> set[str]:
    """The requests that can be gone on from, of those that the tests make."""
    found = set()
    for name in ("a", "b", "c", "d", "e"):
        with suppress(RequestError):
            branches.find(name)
            found.add(name)
    return found


def test_a_request_that_replaces_forgets_all_that_went_on_from_where_it_goes_on() -> None:
    branches = Branches(None)
    ended(told(branches, "a", (1,)), 2)
    ended(told(branches, "b", (3,), after="a"), 4)
    ended(told(branches, "c", (5,), after="b"), 6)
    ended(told(branches, "d", (7,)), 8)
    running = told(branches, "e", (9,), after="c")
    assert branches.find("c") == (1, 2, 3, 4, 5, 6) and branches.find("c", with_output=False) == (1, 2, 3, 4, 5)
    refused = told(branches, "x", (0,), after="a", replaces=True)
    assert running.is_stopped, "what runs there is in the way, and ends at once"
    refused.saw(Refused(request_id="x", status=400, message="no"))
    assert names(branches) == {"a", "b", "c", "d"}, "one that is refused forgets nothing"
    ended(running, 1)
    assert names(branches) == {"a", "b", "c", "d"}, "nobody can go on from what was replaced"
    ended(told(branches, "e", (9,), after="a", replaces=True), 5)
    assert names(branches) == {"a", "d", "e"}
    assert branches.find("e") == (1, 2, 9, 5)
    ended(told(branches, "b", (1,), replaces=True), 2)
    assert names(branches) == {"b"}, "without a request to go on from, everything is replaced"


def test_a_request_that_runs_can_be_replaced_and_keeps_what_it_has_said() -> None:
    branches = Branches(None)
    running = told(branches, "a", (1,))
    running.saw(Tokens(request_id="r0", tokens=(2, 3)))
    with pytest.raises(RequestError, match="no request 'a' has ended"):
        branches.find("a")
    new = told(branches, "b", (4,), after="a", replaces=True)
    assert running.is_stopped and branches.find("a") == (1, 2, 3)
    ended(running, 9)
    assert branches.find("a") == (1, 2, 3), "what comes later is not heard"
    ended(new, 5)
    assert branches.find("b") == (1, 2, 3, 4, 5)
    assert branches.idle_s < 60


def test_a_name_may_be_used_again_even_by_what_goes_on_from_it() -> None:
    branches = Branches(None)
    ended(told(branches, "a", (1,)), 2)
    ended(told(branches, "a", (3,), after="a"), 4)
    ended(told(branches, "b", (5,), after="a"), 6)
    assert branches.find("b") == (1, 2, 3, 4, 5, 6)
    ended(told(branches, "c", (7,), after="b", replaces=True), 8)
    assert names(branches) == {"a", "b", "c"}
    ended(told(branches, "d", (7,), after="a", replaces=True), 8)
    assert names(branches) == {"a", "d"}


def _usage(number: int) -> Usage:
    return Usage(prompt_tokens=number, cached_tokens=0, completion_tokens=number)


def _state(turns: int) -> SessionState:
    return SessionState(
        session_id="a",
        length=0,
        resident=0,
        turns=turns,
        state="idle",
        idle_ms=0,
        ttl_ms=None,
        max_tokens=None,
        cache_salt="",
    )


@pytest.mark.parametrize("num_kept", [0, 1, 2, 3])
def test_a_rewound_turn_may_be_sent_again_and_what_it_then_costs_is_told(num_kept: int) -> None:
    conversation = Conversation("a", usages=[_usage(number) for number in range(3)])
    conversation.rewound(_state(num_kept))
    for number in range(num_kept):
        with pytest.raises(RepeatedTurn) as repeated:
            conversation.check_number(number)
        assert repeated.value.usage == _usage(number)
    for number in (num_kept, num_kept + 1):
        conversation.check_number(number)
    conversation.usages.append(_usage(10))
    with pytest.raises(RepeatedTurn) as again:
        conversation.check_number(num_kept)
    assert again.value.usage == _usage(10)


@pytest.mark.parametrize("num_ended", [BRANCHES_MAX - 1, BRANCHES_MAX, BRANCHES_MAX + 1, 2 * BRANCHES_MAX])
def test_the_last_requests_to_end_can_be_gone_on_from_and_the_oldest_are_forgotten(num_ended: int) -> None:
    branches = Branches(None)
    for number in range(num_ended):
        branches.keep(f"r{number}", (number, 1))
    first = max(0, num_ended - BRANCHES_MAX)
    for number in range(num_ended):
        if number >= first:
            assert branches.find(f"r{number}") == (number, 1)
        else:
            with pytest.raises(RequestError, match="no request 'r"):
                branches.find(f"r{number}")


def test_a_request_that_ends_again_under_its_name_is_the_newest() -> None:
    branches = Branches(None)
    for number in range(BRANCHES_MAX):
        branches.keep(f"r{number}", (number,))
    branches.keep("r0", (7,))
    branches.keep("another", (8,))
    assert branches.find("r0") == (7,)
    with pytest.raises(RequestError, match="no request 'r1'"):
        branches.find("r1")


@pytest.mark.parametrize("num_open", [CHECK_AT_MIN - 1, CHECK_AT_MIN, CHECK_AT_MIN + 1])
def test_sessions_that_are_gone_are_looked_for_once_there_are_many(num_open: int) -> None:
    conversations = Conversations()
    for number in range(num_open):
        conversations.open(Conversation(str(number)))
    assert conversations.are_many == (num_open >= CHECK_AT_MIN)
    conversations.forget_missing(conversations.snapshot(), {("", "0"), ("", "1")})
    assert not conversations.are_many and len(conversations.snapshot()) == 2


@pytest.mark.parametrize("num_waiting", [WAITING_MAX - 1, WAITING_MAX])
def test_no_more_turns_wait_for_a_session_than_may(num_waiting: int) -> None:
    conversations = Conversations()
    conversations.open(Conversation("a"))
    conversations.find("a").num_waiting = num_waiting

    async def one_more() -> None:
        async with conversations.turn(Connected(), TurnOf(session_id="a"), None, timeout_s=None):  # type: ignore[arg-type]
            pass

    if num_waiting < WAITING_MAX:
        asyncio.run(one_more())
    else:
        with pytest.raises(CapacityError, match=f"{WAITING_MAX} turns wait"):
            asyncio.run(one_more())
    assert conversations.find("a").num_waiting == num_waiting


def test_a_fork_keeps_what_its_turns_cost_when_its_source_is_rewound() -> None:
    source = Conversation("a", usages=[_usage(0), _usage(1)])
    fork = Conversation("b", usages=source.usages)
    source.rewound(_state(0))
    assert source.usages == []
    assert fork.usages == [_usage(0), _usage(1)]


@pytest.mark.parametrize("num_more", [0, 1])
def test_no_more_turns_of_a_client_wait_for_its_sessions_than_may(num_more: int) -> None:
    conversations = Conversations()
    for name, client, num_waiting in (("a", "", 1), ("b", "", 1 + num_more), ("c", "another", 50)):
        conversations.open(Conversation(name, client=client))
        conversations.find(name, client).num_waiting = num_waiting
    busy = conversations.find("a")
    busy.holder = Turn(busy, None, Staying())  # type: ignore[arg-type]
    busy.is_free.clear()

    async def one_more() -> None:
        of = TurnOf(session_id="a", queue=True)
        async with conversations.turn(Staying(), of, None, timeout_s=0.001, waiting_max=3):  # type: ignore[arg-type]
            pass

    with pytest.raises(CapacityError if num_more else RequestError) as refused:
        asyncio.run(one_more())
    assert ("of this key wait: it may have 3" in str(refused.value)) == bool(num_more)


class Staying(Connected):
    """A request whose client is asked whether it is still there."""

    async def is_disconnected(self) -> bool:
        """It is there."""
        return False
