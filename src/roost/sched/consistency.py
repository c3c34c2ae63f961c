"""Consistency: whether the scheduler's tables of requests, sessions and pages still agree with each other.

Checked after a command failed with an unexpected exception, since what it left half done would hurt other requests
later. Reads everything and changes nothing. Called by intake.
"""

from collections import Counter

from roost.errors import InvariantError
from roost.kv.audit import audit_pages
from roost.sched.state import State


def check_consistent(state: State) -> None:
    """Raise InvariantError if a request or a session is in a wrong state, or a page is lost.

    A request that has not ended must be in exactly one place: queued, running, behind its leader, or waiting for its
    session.
    """
    sessions = list(state.sessions.table.values())
    followers = [follower for request in state.requests.values() for follower in request.followers]
    waiting = [turn for session in sessions for turn in session.waiting]
    places = Counter([*(request.turn.id for request in (*state.queued, *state.running, *followers)), *waiting])
    if not places == Counter(state.turns.keys()) == Counter(each.turn.id for each in state.requests.values()):
        raise InvariantError(f"requests {list(state.requests)} are not each in one place: {places}")
    for session in sessions:
        if session.turn is not None and session.turn not in state.turns:
            raise InvariantError(f"session {session.id!r} is held by turn {session.turn}, which does not exist")
        if session.closing and session.id not in state.close_replies:
            raise InvariantError(f"session {session.id!r} is closing, but nobody is to be told")
        if session.lease is not None and session.lease.settled_len > len(session.record):
            raise InvariantError(f"session {session.id!r} holds more KV than it has tokens: {session.lease}")
    audit_pages(state.store)
