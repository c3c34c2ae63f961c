"""Session commands: open, rewind, fork and describe sessions, and close those whose ttl has run out.

Checks a command, then has the session table carry it out; a session that a turn holds is not changed, but what it has
committed can be forked. There is no timer: expired sessions are closed before each tick and each command. Called by
intake, ending and the loop.
"""

from bisect import bisect_right

from roost.clients import scoped
from roost.errors import CapacityError, RequestError
from roost.messages import ForkSession, OpenSession, PastTurn, RewindSession, SessionHistory, SessionState
from roost.sched.client_limits import limits_of
from roost.sched.journaling import check_room, find_session, write_closed, write_opened, write_rewind
from roost.sched.state import State
from roost.session.table import Session

ID_LEN_MAX = 256
TTL_MS_MAX = 2**40
TOKENS_MAX = 2**31 - 1
MS = 1_000_000  # nanoseconds


def open_session(state: State, command: OpenSession) -> SessionState:
    """A new, empty session."""
    limits = state.resolved.session
    _check_new(state, "session_id", command.session_id, command.client)
    if command.ttl_ms is not None:
        _check_range("ttl_ms", command.ttl_ms, 1, TTL_MS_MAX)
    if command.max_tokens is not None:
        most = limits.max_session_tokens
        _check_range("max_tokens", command.max_tokens, 1, most if most is not None else TOKENS_MAX)
    own_ttl_s = limits_of(state, command.client).session_ttl_s
    ttl_s = own_ttl_s if own_ttl_s is not None else limits.session_ttl_s
    ttl_ms = command.ttl_ms if command.ttl_ms is not None or ttl_s is None else ttl_s * 1000
    session = Session(
        id=scoped(command.client, command.session_id),
        scoped_salt=scoped(command.client, command.cache_salt),
        client=command.client,
        ttl_ns=None if ttl_ms is None else ttl_ms * MS,
        max_tokens=command.max_tokens if command.max_tokens is not None else limits.max_session_tokens,
        shares=command.shares,
        last_used=state.now,
    )
    if command.journaled:
        write_opened(state, session)
    state.sessions.add(session)
    return _opened(state, session)


def fork_session(state: State, command: ForkSession) -> SessionState:
    """A new session that continues from the present state of another, or from one of its committed turns or tokens."""
    turn, length = command.turn, command.length
    if turn is None and length is None:
        session = _free(state, command)
        length, turn = len(session.record), len(session.turns)
    else:
        session = find_session(state, command.session_id, command.client)
        length, turn = _kept(session, turn, length, _committed_len(state, session))
    _check_new(state, "new_id", command.new_id, command.client)
    fork = state.sessions.fork(session, command.new_id, state.now, length, turn)
    if session.log is not None:
        try:
            write_opened(state, fork)
        except (RequestError, CapacityError) as error:
            state.sessions.close(fork)
            raise _renamed(error, "new_id") from error
    return _opened(state, fork)


def rewind_session(state: State, command: RewindSession) -> SessionState:
    """Cut a session to a number of turns, or of tokens."""
    session = _free(state, command)
    turn, length = command.turn, command.length
    if (turn is None) == (length is None):
        raise RequestError(400, "turn", "exactly one of turn and length must be given")
    length, turn = _kept(session, turn, length, len(session.record))
    write_rewind(state, session, length, turn)
    state.sessions.rewind(session, length, num_turns=turn)
    state.trace.note("rewind", session.id, length, 0 if session.lease is None else session.lease.settled_len)
    became_idle(state, session)
    return session_state(state, session)


def session_state(state: State, session: Session) -> SessionState:
    """The state of a session, as clients see it."""
    request = state.turns[session.turn] if session.turn is not None else None
    phase = "idle" if request is None else "waiting" if request.row is None else "running"
    lease = session.lease if request is None or request.turn.lease is None else request.turn.lease
    return SessionState(
        session_id=session.name,
        length=len(session.record),
        resident=0 if lease is None else lease.settled_len,
        turns=len(session.turns),
        state="closing" if session.closing else phase,
        idle_ms=(state.now - session.last_used) // MS if request is None else 0,
        ttl_ms=None if session.ttl_ns is None else session.ttl_ns // MS,
        max_tokens=session.max_tokens,
        cache_salt=session.cache_salt,
        client=session.client,
    )


def session_history(state: State, session: Session) -> SessionHistory:
    """The committed turns of a session."""
    turns = [
        PastTurn(
            end_len=each.end_len,
            last_token=int(session.record.slice(each.end_len - 1, each.end_len)[0]),
            usage=each.usage,
            note=each.note,
        )
        for each in session.turns
    ]
    return SessionHistory(length=_committed_len(state, session), turns=tuple(turns))


def session_states(state: State, client: str | None) -> tuple[SessionState, ...]:
    """The states of a client's sessions, or of all."""
    every = state.sessions.table.values()
    return tuple(session_state(state, session) for session in every if client in (None, session.client))


def expire(state: State) -> None:
    """Close expired sessions; the table is searched only when one can have expired."""
    if state.expiry_min is None or state.now < state.expiry_min:
        return
    for session in list(state.sessions.table.values()):
        if session.expires_at is not None and session.expires_at <= state.now:
            state.trace.note("expire", session.id)
            state.totals.sessions_expired += 1
            write_closed(state, session)
            state.sessions.close(session)
    times = [session.expires_at for session in state.sessions.table.values() if session.expires_at is not None]
    state.expiry_min = min(times, default=None)


def became_idle(state: State, session: Session) -> None:
    """No turn holds this session any more: its ttl starts, and idle sessions are kept within --max-resident-tokens."""
    state.may_expire(session)
    most = state.resolved.session.max_resident_tokens
    if most is None:
        return
    held = [(each, each.lease.settled_len) for each in state.sessions.idle() if each.lease is not None]
    excess = sum(length for _, length in held) - most
    for each, length in held:
        if excess <= 0:
            return
        state.trace.note("over_limit", each.id, excess)
        state.sessions.reclaim(each)
        excess -= length


def _check_range(param: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise RequestError(400, param, f"must be in [{least}, {most}], got {value}")


def _kept(session: Session, turn: int | None, length: int | None, length_max: int) -> tuple[int, int]:
    """How many tokens and turns are left of a session that ends after a turn, or after a length up to `length_max`."""
    if turn is not None and length is not None:
        raise RequestError(400, "turn", "at most one of turn and length must be given")
    if length is None:
        assert turn is not None
        _check_range("turn", turn, 0, len(session.turns))
        return session.turns[turn - 1].end_len if turn else 0, turn
    _check_range("length", length, 0, length_max)
    return length, bisect_right(session.turns, length, key=lambda each: each.end_len)


def _committed_len(state: State, session: Session) -> int:
    """Tokens of a session without those of a turn that runs."""
    turn = None if session.turn is None else state.turns[session.turn].turn
    return turn.commit_len if turn is not None and turn.started else len(session.record)


def _free(state: State, command: RewindSession | ForkSession) -> Session:
    """An open session that no turn holds; raises RequestError otherwise."""
    session = find_session(state, command.session_id, command.client)
    if session.turn is not None:
        raise RequestError(409, "session_id", f"session {session.name!r} has a turn that has not ended")
    return session


def _check_new(state: State, param: str, name: str, client: str) -> None:
    """Raise an error if a client cannot open another session under this id."""
    if not 1 <= len(name) <= ID_LEN_MAX:
        raise RequestError(400, param, f"must have 1 to {ID_LEN_MAX} characters, got {len(name)}")
    if scoped(client, name) in state.sessions.table:
        raise RequestError(409, param, f"a session {name!r} is open already")
    check_room(state, client)


def _renamed(error: RequestError | CapacityError, param: str) -> RequestError | CapacityError:
    return RequestError(error.status, param, error.reason) if isinstance(error, RequestError) else error


def _opened(state: State, session: Session) -> SessionState:
    state.totals.sessions_opened += 1
    became_idle(state, session)
    return session_state(state, session)
