"""Whole: whether what the scheduler's parts say of requests, sessions and pages still agrees.

Asked after a command that broke for a reason nobody thought of: what it left half done would hurt others later. Reads
everything, changes nothing. Called by intake.
"""

from collections import Counter

from roost.errors import InvariantError
from roost.kv.audit import audit_pages
from roost.sched.state import State


def check_consistent(state: State) -> None:
    """Raise InvariantError unless every request can go on, every session is free or a request's, and no page is lost.

    A request that has not ended is in exactly one place: queued, running, behind its leader or before its session.
    """
    sessions = list(state.sessions.table.values())
    followers = [follower for request in state.requests.values() for follower in request.followers]
    waiting = [turn for session in sessions for turn in session.waiting]
    places = Counter([*(request.turn.id for request in (*state.queued, *state.running, *followers)), *waiting])
    if not places == Counter(state.turns.keys()) == Counter(each.turn.id for each in state.requests.values()):
        raise InvariantError(f"requests {list(state.requests)} are not each in one place: {places}")
    for session in sessions:
        if session.turn is not None and session.turn not in state.turns:
            raise InvariantError(f"session {session.id!r} is kept by turn {session.turn}, which nobody knows")
        if session.closing and session.id not in state.close_replies:
            raise InvariantError(f"session {session.id!r} is closing, and nobody waits for it")
        if session.lease is not None and session.lease.settled_len > len(session.record):
            raise InvariantError(f"session {session.id!r} holds more KV than it has tokens: {session.lease}")
    audit_pages(state.store)
