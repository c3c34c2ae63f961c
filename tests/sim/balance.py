"""Final balance: what must hold once every request has ended, and again when the last session is closed.

No request, row or lease is left, the statistics add up, and every page is free or can be evicted. Called by the world.
"""

from roost.config.resolved import Resolved
from roost.sched.state import State
from tests.sim.checker import Broken, Checker


def check_all_ended(state: State, checker: Checker, resolved: Resolved) -> None:
    """Every request has ended and holds nothing; only idle sessions hold pages."""
    missing = [name for name, ask in checker.asks.items() if not ask.ended]
    if missing:
        raise Broken(f"terminal: {missing} never ended")
    if state.spec_counters.snapshot() != checker.spec_sum:
        raise Broken(f"statistics: requests make {checker.spec_sum}, the engine {state.spec_counters.snapshot()}")
    if state.rows.num_free != resolved.num_rows:
        raise Broken(f"rows: {state.rows.num_free} of {resolved.num_rows} came back")
    idle = {id(session.lease) for session in state.sessions.table.values() if session.lease}
    if {id(lease) for lease in state.store.leases.values()} != idle:
        raise Broken(f"leases: {list(state.store.leases.values())} are held, but not by idle sessions")


def check_all_free(state: State, checker: Checker, resolved: Resolved) -> None:
    """No session is left; all pages are free or in the prefix cache, and eviction frees those too."""
    if checker.conversations:
        raise Broken(f"close: {list(checker.conversations)} did not close")
    for book, spec in enumerate(resolved.pools):
        state.store.tree.evict(book, spec.num_pages)
    free = [state.store.ledger.num_free(book) for book in range(len(resolved.pools))]
    if free != [spec.num_pages - 1 for spec in resolved.pools] or state.store.tree.nodes:
        raise Broken(f"pool: {free} pages are free after everything ended")
