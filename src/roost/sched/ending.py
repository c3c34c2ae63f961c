"""Ending: how a request leaves the engine, or, preempted, goes back to the queue.

Every ending goes through the session table's `end_turn`, gives the row back and sends exactly one terminal event.
Called by settle for what ran, and by intake for turns that only waited.
"""

from roost.errors import CapacityError, RequestError
from roost.messages import Finished, Refused, SessionClosed, Usage
from roost.sched.journaling import drop_moved, write_closed, write_turn
from roost.sched.queue import AlreadyCommitted, enter_queue
from roost.sched.request import Mark, Request
from roost.sched.sessions import became_idle
from roost.sched.state import State
from roost.session.journal import JournalError, SessionMoved
from roost.session.table import Outcome, Session


def finish(state: State, request: Request, reason: str, returned_len: int, matched: int | str | None = None) -> None:
    """The request is complete: `returned_len` tokens of its record are what the client has."""
    completion = returned_len - request.turn.prompt_len
    try:
        write_turn(state, request.turn, returned_len, _usage(request, completion), request.submit.note)
    except (SessionMoved, JournalError) as error:
        _end(state, request, Outcome.ROLLBACK, "error", completion, 0, refusal=error)
        return
    _end(state, request, Outcome.COMMIT, reason, completion, returned_len, matched=matched)


def abort(state: State, request: Request, reason: str, message: str = "") -> None:
    """The request stops where it is; nothing of it stays in its session."""
    _end(state, request, Outcome.ROLLBACK, reason, request.output_len, 0, message)


def suspend(state: State, request: Request) -> None:
    """Preempt the request: it loses its pages, keeps its tokens and waits in the queue to go on."""
    state.trace.note("suspend", request.id, request.lease.settled_len)
    state.totals.preemptions += 1
    _leave_row(state, request)
    state.running.remove(request)
    state.sessions.end_turn(request.turn, Outcome.SUSPEND, state.now)
    request.mark = Mark.NONE
    state.enqueue(request)


def refused(name: str, error: RequestError | CapacityError) -> Refused:
    """The answer to what cannot be done."""
    param = error.param if isinstance(error, RequestError) else ""
    usage = error.usage if isinstance(error, AlreadyCommitted) else None
    return Refused(request_id=name, status=error.status, message=str(error), param=param, usage=usage)


def drop(state: State, request: Request, error: RequestError) -> None:
    """Refuse a request that was accepted and waited, but never ran."""
    _forget(state, request)
    state.send(request, refused(request.id, error))
    start_followers(state, request)  # what they waited for will not come


def start_followers(state: State, request: Request) -> None:
    """Requests that share this one's prompt need not wait longer: it is in the tree, or will not come there."""
    for follower in request.followers:
        follower.leader = None
        state.enqueue(follower)
    request.followers.clear()


def close_if_free(state: State, session: Session) -> None:
    """Close a session that is closing, once no turn has it."""
    if session.closing and session.turn is None:
        state.totals.sessions_closed += 1
        error = write_closed(state, session)
        state.sessions.close(session)
        answer = SessionClosed(session_id=session.name) if error is None else refused(session.name, error)
        state.tell(state.close_replies.pop(session.id), answer)


def _end(
    state: State,
    request: Request,
    outcome: Outcome,
    reason: str,
    completion: int,
    returned_len: int,
    message: str = "",
    matched: int | str | None = None,
    refusal: SessionMoved | JournalError | None = None,
) -> None:
    turn, usage = request.turn, _usage(request, completion)
    state.trace.note("end_" + reason, request.id, completion)
    if request.row is not None:
        _leave_row(state, request)
        state.running.remove(request)
    elif request.leader is not None:
        request.leader.followers.remove(request)
    elif request in state.queued:
        state.queued.remove(request)
    elif turn.session is not None:
        turn.session.waiting.remove(turn.id)
    state.sessions.end_turn(turn, outcome, state.now, returned_len, usage, request.submit.note)
    _forget(state, request)
    if refusal is None:
        _tell_end(state, request, reason, usage, message, matched)
    else:
        state.trace.note("journal", str(refusal))
        state.send(request, refused(request.id, refusal))
    start_followers(state, request)
    if turn.session is None:
        return
    if isinstance(refusal, SessionMoved):
        _lose(state, turn.session, refusal)
        return
    close_if_free(state, turn.session)
    _start_waiting(state, turn.session)
    became_idle(state, turn.session)


def _usage(request: Request, completion: int) -> Usage:
    turn, cached_len = request.turn, max(0, request.cached_len)
    waited = turn.session is not None and turn.session.turn != turn.id  # its history was not final yet
    prompt_len = len(turn.input_tokens) if waited else turn.full_prompt_len
    return Usage(prompt_tokens=prompt_len, cached_tokens=cached_len, completion_tokens=completion)


def _tell_end(
    state: State, request: Request, reason: str, usage: Usage, message: str, matched: int | str | None
) -> None:
    finished = Finished(
        request_id=request.id,
        reason=reason,
        usage=usage,
        max_new_tokens=request.max_new_tokens,
        spec=request.spec_counters.snapshot(),
        message=message,
        matched=matched,
        prompt_logprobs_from=request.prompt_logprobs_from,
    )
    totals = state.totals
    totals.prompt_tokens += usage.prompt_tokens
    totals.cached_tokens += usage.cached_tokens
    totals.endings[reason] = totals.endings.get(reason, 0) + 1
    state.send(request, finished)


def _lose(state: State, session: Session, moved: SessionMoved) -> None:
    """Another engine owns the session: whoever waits for it here is told so."""
    for turn in session.waiting:
        drop(state, state.turns[turn], moved)
    session.waiting.clear()
    if session.closing:
        state.tell(state.close_replies.pop(session.id), refused(session.name, moved))
    drop_moved(state, session)


def _leave_row(state: State, request: Request) -> None:
    assert request.row is not None, request.id
    state.rows.give_back(request.row, request.lease.last_step, state.store.ledger.collected)
    request.row = None


def _forget(state: State, request: Request) -> None:
    del state.requests[request.id]
    del state.turns[request.turn.id]


def _start_waiting(state: State, session: Session) -> None:
    """The next turn that waits for a free session enters the queue, now that its prompt is known."""
    while session.waiting and session.turn is None:
        request = state.turns[session.waiting.popleft()]
        try:
            enter_queue(state, request)
        except RequestError as error:
            drop(state, request, error)
