"""Session table: sessions, their turns, and the one way every turn ends.

A session owns a token record and, while its KV is resident, a lease. A turn borrows both; a plain request is a turn
without a session, with a record and a lease of its own. Between turns a session can be rewound, forked and reclaimed.
Never sees rows, queues or steps. Called by the scheduler.
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
from roost.session.epoch_logs import OwnedLog
from roost.session.record import Record, key_of


class Outcome(Enum):
    """How a turn's hold on its lease ends."""

    COMMIT = "commit"  # finished: the returned output becomes history
    SUSPEND = "suspend"  # preempted: pages go to the prefix tree, tokens stay, the turn resumes later
    ROLLBACK = "rollback"  # aborted or failed: back to the commit point, whose KV is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed:
    """A turn that has become history."""

    end_len: int  # length of the record after it
    usage: Usage
    note: str = ""  # what its sender wants to find in the journal


@dataclass(slots=True, kw_only=True, eq=False)
class Session:
    """A conversation between turns."""

    id: str  # unique among all clients' sessions
    scoped_salt: str  # its cache salt with its client's name: unique to the client
    client: str = ""
    ttl_ns: int | None = None  # closed when it has been idle for so long
    max_tokens: int | None = None  # maximum length of its record
    shares: bool = False  # every commit publishes its whole pages, so that a fork finds them while a turn runs
    record: Record = field(default_factory=Record)
    turns: list[Committed] = field(default_factory=list)
    lease: Lease | None = None  # None while not resident
    turn: TurnId | None = None  # the turn that holds it: queued or running
    waiting: deque[TurnId] = field(default_factory=deque)  # turns that wait for it, in order
    closing: bool = False
    last_used: int = 0  # when a turn last ended, or when it was opened
    forked_from: str = ""  # what its client called the session that it is a fork of
    log: OwnedLog | None = None  # where it is written down; None: nowhere

    @property
    def name(self) -> str:
        """What its client calls it."""
        return unscoped(self.client, self.id)

    @property
    def cache_salt(self) -> str:
        """The cache salt that its client gave."""
        return unscoped(self.client, self.scoped_salt)

    @property
    def expires_at(self) -> int | None:
        """When its ttl runs out; None if it has no ttl, or while a turn holds it."""
        return None if self.ttl_ns is None or self.turn is not None else self.last_used + self.ttl_ns


@dataclass(slots=True, kw_only=True, eq=False)
class Turn:
    """One request's hold on a record and a lease."""

    id: TurnId
    scoped_salt: str
    session: Session | None
    record: Record
    input_tokens: tuple[int, ...]
    commit_len: int = 0  # length of the record before this turn, to which a rollback returns
    prompt_len: int = 0  # tokens before the first output, history included
    prefill_len: int = 0  # tokens to prefill before it decodes: the prompt and, after a preemption, the output
    cached_len: int = 0  # of these, tokens whose KV was found in place when it last started
    started: bool = False  # whether its input is in the record
    lease: Lease | None = None  # while it runs

    @property
    def full_prompt_len(self) -> int:
        """Tokens before its first output, history included; final once the turn holds its session."""
        return self.prompt_len if self.started else self.next_prefill_len

    @property
    def next_prefill_len(self) -> int:
        """Tokens to prefill before it could decode, if it started now."""
        return len(self.record) + (0 if self.started else len(self.input_tokens))


class Sessions:
    """All sessions, and what each turn does to records and leases."""

    def __init__(self, store: Store, pair: bool) -> None:
        self._store = store
        self._pair = pair
        self._table: dict[str, Session] = {}
        self._idle: OrderedDict[str, Session] = OrderedDict()  # resident and without a running turn, by last use
        self.num_leases_kept = 0  # how often a turn has left a lease to its session
        self.num_reclaimed = 0  # how often an idle session has lost its lease

    @property
    def table(self) -> dict[str, Session]:
        """Open sessions by id."""
        return self._table

    def idle(self) -> list[Session]:
        """Resident sessions without a running turn, least recently used first."""
        return list(self._idle.values())

    def add(self, session: Session) -> None:
        """Add a session whose id is not in use."""
        assert session.id not in self._table, session.id
        self._table[session.id] = session

    def find(self, name: str, client: str = "", *, may_close: bool = False) -> Session:
        """A client's open session; one that is closing only if `may_close` allows it."""
        session = self._table.get(scoped(client, name))
        if session is None:
            raise RequestError(404, "session_id", f"there is no session {name!r}")
        if session.closing and not may_close:
            raise RequestError(410, "session_id", f"session {name!r} is closing")
        return session

    def close(self, session: Session) -> None:
        """Remove a session that no turn holds, and release its lease."""
        assert session.turn is None, session
        self._let_go(session, session.last_used)
        del self._table[session.id]

    def reclaim(self, session: Session) -> None:
        """Move an idle session's KV to the prefix cache; its next turn prefills again what has been evicted by then."""
        assert session.lease is not None and session.id in self._idle, session
        self._publish(session)
        self._let_go(session, session.last_used)
        self.num_reclaimed += 1

    def rewind(self, session: Session, length: int, num_turns: int) -> None:
        """Cut a session that no turn holds to `length` tokens, and its KV to the last length that can be continued."""
        assert session.turn is None, session
        session.record.cut(length)
        del session.turns[num_turns:]
        if session.lease is None:
            return
        if self._store.states is not None:  # the slot of the last token may stand for a pair: say now what that costs
            length = max(0, length - self._pair)
        session.lease = self._cut(session.lease, session.record, length, session.last_used)
        if session.lease.settled_len == 0:
            self._let_go(session, session.last_used)

    def _cut(self, lease: Lease, record: Record, length: int, now: int) -> Lease:
        """Trim a lease to `length` tokens; returns the lease to continue from.

        With sliding windows the lease may have to be cut further. If the prefix tree has more of the tokens than is
        left then, a new lease on those pages replaces it.
        """
        self._store.trim(lease, length)
        if lease.settled_len >= floor_to(length, self._store.page_size):
            return lease  # the tree holds only whole pages, so no more than this
        key = record.key(min(length + self._pair, len(record)), self._pair)
        match = self._store.tree.match(lease.scoped_salt, key)
        if match is None or match.length <= lease.settled_len:
            return lease
        later = self._store.open(lease.holder, lease.scoped_salt, key)
        self._store.release(lease, now)
        return later

    def fork(self, session: Session, new_name: str, now: int, length: int, num_turns: int) -> Session:
        """A new session with the first tokens and turns of another; whole pages are shared in the tree.

        A turn that holds the other one goes on untouched. If it runs, it has the lease: then the fork finds only what
        was published before.
        """
        if session.lease is not None:
            self._publish(session)
        fork = Session(
            id=scoped(session.client, new_name),
            scoped_salt=session.scoped_salt,
            client=session.client,
            ttl_ns=session.ttl_ns,
            max_tokens=session.max_tokens,
            shares=session.shares,
            record=session.record.copy(length),
            turns=session.turns[:num_turns],
            last_used=now,
            forked_from=session.name,
        )
        self.add(fork)
        return fork

    def _publish(self, session: Session) -> None:
        """Insert the whole pages that a session keeps into the prefix tree; its lease shares them from then on."""
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
        """The KV a turn can continue from: its session's lease, or a new one on the cached prefix of its tokens.

        At most `match_max` tokens are looked up; the rest has to run, for its log-probabilities.
        """
        session = turn.session
        if session is not None and session.lease is not None:
            return session.lease
        tokens = turn.record.slice(0, len(turn.record))
        if not turn.started:
            tokens = np.concatenate([tokens, np.array(turn.input_tokens, dtype=np.int32)])
        # the last token must run in any case, so it is not looked up (a pair key has no entry for it anyway)
        key = key_of(tokens if self._pair else tokens[:-1], self._pair)
        return self._store.open(turn.id, turn.scoped_salt, key[:match_max])

    def refuse_lease(self, turn: Turn, lease: Lease, now: int) -> None:
        """Undo `find_lease` for a turn that cannot start now."""
        if turn.session is None or lease is not turn.session.lease:
            self._store.release(lease, now)

    def begin(self, turn: Turn, lease: Lease) -> None:
        """Start a turn that leaves the queue: its input joins the record, and the lease becomes its own."""
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
            # Without new tokens the last one runs again. It also does for a pair drafter that has written its slot:
            # that slot was computed for a next token which was never returned.
            stale = 1 if self._pair and lease.settled_len == turn.commit_len else 0
            wanted = min(found, lease.settled_len - stale)
            lease = self._cut(lease, turn.record, wanted, session.last_used)
            if lease.settled_len < wanted:  # shared pages cannot be written, and the window may be gone
                found = lease.settled_len
        turn.lease, turn.cached_len = lease, found
        # a first turn has nothing to roll back to; it keeps the window behind its prompt, to publish it when it ends
        is_first = session is not None and turn.commit_len == 0
        anchor_len = turn.prompt_len if is_first else turn.commit_len
        # whoever goes back to the end of the turn before runs its last token again, if its slot stands for a pair
        turn_end = 0 if session is None else max(0, turn.commit_len - self._pair)
        self._store.hand(lease, turn.id, anchor_len, turn_end)

    def end_turn(
        self,
        turn: Turn,
        outcome: Outcome,
        now: int,
        returned_len: int = 0,
        usage: Usage | None = None,
        note: str = "",
    ) -> None:
        """End a turn; every turn ends here. A commit keeps `returned_len` tokens of the record and notes the usage."""
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
            if (
                outcome is Outcome.ROLLBACK
            ):  # it may have been prefilling tokens that the tree has, for their log-probabilities
                lease = self._cut(lease, record, turn.commit_len, now)
            elif session.shares:
                self._store.publish(lease, record.key(len(record), self._pair), now)
            self._keep(session, lease, now)
        if session is not None:
            if outcome is Outcome.COMMIT:
                assert usage is not None, turn
                session.turns.append(Committed(end_len=returned_len, usage=usage, note=note))
            self._clear(session, turn, now)

    def _keep(self, session: Session, lease: Lease, now: int) -> None:
        """Give the lease back to the session; an empty one is released, since a cache lookup may find more."""
        if lease.settled_len == 0:
            self._store.release(lease, now)
            return
        self._store.slide(lease)
        self._store.hand(lease, session.id)
        session.lease = lease
        self._idle[session.id] = session
        self.num_leases_kept += 1

    def _clear(self, session: Session, turn: Turn, now: int) -> None:
        """Mark the session as free for its next turn, if this turn holds it (one that only waited does not)."""
        if session.turn != turn.id:
            return
        session.turn = None
        session.last_used = now
        if session.id in self._idle:
            self._idle.move_to_end(session.id)
