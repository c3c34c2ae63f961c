"""Waste: nothing is evicted, preempted or reserved beyond what the need at hand requires.

An eviction takes the least recently used pages, as many as are missing and at most one node too many. A preemption
takes no request that could be spared; nobody sits a step out who could be helped. An admitted request fits beside what
the running ones were promised. Reads the engine's state; never changes it.
"""

from collections.abc import Mapping, Sequence

from roost.config.resolved import Resolved
from roost.kv.lease import Lease, StateKind
from roost.kv.ledger import OutOfPages
from roost.kv.node import Node
from roost.kv.page_counts import num_cached, num_freed, num_held, num_own, num_pins, num_spare
from roost.kv.pages import ceil_div, floor_to
from roost.sched.request import Mark, Request
from roost.sched.state import State
from roost.sched.state_columns import NO_STATES
from roost.step import StepPlan
from tests.sim.checker import Broken


def pages_wanted(resolved: Resolved, request: Request, length: int, book: int) -> int:
    """Pages that a request of so many tokens may need for its prompt and for the rounds that can be in flight."""
    rounds = 2 if resolved.sched.overlap else 1
    most = resolved.length_to_fit(book, request.length_max)
    return resolved.pages_to_hold(book, min(length + rounds * resolved.reserve_of(book), most))


class Waste:
    """Watches what one engine takes away from requests, sessions and the cache."""

    def __init__(self, state: State) -> None:
        self._state, self._resolved = state, state.resolved
        self._short: OutOfPages | None = None  # the shortage that is being resolved
        self._asked: dict[int, list[int]] = {}  # by lease: the lengths, per book, that it last had room made for
        self._victims: list[Request] = []  # preempted for that
        self._watch_reserving()
        self._watch_evicting()

    # --- pages -------------------------------------------------------------------------------------------------

    def _watch_reserving(self) -> None:
        """Watch reservations: a lease gets exactly the pages for its lengths; note what is missing."""
        store = self._state.store
        reserve = store.reserve

        def watched(
            lease: Lease, length: int, reserves: Sequence[int], states: Mapping[int, StateKind] = NO_STATES
        ) -> None:
            lengths = [length + reserve for reserve in reserves]
            self._short, self._asked[lease.id] = None, lengths
            before = [len(pages) for pages in lease.pages]
            try:
                reserve(lease, length, reserves, states)
            except OutOfPages as short:
                self._short = short
                raise
            for end, had, pages in zip(lengths, before, lease.pages, strict=True):
                if len(pages) > max(had, ceil_div(end, store.page_size)):
                    raise Broken(f"reserve: {lease.holder} has {len(pages)} pages for {end} positions, had {had}")

        store.reserve = watched  # type: ignore[method-assign]

    def after_tick(self) -> None:
        """No lease keeps a window page that a continuation from its last whole page does not read, but the anchor."""
        store = self._state.store
        if store.window_book is None:
            return
        for lease in store.leases.values():
            if store.states is not None:
                self._check_states(lease)
                continue
            whole_len = floor_to(max(0, lease.settled_len - 1), store.page_size)
            first = store.books[store.window_book].first_needed(whole_len, store.page_size)
            if lease.evicted_len < first:
                raise Broken(f"window: {lease} keeps what lies before {first}")

    def _check_states(self, lease: Lease) -> None:
        """No more inputs are held than may have to be run again, and no more states than somebody may go on from."""
        store, replay_max = self._state.store, self._resolved.books[-1].window
        assert store.states is not None and replay_max is not None
        pool, size, collected = store.states.pool, store.page_size, store.ledger.collected
        proven = [at for at, state in lease.states.items() if state.step <= collected and at < lease.settled_len]
        last = max((*proven, *(at for at in lease.tree_states if at < lease.settled_len)), default=0)
        ends = [at for at, state in lease.states.items() if state.kind is StateKind.TURN_END and at < last]
        lasting = [state for state in lease.states.values() if state.kind is not StateKind.RUNNING]
        if len(lease.states) - len(lasting) > self._resolved.states_to_hold:
            raise Broken(f"states: {lease} keeps {len(lease.states)}")
        if not isinstance(lease.holder, str) or lease.last_step > collected:
            return
        assert store.window_book is not None
        num_inputs = num_own(store, lease, store.window_book)
        if num_inputs > ceil_div(replay_max + 1, size) + 3:
            raise Broken(f"inputs: {lease} keeps {num_inputs} pages of them")
        needed = {last, lease.rollback_state, max((at for at in proven if at % size == 0), default=0)}
        running = [at for at in (*lease.states, *lease.tree_states) if at < last and at not in needed]
        running = [at for at in running if at in lease.tree_states or lease.states[at].kind is StateKind.RUNNING]
        if running or len([at for at in ends if at not in needed]) > pool.num_turns:
            raise Broken(f"states: {lease} keeps {running or ends} for nothing")

    def _watch_evicting(self) -> None:
        """Watch evictions: least recently used first, and no node that could have stayed."""
        store = self._state.store
        evict, ledger, tree = store.tree.evict, store.ledger, store.tree

        def watched(book: int, count: int) -> None:
            if self._short is not None:
                missing = self._short.need - ledger.num_free(book)
                if book != self._short.book or count > max(0, missing):
                    raise Broken(f"evict: {count} pages of book {book} are asked for, {missing} are missing")
            before = {node.id: (node, num_cached(store, node, book)) for node in self._evictable(book)}
            evict(book, count)
            after = {node.id for node in tree.nodes.values() if num_cached(store, node, book)}
            self._check_evicted(book, count, [each for each in before.values() if each[0].id not in after], after)

        tree.evict = watched  # type: ignore[method-assign]

    def _evictable(self, book: int) -> list[Node]:
        """Unpinned nodes that hold pages of a book."""
        store = self._state.store
        nodes = store.tree.nodes.values()
        return [node for node in nodes if not num_pins(store, node, book) and num_cached(store, node, book)]

    def _check_evicted(self, book: int, count: int, gone: list[tuple[Node, int]], after: set[int]) -> None:
        if not gone:
            return
        freed, largest = sum(held for _, held in gone), max(held for _, held in gone)
        if count <= 0 or freed >= count + largest:
            raise Broken(
                f"evict: {freed} pages of book {book} go in nodes of at most {largest}, {count} were asked for"
            )
        newest = max(node.last_used for node, _ in gone)
        is_any = book in (self._state.store.window_book, self._state.store.state_book)  # not leaves alone
        left = [node for node in self._evictable(book) if node.id in after and (is_any or not node.children)]
        fresh = {node.parent.id for node, _ in gone if node.parent is not None}  # leaves only since their child went
        older = [node.id for node in left if node.last_used < newest and (is_any or node.id not in fresh)]
        if older:
            raise Broken(f"evict: nodes {older} stay, though they were used before {newest}")

    # --- preemptions ----------------------------------------------------------------------------------------------

    def preempted(self, request_id: str, book: int, need: int) -> None:
        """A request was marked for preemption, for as many pages as there is a need of; more may follow for it."""
        short = self._short
        if short is None or (short.book, short.need) != (book, need):
            raise Broken(f"preempt: {request_id} is preempted for {need} pages of book {book}, the need is {short}")
        self._victims.append(self._state.requests[request_id])

    def sits_out(self, request_id: str, is_injected: bool) -> None:
        """A request has no pages for this step: nothing could be evicted or reclaimed, and who should be is preempted.

        All preemptions for this need are known now: each is necessary, and together they suffice.
        """
        chosen, self._victims, short, self._short = self._victims, [], self._short, None
        assert short is not None
        state, book, need = self._state, short.book, short.need
        ledger, request = state.store.ledger, state.requests[request_id]
        missing = need - ledger.num_free(book) - ledger.num_retiring(book)
        idle = [session.id for session in state.sessions.idle() if session.lease is not None]
        is_spared = state.store.tree.num_evictable(book) > 0 or bool(idle)  # cached and idle pages go first
        if not is_injected and (ledger.num_free(book) >= need or (missing > 0 and is_spared)):
            raise Broken(f"sit out: {request_id} does, though pages of book {book} are free, cached or kept by {idle}")
        leaving = [each for each in state.running if each.mark is not Mark.NONE and each not in chosen]

        def brings(requests: list[Request]) -> int:
            return num_freed(state.store, [each.lease for each in leaving + requests], book)

        newer = [each for each in state.running if each.order > request.order and each not in leaving]
        if not chosen:
            if brings([]) < missing <= brings(newer):
                raise Broken(f"preempt: nobody is preempted for {request_id}, those behind it bring {missing} pages")
            return
        if brings(chosen) < missing:
            raise Broken(f"preempt: {[each.id for each in chosen]} bring {brings(chosen)} pages of {missing}: in vain")
        for victim in chosen:
            others = [each for each in chosen if each is not victim]
            behind = [each for each in state.running if each.order > victim.order and each not in leaving]
            if brings(others) >= missing:
                raise Broken(f"preempt: {victim.id} is preempted, the others bring {missing} pages without it")
            if brings(behind) >= missing:
                raise Broken(f"preempt: {victim.id} is preempted, those behind it would bring {missing} pages")

    # --- promises ----------------------------------------------------------------------------------------------

    def admitted(self) -> None:
        """A request was admitted: the worst case of all running requests fits into the available pages."""
        state = self._state
        idle = [session.lease for session in state.sessions.idle() if session.lease is not None]
        for book in range(len(self._resolved.pools)):
            ledger = state.store.ledger
            free = ledger.num_free(book) + ledger.num_retiring(book) + state.store.tree.num_evictable(book)
            spare = num_freed(state.store, idle, book)
            spare += sum(num_spare(state.store, each.lease, book) for each in state.running)
            wanted = sum(self._may_want(request, book) for request in state.running)
            if wanted > free + spare:
                names = [request.id for request in state.running]
                raise Broken(f"promise: {names} may need {wanted} pages of book {book}, {free + spare} are available")

    def _may_want(self, request: Request, book: int) -> int:
        """Pages that a request may need beyond those it holds, before one of its results is settled."""
        length = max(request.turn.prefill_len, request.lease.device_len_max)
        held = num_held(self._state.store, request.lease, book)
        return max(0, pages_wanted(self._resolved, request, length, book) - held)

    # --- steps -------------------------------------------------------------------------------------------------

    def launched(self, plan: StepPlan, requests: list[Request]) -> None:
        """Pages were reserved for exactly what the step writes."""
        for i, request in enumerate(requests):
            end, reserves = int(plan.device_lens_max[i] + plan.query_lens[i]), self._resolved.reserves
            needs = [end if plan.is_prefill[i] else int(plan.device_lens_max[i]) + reserve for reserve in reserves]
            if self._asked[request.lease.id] != needs:
                raise Broken(f"reserve: {request.id} had room made to {self._asked[request.lease.id]}, needs {needs}")
