"""Report: the engine's statistics in one message, and the flush of the KV cache.

Statistics are read from the state and change nothing; the flush is refused while any request has not ended. Called by
intake.
"""

from roost.errors import RequestError
from roost.kv.page_counts import num_cached
from roost.messages import Flushed, PoolStats, Stats
from roost.sched.state import State


def stats(state: State) -> Stats:
    """The present state of the engine, and sums since its start."""
    totals, idle = state.totals, state.sessions.idle()
    return Stats(
        queued=len(state.requests) - len(state.running),
        running=len(state.running),
        sessions=len(state.sessions.table),
        waiting_for=state.waiting_for,
        steps=totals.steps,
        step_age_ms=(state.now - totals.last_step_at) // 1_000_000 if state.requests or state.in_flight else 0,
        prompt_tokens=totals.prompt_tokens,
        cached_tokens=totals.cached_tokens,
        completion_tokens=totals.completion_tokens,
        retractions=totals.preemptions,
        failed_steps=totals.failed_steps,
        endings=tuple(sorted(totals.endings.items())),
        pools=tuple(_pool(state, book) for book in range(len(state.resolved.pools))),
        spec=state.spec_counters.snapshot(),
        draft_lengths=tuple(totals.draft_lengths.get(number, 0) for number in range(state.resolved.spec.tokens)),
        sessions_resident=len(idle) + sum(request.turn.session is not None for request in state.running),
        session_tokens=sum(session.lease.settled_len for session in idle if session.lease is not None),
        sessions_opened=totals.sessions_opened,
        sessions_closed=totals.sessions_closed,
        sessions_expired=totals.sessions_expired,
        sessions_reclaimed=state.sessions.num_reclaimed,
        step_rows_max=state.step_limits.rows.most,
        step_tokens_max=state.step_limits.tokens.most,
    )


def _pool(state: State, book: int) -> PoolStats:
    """Pages of a book by account, without the null page."""
    ledger, tree = state.store.ledger, state.store.tree
    pool, free, retiring = state.resolved.pools[book], ledger.num_free(book), ledger.num_retiring(book)
    total, cached = pool.num_pages - 1, sum(num_cached(state.store, node, book) for node in tree.nodes.values())
    return PoolStats(
        book=pool.name,
        total=total,
        free=free,
        leased=total - free - retiring - cached,
        cached=cached,
        retiring=retiring,
    )


def flush(state: State) -> Flushed:
    """Empty the KV cache: idle sessions lose their KV and keep their tokens."""
    if state.requests or state.in_flight:
        out = f"{len(state.requests)} requests have not ended, {len(state.in_flight)} steps are in flight"
        raise RequestError(409, "flush_cache", out)
    ledger, tree = state.store.ledger, state.store.tree
    before = _num_free(state)
    for session in state.sessions.idle():
        state.sessions.reclaim(session)
    for book, pool in enumerate(state.resolved.pools):
        tree.evict(book, pool.num_pages - ledger.num_free(book))
    return Flushed(num_pages=_num_free(state) - before)


def _num_free(state: State) -> int:
    return sum(state.store.ledger.num_free(book) for book in range(len(state.resolved.pools)))
