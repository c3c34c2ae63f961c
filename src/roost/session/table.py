"""Session table: sessions, their turns, and the one way every turn ends.

A session owns a token record and, while resident, a lease. A turn borrows both by its own id; a plain request is a
turn without a session, with a record and a lease of its own. Between turns a session can be rewound, forked and
reclaimed. Never sees rows, queues or steps. Called by sched.
"""

from collections import OrderedDict, deque
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from roost.clients import scoped, unscoped
from roost.errors import RequestError
from roost.kv.lease import Lease, TurnId
from roost.kv.pages import floor_to
from roost.kv.store import Store
from roost.messages import Usage
from roost.session.record import Record, key_of


class Outcome(Enum):
    """How a turn's hold on its lease ends."""

    COMMIT = "commit"  # finished: what was returned becomes history
    SUSPEND = "suspend"  # preempted: pages go to the tree, tokens stay, the turn resumes later
    ROLLBACK = "rollback"  # aborted or failed: back to the commit point, KV kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A turn that has become history."""

    end_len: int  # tokens of the record after it
    usage: Usage


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """A conversation between turns."""

    id: str  # that no other client's has
    scoped_salt: str  # its cache salt with its client's name: nobody else's pages match
    client: str = ""
    ttl_ns: int | None = None  # closed when no turn has had it for so long
    max_tokens: int | None = None  # most tokens its record may come to
    record: Record = field(default_factory=Record)
    turns: list[Committed] = field(default_factory=list)
    lease: Lease | None = None  # None while not resident
    turn: TurnId | None = None  # the turn that has it: queued or running
    waiting: deque[TurnId] = field(default_factory=deque)  # turns that asked to wait for it
    closing: bool = False
    last_used: int = 0  # when a turn last ended, or when it was opened

    @property
    def name(self) -> str:
        """What its client calls it."""
        return unscoped(self.client, self.id)

    @property
    def cache_salt(self) -> str:
        """What its client said to keep its cache apart."""
        return unscoped(self.client, self.scoped_salt)

    @property
    def expires_at(self) -> int | None:
        """When its time is up, if no turn takes it before; None: never, or not while a turn has it."""
        return None if self.ttl_ns is None or self.turn is not None else self.last_used + self.ttl_ns


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One request's hold on a record and a lease."""

    id: TurnId
    scoped_salt: str
    session: Session | None
    record: Record
    input_tokens: tuple[int, ...]
    commit_len: int = 0  # tokens of the record before this turn: where a rollback goes
    prompt_len: int = 0  # tokens before the first output, history included
    prefill_len: int = 0  # tokens to run before decoding goes on: the prompt, and after a preemption the output so far
    cached_len: int = 0  # of the tokens to run, what it found in place when it last started
    started: bool = False  # its input is in the record
    lease: Lease | None = None  # while it runs

    @property
    def full_prompt_len(self) -> int:
        """Tokens before its first output, history included; final once the turn has its session."""
        return self.prompt_len if self.started else self.next_prefill_len

    @property
    def next_prefill_len(self) -> int:
        """Tokens it has to have run before it can decode, were it to start now."""
        return len(self.record) + (0 if self.started else len(self.input_tokens))


class Sessions:
    """All sessions, and the life of every turn on the KV plane."""

    def __init__(self, store: Store, pair: bool) -> None:
        self._store = store
        self._pair = pair
        self._table: dict[str, Session] = {}
        self._idle: OrderedDict[str, Session] = OrderedDict()  # resident and without a running turn, by last use
        self.num_leases_kept = 0  # how often a turn has left its session a lease
        self.num_reclaimed = 0  # how often a session has lost one to the tree

    @property
    def table(self) -> dict[str, Session]:
        """Open sessions by id."""
        return self._table

    def idle(self) -> list[Session]:
        """Resident sessions that no turn runs on, least recently used first."""
        return list(self._idle.values())

    def add(self, session: Session) -> None:
        """A new session, under an id that no other has."""
        assert session.id not in self._table, session.id
        self._table[session.id] = session

    def find(self, name: str, client: str = "", *, may_close: bool = False) -> Session:
        """A client's open session; one that is closing only if that does not matter."""
        session = self._table.get(scoped(client, name))
        if session is None:
            raise RequestError(404, "session_id", f"there is no session {name!r}")
        if session.closing and not may_close:
            raise RequestError(410, "session_id", f"session {name!r} is closing")
        return session

    def close(self, session: Session) -> None:
        """Forget a session that no turn has, and give back what it holds."""
        assert session.turn is None, session
        self._let_go(session, session.last_used)
        del self._table[session.id]

    def reclaim(self, session: Session) -> None:
        """Move an idle session's pages to the tree; its next turn computes again what eviction takes."""
        assert session.lease is not None and session.id in self._idle, session
        self._publish(session)
        self._let_go(session, session.last_used)
        self.num_reclaimed += 1

    def rewind(self, session: Session, length: int, num_turns: int) -> None:
        """Cut a session that no turn has to `length` tokens, and its KV to the last point from which it can go on."""
        assert session.turn is None, session
        session.record.cut(length)
        del session.turns[num_turns:]
        if session.lease is None:
            return
        session.lease = self._cut(session.lease, session.record, length, session.last_used)
        if session.lease.settled_len == 0:
            self._let_go(session, session.last_used)

    def _cut(self, lease: Lease, record: Record, length: int, now: int) -> Lease:
        """Trim a lease to `length` tokens; where the window behind that has moved on, the tree may hold a later point.

        Returns the lease to go on from, which is another one then.
        """
        self._store.trim(lease, length)
        if lease.settled_len >= floor_to(length, self._store.page_size):
            return lease  # the tree holds only whole pages
        key = record.key(min(length + self._pair, len(record)), self._pair)
        match = self._store.tree.match(lease.cache_salt, key)
        if match is None or match.length <= lease.settled_len:
            return lease
        later = self._store.open(lease.holder, lease.cache_salt, key)
        self._store.release(lease, now)
        return later

    def fork(self, session: Session, new_name: str, now: int) -> Session:
        """A session with the tokens and turns of one that no turn has; whole pages are shared through the tree."""
        assert session.turn is None, session
        if session.lease is not None:
            self._publish(session)
        fork = Session(
            id=scoped(session.client, new_name),
            scoped_salt=session.scoped_salt,
            client=session.client,
            ttl_ns=session.ttl_ns,
            max_tokens=session.max_tokens,
            record=session.record.copy(),
            turns=list(session.turns),
            last_used=now,
        )
        self.add(fork)
        return fork

    def _publish(self, session: Session) -> None:
        """Whole pages of an idle session into the tree; its lease shares them from then on."""
        assert session.lease is not None, session
        key = session.record.key(len(session.record), self._pair)
        self._store.publish(session.lease, key, session.last_used)

    def _let_go(self, session: Session, now: int) -> None:
        self._idle.pop(session.id, None)
        if session.lease is not None:
            self._store.release(session.lease, now)
            session.lease = None

    # --- turns -------------------------------------------------------------------------------------------------

    def find_lease(self, turn: Turn, match_max: int | None = None) -> Lease:
        """What a turn can go on from: its session's lease, or a new one on what the tree has of its tokens.

        At most `match_max` tokens are looked up: those after them shall run.
        """
        session = turn.session
        if session is not None and session.lease is not None:
            return session.lease
        tokens = turn.record.slice(0, len(turn.record))
        if not turn.started:
            tokens = np.concatenate([tokens, np.array(turn.input_tokens, dtype=np.int32)])
        # at least the last token must run, so its slot is not looked up (a pair key ends there by itself)
        key = key_of(tokens if self._pair else tokens[:-1], self._pair)
        return self._store.open(turn.id, turn.scoped_salt, key[:match_max])

    def refuse_lease(self, turn: Turn, lease: Lease, now: int) -> None:
        """Undo `find_lease` for a turn that does not start now."""
        if turn.session is None or lease is not turn.session.lease:
            self._store.release(lease, now)

    def begin(self, turn: Turn, lease: Lease) -> None:
        """A turn leaves the queue: its input joins the record, and the lease becomes its own."""
        if not turn.started:
            turn.started = True
            turn.commit_len = len(turn.record)
            turn.record.append(turn.input_tokens)
            turn.prompt_len = len(turn.record)
        turn.prefill_len = len(turn.record)
        session, found = turn.session, min(lease.settled_len, turn.prefill_len - 1)
        if session is not None and lease is session.lease:
            session.lease = None
            del self._idle[session.id]
            # With no new token the last one runs again. So it does for a pair drafter that has its slot: that slot
            # stands for a successor which was never returned.
            stale = 1 if self._pair and lease.settled_len == turn.commit_len else 0
            wanted = min(found, lease.settled_len - stale)
            lease = self._cut(lease, turn.record, wanted, session.last_used)
            if lease.settled_len < wanted:  # a shared page is not written, and a window may be gone
                found = lease.settled_len
        turn.lease, turn.cached_len = lease, found
        # a session's first turn has nothing to roll back to: it keeps the window behind its prompt, to share it later
        is_first = session is not None and turn.commit_len == 0
        self._store.hand(lease, turn.id, anchor_len=turn.prompt_len if is_first else turn.commit_len)

    def end_turn(
        self, turn: Turn, outcome: Outcome, now: int, returned_len: int = 0, usage: Usage | None = None
    ) -> None:
        """The one end of every turn: `returned_len` is what a commit keeps of the record, `usage` what it cost."""
        session, lease, record = turn.session, turn.lease, turn.record
        turn.lease = None
        if outcome is Outcome.SUSPEND:
            assert lease is not None, turn
            self._store.end_epoch(lease, len(record), len(record))
            self._store.publish(lease, record.key(len(record), self._pair), now)
            self._store.release(lease, now)
            return
        if turn.started:
            target = returned_len if outcome is Outcome.COMMIT else turn.commit_len
            if lease is not None:
                if session is not None and outcome is Outcome.COMMIT and turn.commit_len == 0:
                    self._store.publish(lease, record.key(turn.prompt_len, self._pair), now)
                self._store.end_epoch(lease, target, len(record))
            record.cut(target)
        if lease is not None and session is None:
            if outcome is Outcome.COMMIT:
                self._store.publish(lease, record.key(len(record), self._pair), now)
            self._store.release(lease, now)
        elif lease is not None and session is not None:
            if outcome is Outcome.ROLLBACK:  # it may have been running again, for scores, what the tree holds
                lease = self._cut(lease, record, turn.commit_len, now)
            self._keep(session, lease, now)
        if session is not None:
            if outcome is Outcome.COMMIT:
                assert usage is not None, turn
                session.turns.append(Committed(end_len=returned_len, usage=usage))
            self._clear(session, turn, now)

    def _keep(self, session: Session, lease: Lease, now: int) -> None:
        """The lease goes back to the session; an empty one is worth less than a look into the tree."""
        if lease.settled_len == 0:
            self._store.release(lease, now)
            return
        self._store.slide(lease)
        self._store.hand(lease, session.id)
        session.lease = lease
        self._idle[session.id] = session
        self.num_leases_kept += 1

    def _clear(self, session: Session, turn: Turn, now: int) -> None:
        """The session is free for its next turn; only the turn that has it can say so."""
        if session.turn != turn.id:
            return
        session.turn = None
        session.last_used = now
        if session.id in self._idle:
            self._idle.move_to_end(session.id)
