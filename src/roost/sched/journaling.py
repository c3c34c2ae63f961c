"""Journaling: what the scheduler has written to the journal of sessions, and how it gets sessions back from there.

Written before anybody is told, so that nothing is acknowledged that another engine could not go on from. A session that
another engine has taken over is dropped here: from the table, not from the journal. Called by intake, session commands
and ending.
"""

from roost.clients import scoped
from roost.errors import CapacityError, RequestError
from roost.messages import Usage
from roost.sched.client_limits import check_sessions
from roost.sched.state import State
from roost.session.journal import JournalError, SessionMoved
from roost.session.table import Session, Turn


def find_session(state: State, name: str, client: str = "", *, may_close: bool = False) -> Session:
    """A client's open session, from the journal where this engine does not have it; RequestError if there is none."""
    if state.journal is not None:
        known = state.sessions.table.get(scoped(client, name))
        if known is not None and known.log is not None and not state.journal.owns(known):
            if known.turn is not None:
                raise SessionMoved(known)  # what it was here says nothing any more; that turn will be told the same
            drop_moved(state, known)  # whoever sends its commands here wants it back
            known = None
        if known is None:
            _take_over(state, scoped(client, name), client)
    return state.sessions.find(name, client, may_close=may_close)


def drop_moved(state: State, session: Session) -> None:
    """Let go of a session that no turn holds and that another engine owns."""
    state.trace.note("session_moved", session.id, len(session.record))
    state.sessions.close(session)


def check_room(state: State, client: str) -> None:
    """Raise CapacityError if no more sessions may be open here."""
    most = state.resolved.session.max_sessions
    if len(state.sessions.table) >= most:
        raise CapacityError(429, f"{most} sessions are open: --max-sessions")
    check_sessions(state, client)


def write_opened(state: State, session: Session) -> None:
    """A session is about to be open."""
    if state.journal is not None:
        state.journal.open(session)


def write_turn(state: State, turn: Turn, returned_len: int, usage: Usage, note: str) -> None:
    """A turn is about to be committed; raises SessionMoved or JournalError if it must not be."""
    if state.journal is not None and turn.session is not None and turn.session.log is not None:
        state.journal.turn(turn.session, turn.commit_len, returned_len, usage, note)


def write_rewind(state: State, session: Session, length: int, num_turns: int) -> None:
    """A session is about to be cut."""
    if state.journal is None or session.log is None:
        return
    try:
        state.journal.rewind(session, length, num_turns)
    except SessionMoved:
        drop_moved(state, session)
        raise


def write_closed(state: State, session: Session) -> RequestError | CapacityError | None:
    """A session ends here; says what kept it from ending in the journal too."""
    if state.journal is None or session.log is None:
        return None
    try:
        state.journal.close(session)
    except SessionMoved as moved:
        state.trace.note("session_moved", session.id, len(session.record))
        return moved
    except JournalError as error:
        state.trace.note("journal", str(error))
        return error
    return None


def discard_damaged(state: State, name: str, client: str) -> bool:
    """Remove a session that the journal has and cannot read; False if there is none such."""
    if state.journal is None or scoped(client, name) in state.sessions.table:
        return False
    try:
        find_session(state, name, client)
    except JournalError as error:
        if error.status != 500:
            raise
        state.journal.discard(scoped(client, name))
        return True
    return False


def _take_over(state: State, scoped_id: str, client: str) -> None:
    """Go on with a session that the journal has, if it has it."""
    journal = state.journal
    if journal is None or not journal.has(scoped_id):
        return
    check_room(state, client)
    found = journal.take_over(scoped_id)
    if found is None:
        return
    session, idle_ns = found
    session.last_used = state.now - idle_ns
    state.trace.note("take_over", session.id, len(session.record), len(session.turns))
    state.sessions.add(session)
    state.may_expire(session)
