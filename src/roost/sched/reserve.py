"""Reserve: finds KV pages for the next step, and preempts if it must, in the order that costs users least.

Evict cached pages, let go of spare states, reclaim idle sessions, count pages that are about to become free, and only
then preempt running requests: lowest priority first, then newest, no more than the shortfall. The first in line is
never preempted. Called by the planner.
"""

from collections.abc import Mapping, Sequence

from roost.kv.lease import Lease, StateKind
from roost.kv.ledger import OutOfPages
from roost.kv.page_counts import num_freed
from roost.kv.pages import BookId
from roost.sched.request import Mark, Request
from roost.sched.state import State


def reserve(
    state: State, request: Request, length: int, reserves: Sequence[int], states: Mapping[int, StateKind]
) -> bool:
    """Pages for `reserves[book]` positions past `length` in each book, and for states that the step keeps.

    False if the request sits this step out.
    """
    num_short = 0
    while num_short <= len(state.resolved.pools):  # each book can be short once
        try:
            state.store.reserve(request.lease, length, reserves, states)
            return True
        except OutOfPages as short:
            if not _free_up(state, request, short.book, short.need):
                break
            num_short += 1
    state.trace.note("sit_out", request.id)
    return False


def _free_up(state: State, request: Request, book: BookId, need: int) -> bool:
    """Try to have `need` free pages in a book now; otherwise preempt requests so that a later step has them."""
    ledger, tree = state.store.ledger, state.store.tree
    tree.evict(book, need - ledger.num_free(book))
    if book == state.store.state_book:
        _drop_lasting(state, book, need)
    for session in state.sessions.idle():
        if ledger.num_free(book) >= need:
            break
        state.trace.note("reclaim", session.id, book, need - ledger.num_free(book))
        state.sessions.reclaim(session)
        tree.evict(book, need - ledger.num_free(book))
    if ledger.num_free(book) >= need:
        return True
    _preempt_for(state, request, book, need)
    return False


def _drop_lasting(state: State, book: BookId, need: int) -> None:
    """Let go of states that are only kept for rewinds and the prefix cache: first those of idle sessions."""
    store, idle = state.store, state.sessions.idle()
    leases: list[Lease] = [each.lease for each in idle if each.lease is not None]
    for lease in [*leases, *(each.lease for each in state.running)]:
        if store.ledger.num_free(book) + store.ledger.num_retiring(book) >= need:
            return
        assert store.states is not None
        if store.states.drop_lasting(lease):
            state.trace.note("drop_states", str(lease.holder), need)


def _preempt_for(state: State, request: Request, book: BookId, need: int) -> None:
    """Mark the last in line, all of them behind this request, until what they free covers the need."""
    store = state.store
    missing = need - store.ledger.num_free(book) - store.ledger.num_retiring(book)
    leaving = [each.lease for each in state.running if each.mark is not Mark.NONE]
    newest_first = [each for each in reversed(state.running) if each.mark is Mark.NONE]
    newer = [each for each in newest_first if each.order > request.order]
    victims: list[Request] = []
    while newer and num_freed(store, leaving + [each.lease for each in victims], book) < missing:
        victims.append(newer.pop(0))
    for victim in list(victims):  # one that shares all it has with an older one may bring nothing
        others = [each for each in victims if each is not victim]
        if num_freed(store, leaving + [each.lease for each in others], book) >= missing:
            victims = others
    if num_freed(store, leaving + [each.lease for each in victims], book) < missing:
        return  # not even all of them would do: wait until older requests end
    for victim in victims:
        state.trace.note("preempt", victim.id, book, need)
        state.mark(victim, Mark.PREEMPT)
