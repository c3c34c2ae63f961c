"""Commands that nobody thought of: values of any type, and code that breaks half-way, cost nobody else anything."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.errors import InvariantError
from roost.messages import (
    Abort,
    CloseSession,
    Command,
    Finished,
    ForkSession,
    GetSession,
    OpenSession,
    Refused,
    RewindSession,
    SessionState,
    Submit,
)
from roost.sampling.params import SamplingParams
from roost.sched.consistency import check_consistent
from roost.session.record import Record
from tests.support.engine_client import EngineClientDouble, engine_client

NEIGHBOUR = Submit(request_id="neighbour", tokens=(1, 2, 3), max_new_tokens=12)
GOOD: tuple[Command, ...] = (
    Submit(request_id="a", tokens=(4, 5), max_new_tokens=3, session_id="s", queue=True),
    Submit(request_id="a", tokens=(4, 5), max_new_tokens=3, shares_with="neighbour"),
    Abort(request_id="a"),
    OpenSession(session_id="t"),
    CloseSession(session_id="s"),
    RewindSession(session_id="s", turn=0),
    RewindSession(session_id="s", length=2),
    ForkSession(session_id="s", new_id="t"),
    GetSession(session_id="s"),
)


class Odd:
    """Something that no command expects, and that cannot even be written out."""

    def __repr__(self) -> str:
        raise RuntimeError("never ask")


PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.sampled_from([2**31, -(2**63), 2**64, 10**5000])
    | st.floats()
    | st.text(max_size=3)
    | st.binary(max_size=3)
    | st.sampled_from([Odd(), Odd, np.int64(5), np.float32(0.5), np.bool_(True), np.arange(3), np.array(7), object()])
)
ANYTHING = (
    PLAIN
    | st.lists(PLAIN, max_size=3)
    | st.lists(PLAIN, max_size=3).map(tuple)
    | st.dictionaries(st.integers(0, 9), st.floats(0, 1), max_size=2)
    | st.frozensets(st.integers(-1, 60) | st.text(max_size=2) | st.booleans(), max_size=3)
    | st.lists(st.tuples(PLAIN, PLAIN), max_size=2).map(tuple)
)
CHANGES = [(command, each.name) for command in GOOD for each in fields(command)] + [
    (GOOD[0], f"sampling.{each.name}") for each in fields(SamplingParams)
]


def changed(command: Command, name: str, value: object) -> Command:
    """A command with one value replaced."""
    outer, _, inner = name.partition(".")
    if inner:
        value = replace(command.sampling, **{inner: value})  # type: ignore[union-attr]
    return replace(command, **{outer: value})


def busy() -> EngineClientDouble:
    """A session with a turn behind it, and a neighbour that runs."""
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(Submit(request_id="first", tokens=(6, 7), max_new_tokens=2, session_id="s"))
    at.run()
    at.send(NEIGHBOUR)
    return at


def undisturbed() -> list[int]:
    at = busy()
    at.run()
    return at.output("neighbour")


ALONE = undisturbed()


@settings(max_examples=150, deadline=None, derandomize=True)
@given(change=st.sampled_from(CHANGES), value=ANYTHING)
def test_a_value_of_any_type_is_served_or_refused_by_name_and_a_neighbours_output_is_what_it_was(
    change: tuple[Command, str], value: Any
) -> None:
    at = busy()
    answer = at.send(changed(*change, value))
    at.run()
    ends = [event for event in answer if isinstance(event, Finished | Refused)]
    assert len(ends) <= 1
    assert all(not isinstance(end, Refused) or (400 <= end.status < 500 and end.param) for end in ends), ends
    assert isinstance(at.finished("neighbour"), Finished) and at.output("neighbour") == ALONE
    check_consistent(at.engine.state)
    at.send(Submit(request_id="next", tokens=(1, 2, 3), max_new_tokens=12))
    at.run()
    assert at.output("next") == ALONE, "whoever comes next is served"


@pytest.mark.parametrize("command", ["hello", None, 5, object(), SamplingParams()])
def test_what_is_no_command_is_refused(command: Any) -> None:
    at = busy()
    (refused,) = at.send(command)
    assert isinstance(refused, Refused) and (refused.status, refused.param) == (400, "command")
    at.run()
    assert at.output("neighbour") == ALONE


@pytest.mark.parametrize(
    ("command", "param"),
    [
        (Submit(request_id="a", tokens=(1,), max_new_tokens="8"), "max_new_tokens"),  # type: ignore[arg-type]
        (Submit(request_id="a", tokens=(1,), max_new_tokens=2.5), "max_new_tokens"),  # type: ignore[arg-type]
        (Submit(request_id="a", tokens=(1,), priority="high"), "priority"),  # type: ignore[arg-type]
        (Submit(request_id="a", tokens=("x",)), "tokens"),  # type: ignore[arg-type]
        (Submit(request_id="a", tokens=(1, True)), "tokens"),
        (Submit(request_id="a", tokens=(1, 2.0)), "tokens"),  # type: ignore[arg-type]
        (Submit(request_id="a", tokens=b"ab"), "tokens"),  # type: ignore[arg-type]
        (Submit(request_id="a", tokens=(1,), sampling=SamplingParams(logit_bias={5: 1.0})), "logit_bias"),  # type: ignore[arg-type]
        (RewindSession(session_id="s", length="2"), "length"),  # type: ignore[arg-type]
        (RewindSession(session_id=["s"], turn=0), "session_id"),  # type: ignore[arg-type]
        (OpenSession(session_id="t", ttl_ms="5"), "ttl_ms"),  # type: ignore[arg-type]
        (ForkSession(session_id="s", new_id=3), "new_id"),  # type: ignore[arg-type]
    ],
)
def test_a_value_of_the_wrong_type_is_refused_by_its_name_with_what_is_allowed(command: Command, param: str) -> None:
    at = busy()
    (refused,) = at.send(command)
    assert isinstance(refused, Refused) and (refused.status, refused.param) == (400, param)
    assert "must be" in refused.message and "got" in refused.message and len(refused.message) < 200
    at.run()
    assert at.output("neighbour") == ALONE


def test_numbers_of_numpy_are_as_good_as_plain_ones() -> None:
    at = engine_client()
    tokens: Any = np.array([1, 2, 3], dtype=np.int32)
    at.send(Submit(request_id="a", tokens=tokens, max_new_tokens=np.int64(12), priority=np.int8(1)))  # type: ignore[arg-type]
    at.run()
    assert at.output("a") == ALONE
    kept = at.finished("a")
    assert type(kept.max_new_tokens) is int


# --- what breaks half-way --------------------------------------------------------------------------------------


def explode(*args: object, **more: object) -> None:
    raise ZeroDivisionError("a bug of ours")


TURN = Submit(request_id="a", tokens=(4, 5), max_new_tokens=3, session_id="s")
FOLLOWER = Submit(request_id="a", tokens=(1, 2, 3), max_new_tokens=3, shares_with="neighbour")
STOPPED = Submit(request_id="a", tokens=(4, 5), max_new_tokens=3, stop=("7",))


@pytest.mark.parametrize(
    ("broken", "command"),
    [
        ("roost.sched.state.State.enqueue", TURN),
        ("roost.sched.intake.Request", TURN),
        ("roost.sched.intake.SpecCounters", FOLLOWER),
        ("roost.sched.intake.set_limits", FOLLOWER),
        ("roost.sched.queue.set_limits", TURN),
        ("tests.sim.wishes.SimStopFinder.__init__", STOPPED),
        ("roost.session.table.Sessions.add", OpenSession(session_id="t")),
        ("roost.session.record.Record.copy", ForkSession(session_id="s", new_id="t")),
        ("roost.session.record.Record.cut", RewindSession(session_id="s", length=1)),
        ("roost.sched.intake.session_state", GetSession(session_id="s")),
    ],
)
def test_a_command_that_breaks_in_the_middle_ends_alone_and_leaves_nothing_behind(
    broken: str, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(Submit(request_id="first", tokens=(6, 7), max_new_tokens=2, session_id="s"))
    at.run()
    at.engine.post(NEIGHBOUR, at.events.append)
    at.engine._receive(at.engine._mailbox.get())  # read, and without its first token
    with monkeypatch.context() as patch:
        patch.setattr(broken, explode)
        answer: list[Any] = []
        at.engine.post(command, answer.append)
        at.engine._receive(at.engine._mailbox.get())
    (refused,) = answer
    assert isinstance(refused, Refused) and (refused.status, refused.param) == (500, "")
    assert "ZeroDivisionError('a bug of ours')" in refused.message and "test_broken_commands.py:" in refused.message
    assert ("broken_command", refused.message.removeprefix("the engine failed on "), ()) in at.engine.state.trace.last()
    (again,) = at.send(GetSession(session_id="s"))
    assert isinstance(again, SessionState) and (again.length, again.turns, again.state) == (4, 1, "idle")
    at.send(command)
    at.run()
    assert at.output("neighbour") == ALONE
    assert not isinstance(command, Submit) or isinstance(at.finished("a"), Finished), "asked again, it is served"


def test_a_command_that_leaves_something_half_done_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Going on would be a lie: its session has KV of tokens that it has forgotten."""
    at = busy()
    monkeypatch.setattr("roost.session.table.Sessions._cut", explode)
    with pytest.raises(InvariantError, match="'s' holds more KV than it has tokens"):
        at.send(RewindSession(session_id="s", length=1))


@pytest.mark.parametrize(
    "spoil",
    [
        lambda state: state.queued.append(state.running[0]),
        lambda state: state.running.clear(),
        lambda state: state.turns.clear(),
        lambda state: state.requests.pop("neighbour"),
        lambda state: setattr(state.sessions.table["s"], "turn", 99),
        lambda state: setattr(state.sessions.table["s"], "closing", True),
        lambda state: setattr(state.sessions.table["s"], "record", Record()),
        lambda state: state.store.leases.popitem(),
    ],
)
def test_what_is_not_whole_is_seen(spoil: Callable[[Any], object]) -> None:
    state = busy().engine.state
    check_consistent(state)
    spoil(state)
    with pytest.raises(InvariantError):
        check_consistent(state)
