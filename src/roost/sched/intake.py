"""Intake: checks each command and carries it out, or refuses it.

A new request is queued, an abort is marked for settle, session commands and questions are answered at once. A refusal
is always answered and affects no other request. A request is registered last, when nothing can fail any more. Never
moves a page. Called by the loop while it drains the mailbox.
"""

import traceback
from pathlib import Path

from roost.clients import scoped
from roost.config.resolved import Resolved
from roost.draft_length.lookups import RowDrafts
from roost.errors import CapacityError, RequestError
from roost.grammar.build import NO_GRAMMARS
from roost.kv.lease import TurnId
from roost.messages import (
    Abort,
    CloseSession,
    Command,
    CompileGrammar,
    FlushCache,
    ForkSession,
    Frame,
    GetFrame,
    GetHistory,
    GetPages,
    GetSession,
    GetSessions,
    GetStats,
    GrammarCompiled,
    OpenSession,
    Refused,
    Reply,
    RewindSession,
    SessionClosed,
    SessionStates,
    Stats,
    Submit,
)
from roost.sched.client_limits import check_priority, check_queued
from roost.sched.consistency import check_consistent
from roost.sched.counters import SpecCounters
from roost.sched.ending import close_if_free, drop, refused
from roost.sched.fit import resolve_max_new
from roost.sched.journaling import discard_damaged, find_session
from roost.sched.live import frame, page_map, stop
from roost.sched.queue import check_number, enter_queue, set_limits
from roost.sched.report import flush, stats
from roost.sched.request import Mark, Request, StopStringFinder
from roost.sched.sessions import (
    TOKENS_MAX,
    fork_session,
    open_session,
    rewind_session,
    session_history,
    session_state,
    session_states,
)
from roost.sched.settle import act_on_marks
from roost.sched.state import State
from roost.session.record import Record
from roost.session.table import Session, Turn
from roost.values import fitted, shown

LOGPROBS_MAX = 100  # alternatives with each log-probability
PRIORITY_MAX = 2**31 - 1
TIMEOUT_MS_MAX = 2**40
STOPS_MAX = 64
STOP_LEN_MAX = 1024
STOP_IDS_MAX = 1024


def handle_command(state: State, command: Command, reply: Reply, read_by: int | None = None) -> None:
    """Carry out or refuse one command; past `read_by` its sender no longer waits, so it is refused.

    A command that fails unexpectedly is answered with 500, and the loop goes on if nothing was left half done.
    """
    try:
        if read_by is not None and state.now > read_by:
            raise CapacityError(503, "the engine was busy for too long: the command was not carried out")
        if not isinstance(command, Command):
            raise RequestError(400, "command", f"must be a command that the engine knows, got {shown(command)}")
        _carry_out(state, fitted(command), reply)
    except (RequestError, CapacityError) as error:
        state.tell(reply, refused(_name(command), error))
    except Exception as error:  # noqa: BLE001 (other requests go on if nothing was left half done)
        *_, place = traceback.extract_tb(error.__traceback__)
        what = f"{type(command).__name__}: {error!r} at {Path(place.filename).name}:{place.lineno}"
        state.trace.note("broken_command", what)
        check_consistent(state)
        state.tell(reply, Refused(request_id=_name(command), status=500, message=f"the engine failed on {what}"))


def _carry_out(state: State, command: Command, reply: Reply) -> None:
    match command:
        case Submit():
            _submit(state, command, reply)
        case Abort():
            _abort(state, command)
        case OpenSession():
            state.tell(reply, open_session(state, command))
        case CloseSession():
            _close(state, command, reply)
        case RewindSession():
            _end_aborted(state, command)
            state.tell(reply, rewind_session(state, command))
        case ForkSession():
            _end_aborted(state, command)
            state.tell(reply, fork_session(state, command))
        case GetSession():
            session = find_session(state, command.session_id, command.client, may_close=True)
            state.tell(reply, session_state(state, session))
        case GetHistory():
            session = find_session(state, command.session_id, command.client)
            state.tell(reply, session_history(state, session))
        case GetSessions():
            state.tell(reply, SessionStates(sessions=session_states(state, command.client)))
        case FlushCache():
            state.tell(reply, flush(state))
        case GetStats() | GetFrame() | GetPages():
            state.tell(reply, _looked_at(state, command))
        case CompileGrammar():
            _start_compiling(state, command, reply)


def _looked_at(state: State, command: GetStats | GetFrame | GetPages) -> Stats | Frame:
    """What an operator asks for."""
    if isinstance(command, GetFrame):
        return frame(state, is_whole=command.whole) if command.watching else stop(state)
    return stats(state) if isinstance(command, GetStats) else page_map(state)


def _name(command: Command) -> str:
    match command:
        case Submit() | Abort():
            name: object = command.request_id
        case OpenSession() | CloseSession() | RewindSession() | ForkSession() | GetSession() | GetHistory():
            name = command.session_id
        case _:
            name = ""
    return name if isinstance(name, str) else ""  # an id that is no string is why it is refused


def check_alone(resolved: Resolved, submit: Submit) -> None:
    """Raise RequestError for a request without a session that could never be served, whatever the load."""
    submit = fitted(submit)
    _check_values(submit, None, resolved.vocab_size)
    resolve_max_new(resolved, submit, len(submit.tokens))


def _submit(state: State, submit: Submit, reply: Reply) -> None:
    if state.stopping:
        raise CapacityError(503, "the engine is stopping")
    if submit.request_id in state.requests:
        raise RequestError(409, "request_id", f"{submit.request_id!r} is in use by a request that has not ended")
    session = find_session(state, submit.session_id, submit.client) if submit.session_id is not None else None
    _check_values(submit, session, state.resolved.vocab_size)
    check_priority(state, submit)
    if session is not None:
        check_number(session, submit.turn)
    if submit.stop and state.new_stop_finder is None:
        raise RequestError(400, "stop", "this engine has no tokenizer: only stop_token_ids are supported")
    if submit.grammar and state.start_compiling is None:
        raise RequestError(400, "grammar", NO_GRAMMARS)
    if len(state.requests) - len(state.running) >= state.resolved.sched.max_queued:
        raise CapacityError(429, f"the queue is full: --max-queued {state.resolved.sched.max_queued}")
    check_queued(state, submit.client)
    state.num_arrived += 1
    request = Request(
        submit=submit,
        turn=Turn(
            id=TurnId(state.num_arrived),
            scoped_salt=session.scoped_salt if session else scoped(submit.client, submit.cache_salt),
            session=session,
            record=session.record if session else Record(),
            input_tokens=submit.tokens,
        ),
        reply=reply,
        arrival=state.num_arrived,
        spec_counters=SpecCounters(accept_max=state.resolved.spec.accept_max),
        drafts=RowDrafts(),
        max_new_tokens=submit.max_new_tokens or 0,
        stop_finder=_stop_finder(state, submit),
        deadline=None if submit.timeout_ms is None else state.now + submit.timeout_ms * 1_000_000,
        prompt_logprobs_next=submit.prompt_logprobs_from,
        prompt_logprobs_from=submit.prompt_logprobs_from,
    )
    leader = state.requests.get(submit.shares_with) if submit.shares_with is not None else None
    if session is not None and session.turn is not None:
        _wait_for(state, session, request)
    elif leader is not None and not leader.output_len:
        set_limits(state, request)
        request.leader = leader
        leader.followers.append(request)
    else:
        enter_queue(state, request)
    state.requests[request.id] = request
    state.turns[request.turn.id] = request


def _stop_finder(state: State, submit: Submit) -> StopStringFinder | None:
    """What looks for the request's stop strings in its output; None if it has none."""
    if not submit.stop or state.new_stop_finder is None:
        return None
    return state.new_stop_finder(submit.stop, submit.stop_in_special)


def _wait_for(state: State, session: Session, request: Request) -> None:
    """Wait for a busy session if the caller asked to, or if all turns before it were aborted and are about to end."""
    assert session.turn is not None
    is_next = all(state.turns[turn].mark is Mark.ABORT for turn in (session.turn, *session.waiting))
    if not request.submit.queue and not is_next:
        raise RequestError(
            409, "session_id", f"session {session.name!r} has a turn that has not ended (queue: true waits)"
        )
    session.waiting.append(request.turn.id)


def _check_values(submit: Submit, session: Session | None, vocab_size: int) -> None:
    least = {"max_new_tokens": submit.max_new_tokens, "min_new_tokens": submit.min_new_tokens, "turn": submit.turn}
    for param, value in least.items():
        if value is not None and value < 0:
            raise RequestError(400, param, f"must be at least 0, got {value}")
    most = submit.max_new_tokens if submit.max_new_tokens is not None else TOKENS_MAX
    _check_range("min_new_tokens", submit.min_new_tokens, 0, most)
    submit.sampling.check(vocab_size)
    _check_range("logprobs", submit.num_top_logprobs, 0, LOGPROBS_MAX)
    known_len = len(session.record) if session is not None else 0  # a turn that runs now may still add to it
    prompt_len = len(submit.tokens) + known_len
    _check_range("logprob_start_len", submit.prompt_logprobs_from, 0, prompt_len)
    _check_range("priority", submit.priority, -PRIORITY_MAX, PRIORITY_MAX)
    _check_range("timeout", submit.timeout_ms, 1, TIMEOUT_MS_MAX)
    if len(submit.stop) > STOPS_MAX or not all(0 < len(text) <= STOP_LEN_MAX for text in submit.stop):
        raise RequestError(400, "stop", f"at most {STOPS_MAX} texts of 1 to {STOP_LEN_MAX} characters")
    if len(submit.stop_token_ids) > STOP_IDS_MAX:
        raise RequestError(400, "stop_token_ids", f"at most {STOP_IDS_MAX}, got {len(submit.stop_token_ids)}")
    if session is not None and submit.shares_with is not None:
        raise RequestError(400, "n", "a turn of a session has one output")
    _check_session_values(submit, session, vocab_size)


def _check_range(param: str, value: int | None, least: int, most: int) -> None:
    if value is not None and not least <= value <= most:
        raise RequestError(400, param, f"must be in [{least}, {most}], got {value}")


def _check_session_values(submit: Submit, session: Session | None, vocab_size: int) -> None:
    if not submit.tokens and (session is None or (len(session.record) == 0 and session.turn is None)):
        raise RequestError(400, "tokens", "must hold at least 1 token")
    if submit.tokens and not 0 <= min(submit.tokens) <= max(submit.tokens) < vocab_size:
        raise RequestError(400, "tokens", f"ids must be in [0, {vocab_size - 1}]")
    if any(not 0 <= token < vocab_size for token in submit.stop_token_ids):
        raise RequestError(400, "stop_token_ids", f"ids must be in [0, {vocab_size - 1}]")
    if session is not None and submit.cache_salt not in ("", session.cache_salt):
        raise RequestError(400, "cache_salt", f"session {session.name!r} was opened with another salt, which is fixed")
    if session is None and submit.queue:
        raise RequestError(400, "queue", "only a turn of a session can wait for the session")
    if session is None and submit.turn is not None:
        raise RequestError(400, "turn", "only a turn of a session has a number")


def _start_compiling(state: State, command: CompileGrammar, reply: Reply) -> None:
    """Have a grammar compiled; whoever does so answers."""
    if state.start_compiling is None:
        raise RequestError(400, "grammar", NO_GRAMMARS)

    def done(error: RequestError | CapacityError | None) -> None:
        state.tell(reply, GrammarCompiled() if error is None else refused("", error))

    state.start_compiling(command.grammar, done)


def _abort(state: State, abort: Abort) -> None:
    request = state.requests.get(abort.request_id)
    if request is None:
        raise RequestError(404, "request_id", f"no request {abort.request_id!r} is queued or running")
    state.mark(request, Mark.ABORT)


def _end_aborted(state: State, command: RewindSession | ForkSession) -> None:
    """End aborted turns now, so that they are not in the way of a command that follows the abort."""
    find_session(state, command.session_id, command.client)  # raises if it is closing
    act_on_marks(state, Mark.ABORT)


def _close(state: State, close: CloseSession, reply: Reply) -> None:
    if discard_damaged(state, close.session_id, close.client):
        state.tell(reply, SessionClosed(session_id=close.session_id))
        return
    session = find_session(state, close.session_id, close.client)
    session.closing = True
    state.close_replies[session.id] = reply
    for turn in session.waiting:
        drop(state, state.turns[turn], RequestError(410, "session_id", f"session {session.name!r} is closing"))
    session.waiting.clear()
    if session.turn is not None:
        state.mark(state.turns[session.turn], Mark.ABORT)
    close_if_free(state, session)
