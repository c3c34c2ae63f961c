"""The journal: what was acknowledged is read again, whoever writes, falls or comes back, and at whatever moment."""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.errors import RequestError
from roost.messages import Usage
from roost.session.epoch_logs import DamagedLog, EpochLogs, framed, records
from roost.session.journal import COMPACT_BYTES, JournalError, SessionJournal, SessionMoved, key_of_session
from roost.session.journal_files import FileLogs
from roost.session.table import Committed, Session
from tests.support.memory_logs import MemoryLogs

USAGE = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=2)


@pytest.fixture(params=["memory", "files", "files with fsync"])
def logs(request: pytest.FixtureRequest, tmp_path: Path) -> EpochLogs:
    """Where a journal may be kept."""
    return MemoryLogs() if request.param == "memory" else FileLogs(tmp_path, fsync="fsync" in request.param)


def opened(journal: SessionJournal, name: str = "s", ttl_ns: int | None = None) -> Session:
    session = Session(id=name, scoped_salt="salt", ttl_ns=ttl_ns, max_tokens=99, shares=True)
    journal.open(session)
    return session


def taken_over(journal: SessionJournal, name: str = "s") -> Session:
    found = journal.take_over(name)
    assert found is not None
    return found[0]


def say(journal: SessionJournal, session: Session, *tokens: int, note: str = "") -> None:
    """A turn as the scheduler has it: in the record before it is written, a turn only after."""
    before = len(session.record)
    session.record.append(tokens)
    try:
        journal.turn(session, before, len(session.record), USAGE, note)
    except (SessionMoved, JournalError):
        session.record.cut(before)
        raise
    session.turns.append(Committed(end_len=len(session.record), usage=USAGE, note=note))


def rewind(journal: SessionJournal, session: Session, length: int, num_turns: int) -> None:
    journal.rewind(session, length, num_turns)
    session.record.cut(length)
    del session.turns[num_turns:]


def said(session: Session) -> list[int]:
    tokens: list[int] = session.record.slice(0, len(session.record)).tolist()
    return tokens


def test_a_session_is_read_as_it_was_acknowledged(logs: EpochLogs) -> None:
    journal = SessionJournal(logs, "model")
    session = opened(journal)
    say(journal, session, 1, 2, 3, note="hello \ud800")
    say(journal, session, 4)
    rewind(journal, session, 2, 0)
    say(journal, session, 5, 6)
    other = SessionJournal(logs, "model")
    assert other.has("s") and not other.has("t") and other.take_over("t") is None
    found = taken_over(other)
    assert said(found) == [1, 2, 5, 6]
    assert [(each.end_len, each.usage, each.note) for each in found.turns] == [(4, USAGE, "")]
    assert (found.scoped_salt, found.max_tokens, found.shares, found.ttl_ns) == ("salt", 99, True, None)
    with pytest.raises(RequestError, match="model 'model', this is 'another'"):
        SessionJournal(logs, "another").take_over("s")
    assert said(taken_over(SessionJournal(logs, "model"))) == [1, 2, 5, 6]


def test_a_former_owner_acknowledges_nothing(logs: EpochLogs) -> None:
    first, second = SessionJournal(logs), SessionJournal(logs)
    session = opened(first)
    say(first, session, 1)
    moved = taken_over(second)
    assert not first.owns(session) and second.owns(moved)
    for act in (lambda: say(first, session, 2), lambda: rewind(first, session, 0, 0), lambda: first.close(session)):
        with pytest.raises(SessionMoved, match="another replica owns it now"):
            act()
    say(second, moved, 3)
    assert said(taken_over(first)) == [1, 3]


def test_closed_and_expired_sessions_leave_nothing_behind(logs: EpochLogs) -> None:
    journal = SessionJournal(logs)
    session = opened(journal)
    with pytest.raises(RequestError, match="is open already"):
        opened(SessionJournal(logs))
    say(journal, session, 1)
    journal.close(session)
    assert not journal.has("s") and logs.epochs(key_of_session("s")) == []
    again = opened(journal, ttl_ns=1)
    assert not journal.owns(session) and journal.owns(again)
    with pytest.raises(SessionMoved):
        say(journal, session, 2)
    if isinstance(logs, MemoryLogs):
        logs._now_ns = lambda: 10
    assert journal.take_over("s") is None
    assert logs.epochs(key_of_session("s")) == []


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_record_that_was_cut_short_is_none_and_the_owner_goes_on_behind_it(data: st.DataObject) -> None:
    logs = MemoryLogs()
    journal = SessionJournal(logs)
    session = opened(journal)
    say(journal, session, 1)
    logs.room = data.draw(st.integers(0, 80))
    with pytest.raises(JournalError, match="cannot be written: No space left on device"):
        say(journal, session, *range(50))
    crashes = data.draw(st.booleans())
    logs.room = None
    if crashes:
        session, journal = taken_over(SessionJournal(logs)), SessionJournal(logs)
    assert said(session) == [1]
    say(journal, session, 2)
    assert said(taken_over(SessionJournal(logs))) == [1, 2]


@given(st.integers(0, 10_000), st.integers(1, 255))
@settings(max_examples=100, deadline=None)
def test_what_was_never_written_is_an_error_of_that_session_alone(at: int, change: int) -> None:
    logs = MemoryLogs()
    journal = SessionJournal(logs)
    session = opened(journal)
    for number in range(3):
        say(journal, session, *range(number, 20))
    opened(journal, "other")
    (log,) = logs.logs[key_of_session("s")].values()
    log[at % len(log)] ^= change
    for _ in range(2):
        with pytest.raises(JournalError, match="closing it removes it") as raised:
            SessionJournal(logs).take_over("s")
        assert raised.value.status == 500
    assert said(taken_over(SessionJournal(logs), "other")) == []
    journal.discard("s")
    assert not journal.has("s")


def test_zeros_at_the_end_are_a_write_that_did_not_come_through() -> None:
    whole = framed({"kind": "turn"}, b"1234")
    assert list(records(whole + bytes(100))) == [({"kind": "turn"}, b"1234")]
    with pytest.raises(DamagedLog):
        list(records(whole + bytes(50) + b"\1" + bytes(50)))


def test_a_log_stays_within_twice_the_session_however_often_that_is_rewound(logs: EpochLogs) -> None:
    journal, key = SessionJournal(logs), key_of_session("s")
    session = opened(journal)
    for _ in range(40):
        say(journal, session, *range(1000))
        rewind(journal, session, 0, 0)
        (epoch,) = logs.epochs(key)
        assert len(logs.read(key, epoch)) < COMPACT_BYTES + 10_000
    say(journal, session, 7)
    assert said(taken_over(SessionJournal(logs))) == [7]


@dataclass
class Actor:
    """An engine that takes a session over and says something in it, one operation of its logs at a time."""

    logs: MemoryLogs
    script: Callable[["Actor"], None]
    acknowledged: list[list[int]] = field(default_factory=list)  # what the session was, each time it said so
    may_go: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    has_stopped: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    is_done: bool = False
    broken: AssertionError | None = None

    def start(self) -> threading.Thread:
        thread = threading.Thread(target=self._run, daemon=True)
        thread.start()
        return thread

    def _run(self) -> None:
        self.may_go.acquire()
        try:
            self.script(self)
        except (RequestError, JournalError):
            pass
        except AssertionError as error:
            self.broken = error
        finally:
            self.is_done = True
            self.has_stopped.release()


def _interleave(logs: MemoryLogs, actors: list[Actor], choose: Callable[[int], int]) -> None:
    """Let one actor at a time do one operation; `choose` says which."""
    by_thread: dict[int | None, Actor] = {}

    def before(operation: str) -> None:
        actor = by_thread[threading.get_ident()]
        actor.has_stopped.release()
        actor.may_go.acquire()

    logs.before = before
    for actor in actors:
        by_thread[actor.start().ident] = actor
    while left := [actor for actor in actors if not actor.is_done]:
        actor = left[choose(len(left))]
        actor.may_go.release()
        actor.has_stopped.acquire()
    logs.before = lambda operation: None
    for actor in actors:
        assert actor.broken is None, actor.broken


def _turns(first: int) -> Callable[[Actor], None]:
    """Take the session over and say two things; then do it again, having been stopped somewhere for a while."""

    def script(actor: Actor) -> None:
        journal = SessionJournal(actor.logs)
        for start in (first, first + 10):
            session = taken_over(journal)
            for token in (start, start + 1):
                say(journal, session, token)
                actor.acknowledged.append(said(session))

    return script


def _closes(actor: Actor) -> None:
    journal = SessionJournal(actor.logs)
    if (found := journal.take_over("s")) is not None:
        actor.acknowledged.append([])  # whatever it will be told: it may happen
        journal.close(found[0])


def _opens(actor: Actor) -> None:
    journal = SessionJournal(actor.logs)
    session = opened(journal)
    actor.acknowledged.append([])
    say(journal, session, 99)
    actor.acknowledged.append(said(session))


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_nothing_that_was_acknowledged_is_lost_whoever_acts_between_two_operations(seed: int) -> None:
    logs, rng = MemoryLogs(), random.Random(seed)
    before = opened(SessionJournal(logs))
    say(SessionJournal(logs), before, 1)
    actors = [Actor(logs, _turns(100 * number)) for number in range(1, 4)]
    _interleave(logs, actors, rng.randrange)
    now = said(taken_over(SessionJournal(logs)))
    assert now[0] == 1 and len(set(now)) == len(now)
    for actor in actors:
        for then in actor.acknowledged:
            assert now[: len(then)] == then


@given(st.integers(0, 2**32))
@settings(max_examples=150, deadline=None)
def test_of_several_who_open_a_session_one_has_it_until_it_is_closed(seed: int) -> None:
    logs, rng = MemoryLogs(), random.Random(seed)
    actors = [Actor(logs, script) for script in (_opens, _opens, _closes, _opens)]
    _interleave(logs, actors, rng.randrange)
    opens = [actor.acknowledged for actor in actors if actor.script is _opens and actor.acknowledged]
    (closes,) = (actor.acknowledged for actor in actors if actor.script is _closes)
    assert len(opens) <= 1 + len(closes)
    found = SessionJournal(logs).take_over("s")
    if opens and not closes:
        assert found is not None and said(found[0])[: len(opens[0][-1])] == opens[0][-1]
    assert found is None or said(found[0]) in ([], [99])
