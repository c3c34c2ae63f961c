"""Admission: who may leave the queue, and if nobody, why.

First come, first served. A request is let in when its whole prompt and the worst case of its rounds fit beside what
those already running were promised; nothing is taken yet. Called by the loop.
"""

from roost.kv.holdings import num_held
from roost.kv.lease import Lease
from roost.sched.request import Mark, Request
from roost.sched.state import State
from roost.session.table import Session


def admit(state: State) -> str:
    """Let in as many as fit; returns why the next one has to wait, or '' if none waits."""
    while state.queued:
        request = state.queued[0]
        reason = _no_place(state)
        if reason:
            return reason
        lease = state.sessions.find_lease(request.turn)
        reason = _no_pages(state, request, lease)
        if reason:
            state.sessions.refuse_lease(request.turn, lease, state.now)
            return reason
        state.sessions.begin(request.turn, lease)
        if request.cached_len < 0:
            request.cached_len = request.turn.cached_len
        request.row = state.rows.take()
        state.start_running(request)
        state.trace.note("admit", request.id, lease.settled_len, request.turn.prefill_len)
    return ""


def _no_place(state: State) -> str:
    if len(state.running) >= state.resolved.sched.max_running:
        return f"{len(state.running)} requests run: --max-running"
    if state.rows.num_free == 0:
        return "every free row is still named by a launched step"
    if any(request.mark is not Mark.NONE for request in state.running):
        return "a running request is being retracted or ended"
    return ""


def _no_pages(state: State, request: Request, lease: Lease) -> str:
    """Why a request does not fit beside the others; idle sessions make room where that is enough."""
    prefill_len = request.turn.next_prefill_len
    for book in range(len(state.resolved.books)):
        need = _charge(state, book, request, lease, prefill_len)
        promised = sum(_charge(state, book, each, each.lease, each.turn.prefill_len) for each in state.running)
        idle = [session for session in state.sessions.idle() if session.lease is not lease]
        spare = sum(num_held(state.store, _lease_of(session), book) for session in idle)
        if need + promised > _available(state, book) + spare:
            return f"book {book}: {need} pages needed, {_available(state, book) + spare - promised} not promised"
        for session in idle:
            if need + promised <= _available(state, book):
                break
            state.trace.note("reclaim", session.id)
            state.sessions.reclaim(session)
        if need + promised > _available(state, book):
            return f"book {book}: {need} pages needed, {_available(state, book) - promised} not promised"
    return ""


def _charge(state: State, book: int, request: Request, lease: Lease, prefill_len: int) -> int:
    """Pages a request may still need for its prompt and for the rounds that can be in flight."""
    resolved = state.resolved
    soon = max(prefill_len, lease.hi_len) + (1 + resolved.depth) * resolved.reserves[book]
    ever = resolved.length_to_fit(book, request.length_max)
    length = min(soon, ever)
    return max(0, resolved.pages_to_hold(book, length) - num_held(state.store, lease, book))


def _available(state: State, book: int) -> int:
    """Pages that are free, will be, or can be evicted."""
    ledger = state.store.ledger
    return ledger.num_free(book) + ledger.num_retiring(book) + state.store.tree.num_evictable(book)


def _lease_of(session: Session) -> Lease:
    assert session.lease is not None, session
    return session.lease
