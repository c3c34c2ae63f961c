"""Queue: how a request enters the waiting queue, once its turn number and its prompt are known.

The only place that gives a session to a turn; `end_turn` is the only one that takes it back. Called by intake, and by
ending for the next turn that waits for a session.
"""

from roost.errors import RequestError
from roost.messages import Usage
from roost.sched.fit import resolve_max_new
from roost.sched.request import Request
from roost.sched.state import State
from roost.session.table import Session


class AlreadyCommitted(RequestError):
    """A turn with a number that is committed already: the client sent it twice."""

    def __init__(self, number: int, session: Session) -> None:
        super().__init__(409, "turn", f"turn {number} of session {session.name!r} is committed already")
        self.usage: Usage = session.turns[number].usage


def check_number(session: Session, number: int | None) -> None:
    """Raise RequestError for a turn number that is taken; or, if the session is free, that is not the next one."""
    if number is None:
        return
    if number < len(session.turns):
        raise AlreadyCommitted(number, session)
    if number > len(session.turns) and session.turn is None:
        raise RequestError(409, "turn", f"the next turn of session {session.name!r} is {len(session.turns)}")


def check_known(session: Session, known_len: int | None) -> None:
    """Raise RequestError if a free session is not where the sender of a turn takes it to be."""
    if known_len not in (None, len(session.record)):
        why = f"session {session.name!r} went on elsewhere: it has {len(session.record)} tokens, not {known_len}"
        raise RequestError(409, "session_id", f"{why}; send the turn again (with the library after LLM.resume)")


def set_limits(state: State, request: Request) -> None:
    """Set the request's max_new_tokens, or raise RequestError if it can never fit."""
    turn = request.turn
    most = turn.session.max_tokens if turn.session is not None else None
    request.max_new_tokens = resolve_max_new(state.resolved, request.submit, turn.next_prefill_len, most)


def enter_queue(state: State, request: Request) -> None:
    """Put a request into the waiting queue, or raise RequestError, with nothing changed, if it can never fit."""
    turn = request.turn
    if turn.session is not None:
        check_number(turn.session, request.submit.turn)
        check_known(turn.session, request.submit.known_len)
    set_limits(state, request)
    assert turn.session is None or turn.session.turn is None, turn.session
    state.enqueue(request)
    if turn.session is not None:
        turn.session.turn = turn.id
