"""Queue: how a turn gets in line, once its prompt is known.

The one place where a session is given to a turn; `end_turn` is the one where it is taken back. Called by intake, and by
ending for the next turn that waits.
"""

from roost.sched.fit import resolve_max_new
from roost.sched.request import Request
from roost.sched.state import State


def set_limits(state: State, request: Request) -> None:
    """Fill in how much output a request may have, or refuse it (RequestError) if it can never fit."""
    request.max_new_tokens = resolve_max_new(state.resolved, request.submit, request.turn.next_prefill_len)


def enter_queue(state: State, request: Request) -> None:
    """Put a request in line, or refuse it (RequestError) if it can never fit; nothing has changed then."""
    turn = request.turn
    set_limits(state, request)
    if turn.session is not None:
        assert turn.session.turn is None, turn.session
        turn.session.turn = turn.id
    state.enqueue(request)
