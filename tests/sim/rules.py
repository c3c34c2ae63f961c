"""Rules: what must hold of the queue, of followers, rows and pages, whatever the clients do.

The order is by priority, then by arrival. No request starts while one before it waits, except a few that need fewer
pages or whose client has fewer running. The rows of a step are in order; the first request is never preempted. Whoever
starts is told so once, before all else. A follower starts once its leader has its first token or has ended, and then
finds the leader's pages. Reads the engine's state; never changes it.
"""

from collections import Counter

from roost.clients import scoped
from roost.config.options import SHARED_LOOKUP
from roost.config.resolved import Resolved
from roost.kv.lease import Lease
from roost.kv.ledger import describe, leased
from roost.kv.node import Key
from roost.kv.page_counts import num_freed
from roost.kv.pages import NULL_PAGE, PageId, floor_to
from roost.messages import Begun, Event, Finished, PromptLogprobs, Refused, Tokens
from roost.sched.admission import OVERTAKEN_MAX
from roost.sched.request import Mark, Request
from roost.sched.state import State
from roost.sched.step_limits import PATIENCE
from roost.step import RowSetup, StepPlan, StepResult
from tests.sim.checker import Ask, Broken, Checker
from tests.sim.width_rules import WidthRules

Named = list[tuple[Request, Lease, int]]  # who a step's rows belong to: request, lease, epoch


class Rules:
    """Watches one engine."""

    def __init__(self, state: State, checker: Checker, resolved: Resolved) -> None:
        self._state, self._checker, self._resolved = state, checker, resolved
        self._widths = WidthRules(state)
        self._begins: set[str] = set()  # requests whose row the device has not been told of
        self._has_run: set[str] = set()  # requests that were ever admitted
        self._committed: dict[str, tuple[int, int]] = {}  # who shares: (length in the tree, evictions then)
        self._shared_at_start: dict[str, int] = {}
        self._frontiers: dict[str, int] = {}  # who lost its lease: where its window began then
        self._published: dict[
            str, tuple[int, int]
        ] = {}  # who lost its lease: (length kept in the tree, evictions then)
        self.num_evictions = 0
        self.out: dict[int, Named] = {}  # steps in flight
        self._proven: dict[int, int] = {}  # by lease: the length that results have shown
        self._kept_states: dict[int, set[int]] = {}  # by lease: where steps of its turn have kept a state
        self._overtaken: Counter[str] = Counter()  # how often somebody behind started first
        self._num_too_large = 0  # steps that broke for their size
        self._watch_publishing()

    def _order(self, request: Request) -> tuple[int, int]:
        return self._checker.asks[request.id].order

    # --- queue -------------------------------------------------------------------------------------------------

    def admitted(self, request_id: str, settled_len: int) -> None:
        """A request was admitted: none that still waits comes before it, and its leader has published its prompt."""
        ask, request = self._checker.asks[request_id], self._state.requests[request_id]
        before = [
            each
            for each in self._state.queued
            if self._order(each) < ask.order and not self._is_full(each.submit.client, request)
        ]
        self._check_overtaken(request, [each for each in before if not self._runs_more(each, request)])
        leader = self._checker.asks.get(ask.submit.shares_with or "")
        if leader is not None:
            self._check_follower(ask, leader, settled_len)
        self._check_found(request_id, settled_len)
        self._checker.admitted(ask, settled_len)
        self._begins.add(request_id)
        self._has_run.add(request_id)
        self._shared_at_start[request_id] = request.lease.shared_len
        lease = request.lease
        self._kept_states[lease.id] = set()
        self._proven[lease.id] = min(self._proven.get(lease.id, lease.settled_len), lease.settled_len)

    def _runs_more(self, waiting: Request, newest: Request) -> bool:
        """Whether the client of one that waits ran more than the newest's did, which goes first then."""
        clients = [each.submit.client for each in self._state.running if each is not newest]
        is_equal = waiting.submit.priority == newest.submit.priority
        return (
            bool(self._resolved.clients)
            and is_equal
            and clients.count(waiting.submit.client) > clients.count(newest.submit.client)
        )

    def _check_overtaken(self, newest: Request, before: list[Request]) -> None:
        """Only a request that waits for pages and never ran is overtaken, by its equals, and a few times at most."""
        if not before:
            return
        refusal = self._state.last_refusal
        for each in before:
            self._overtaken[each.id] += 1
        if (
            refusal is None
            or refusal.turn not in {each.turn.id for each in self._state.queued}
            or any(each.turn.started or each.submit.priority != newest.submit.priority for each in before)
            or any(self._overtaken[each.id] > OVERTAKEN_MAX for each in before)
        ):
            raise Broken(f"order: {newest.id} starts before {[each.id for each in before]}")

    def _is_full(self, client: str, newest: Request) -> bool:
        """Whether a client had as many running as it may before the newest started."""
        most = self._resolved.clients[client].running if client in self._resolved.clients else None
        running = [each for each in self._state.running if each.submit.client == client and each is not newest]
        return most is not None and len(running) >= most

    def told(self, ask: Ask, event: Event) -> None:
        """Whoever runs is told so once and first, with the numbers of its usage; who asked for that shares commits."""
        name, begun = ask.submit.request_id, ask.begun
        match event:
            case Begun():
                if begun is not None or name not in self._has_run or event.prompt_tokens != len(ask.prompt):
                    raise Broken(f"begun: {name} of {len(ask.prompt)} tokens got {event}, before it {begun}")
                ask.begun = event
            case Tokens() | PromptLogprobs() if begun is None:
                raise Broken(f"begun: {name} got {event} before it was told that it runs")
            case Finished():
                numbers = (event.usage.prompt_tokens, event.usage.cached_tokens)
                if (begun is not None) != (name in self._has_run):
                    raise Broken(f"begun: {name} has run or not, it was told {begun}")
                if begun is not None and numbers != (begun.prompt_tokens, begun.cached_tokens):
                    raise Broken(f"begun: {name} was told {begun}, then {event.usage}")
                if event.reason in ("stop", "length") and ask.conversation is not None and ask.conversation.shares:
                    self._shares(ask.conversation.id)
            case Refused():
                self._refused(ask, event)

    def _shares(self, session_id: str) -> None:
        """A turn was committed in a session that shares: its whole pages are in the tree, as far as they are proven."""
        session, store = self._state.sessions.table[session_id], self._state.store
        if session.lease is None:
            return
        known_len = min(session.lease.proven_len, len(session.record) - self._resolved.spec.pair)
        if session.lease.shared_len < floor_to(max(0, known_len), store.page_size):
            raise Broken(f"shares: {session_id} has committed {known_len} tokens and shares {session.lease.shared_len}")
        self._committed[session_id] = (session.lease.shared_len, self.num_evictions)

    def _refused(self, ask: Ask, event: Refused) -> None:
        """A request too many of its client: as many as it may have wait; checked while that is so."""
        if event.status == 429 and "this key" in event.message:
            limits = self._resolved.clients[ask.submit.client]
            waiting = [each for each in self._state.requests.values() if each.submit.client == limits.name]
            if sum(each not in self._state.running for each in waiting) < (limits.queued or 0):
                raise Broken(f"limit: {ask.submit.request_id} got {event}, {len(waiting)} have not ended: {limits}")

    def _check_clients(self) -> None:
        """No client exceeds its limits; a preempted request waits again in any case."""
        state = self._state
        for client, limits in self._resolved.clients.items():
            own = [each for each in state.requests.values() if each.submit.client == client]
            counts = {
                "running": sum(each in state.running for each in own),
                "queued": sum(each.row is None and not each.turn.started for each in own),
                "sessions": sum(session.client == client for session in state.sessions.table.values()),
            }
            most = {"running": limits.running, "queued": limits.queued, "sessions": limits.sessions}
            for what, count in counts.items():
                bound = most[what]
                if bound is not None and count > bound:
                    raise Broken(f"limit: {client} has {count} {what}, it may have {bound}")

    def _check_follower(self, ask: Ask, leader: Ask, settled_len: int) -> None:
        name, leader_name = ask.submit.request_id, leader.submit.request_id
        if leader.ended:
            return
        if not leader.output:
            raise Broken(f"follower: {name} starts before {leader_name} has shared its prompt")
        running = self._state.requests[leader_name].row is not None
        unlimited = ask.submit.prompt_logprobs_from is None and all(
            book.window is None for book in self._resolved.books
        )
        same = (
            leader.conversation is None
            and ask.submit.tokens == leader.submit.tokens
            and ask.submit.cache_salt == leader.submit.cache_salt
            and ask.submit.client == leader.submit.client
        )
        if running and unlimited and same and not leader.disturbed:
            least = floor_to(len(ask.submit.tokens) - 1, self._resolved.page_size)
            if settled_len < least:
                raise Broken(f"sharing: {name} finds {settled_len} tokens, {leader_name} runs on {least} of them")

    def preempted(self, victim: str, book: int, need: int) -> None:
        """A preemption must be needed: free and retiring pages do not suffice; the first request is never preempted."""
        state = self._state
        leaving = [each.lease for each in state.running if each.mark is not Mark.NONE]
        coming = num_freed(state.store, leaving, book)
        ledger = state.store.ledger
        if ledger.num_free(book) + ledger.num_retiring(book) + coming >= need:
            raise Broken(f"preempt: {victim} is preempted, but {need} pages of book {book} are free or coming")
        if min(state.running, key=self._order).id == victim:
            raise Broken(f"preempt: {victim} is the first running request")

    def after_tick(self) -> None:
        """Every request that has not ended is in one place, the queue is in order, nobody is past its deadline."""
        state, checker = self._state, self._checker
        open_asks = {name: ask for name, ask in checker.asks.items() if not ask.ended}
        if set(open_asks) != set(state.requests):
            raise Broken(f"places: {set(open_asks) ^ set(state.requests)} are known to one side only")
        for name, ask in open_asks.items():
            if ask.deadline is not None and checker.now >= ask.deadline:
                raise Broken(f"deadline: {name} goes on after its time is up")
        for line in (state.queued, state.running):
            if line != sorted(line, key=self._order):
                raise Broken(f"order: {[each.id for each in line]} is not in order")
        for request in state.requests.values():
            self._check_place(request)
        self._check_clients()
        most = self._resolved.session.max_resident_tokens
        kept = sum(lease.settled_len for lease in state.store.leases.values() if isinstance(lease.holder, str))
        if most is not None and kept > most:
            raise Broken(f"limit: idle sessions keep {kept} tokens, {most} are allowed")

    def _check_place(self, request: Request) -> None:
        state, session, leader = self._state, request.turn.session, request.leader
        places = [each for each in (state.running, state.queued, leader.followers if leader else []) if request in each]
        waits = session is not None and request.turn.id in session.waiting
        if len(places) + waits != 1 or (request.row is not None) != (request in state.running):
            raise Broken(f"places: {request.id} is in {len(places) + waits} places, row {request.row}")
        if leader is not None:
            ask = self._checker.asks[leader.id]
            if ask.ended or ask.output:
                raise Broken(f"follower: {request.id} waits for {leader.id}, which has shared its prompt or ended")

    # --- plans -------------------------------------------------------------------------------------------------

    def launched(self, plan: StepPlan, named: Named) -> None:
        """Rows are in order, and each row that begins is set up as asked."""
        requests = [request for request, _, _ in named]
        if requests != sorted(requests, key=self._order):
            raise Broken(f"order: step {plan.step} has rows for {[each.id for each in requests]}")
        rows = {request.row: request for request in requests}
        begin = {request.row for request in requests if request.id in self._begins}
        if sorted(setup.row for setup in plan.setups) != sorted(row for row in begin if row is not None):
            raise Broken(f"setup: step {plan.step} sets up {[each.row for each in plan.setups]}, {begin} begin")
        for setup in plan.setups:
            self._check_setup(self._checker.asks[rows[setup.row].id], setup)
        self._begins -= {request.id for request in requests}
        self._widths.check(plan, requests)
        self._check_size(plan)

    def _check_size(self, plan: StepPlan) -> None:
        """A step keeps to the engine's step limits; one row is always allowed."""
        limits, num_tokens = self._state.step_limits, int(plan.query_lens.sum())
        most = [(limits.rows.most, len(plan.rows)), (limits.tokens.most, num_tokens)]
        if len(plan.rows) > 1 and any(limit is not None and size > limit for limit, size in most):
            raise Broken(f"size: step {plan.step} has {len(plan.rows)} rows and {num_tokens} tokens, allowed: {limits}")

    def broke_for_size(self) -> None:
        """A step was too large for the device: learning that may cost a few steps, and few more over time."""
        sched, spec = self._resolved.sched, self._resolved.spec
        self._num_too_large += 1
        widest = self._resolved.chunk + sched.max_running * spec.tokens
        tries = (self._state.totals.steps // PATIENCE + 1).bit_length()
        if self._num_too_large > widest.bit_length() + tries:
            raise Broken(
                f"size: {self._num_too_large} steps were too large, after {self._state.totals.steps} good ones"
            )

    def _check_setup(self, ask: Ask, setup: RowSetup) -> None:
        submit, prompt = ask.submit, ask.prompt
        needs_tokens = submit.sampling.penalises or self._resolved.spec.reads_history or submit.grammar
        tokens = prompt + ask.output if needs_tokens else []
        told = (
            setup.sampling,
            setup.prompt_len,
            setup.min_len,
            set(setup.stop_ids),
            setup.tokens.tolist(),
            setup.grammar,
            setup.scope,
        )
        scope = self._scoped_salt(ask) if self._resolved.lookup == SHARED_LOOKUP else None
        least = len(prompt) + submit.min_new_tokens
        if told != (submit.sampling, len(prompt), least, set(submit.stop_token_ids), tokens, submit.grammar, scope):
            raise Broken(f"setup: {submit.request_id} is set up as {setup}, its tokens are {tokens}, scope {scope}")

    def _scoped_salt(self, ask: Ask) -> str:
        """With whom a request shares: its client's, and of its session's salt."""
        salt = ask.conversation.cache_salt if ask.conversation is not None else ask.submit.cache_salt
        return scoped(ask.submit.client, salt)

    # --- pages -------------------------------------------------------------------------------------------------

    def collected(self, named: Named, plan: StepPlan, result: StepResult) -> None:
        """A step succeeded: what it reports is written now, and so is what ended epochs counted on."""
        if plan.states is not None:
            for (_, lease, epoch), kept in zip(named, plan.states.kept_at.tolist(), strict=True):
                self._kept_states[lease.id] |= set(kept) if lease.epoch == epoch else set()
        out = {lease.id for step in self.out.values() for _, lease, _ in step}
        for (_, lease, epoch), length in zip(named, result.lengths.tolist(), strict=True):
            if lease.epoch == epoch:
                self._proven[lease.id] = length
            elif lease.id not in out:
                self._proven[lease.id] = lease.settled_len

    def _watch_publishing(self) -> None:
        """Nothing is published that a step in flight has yet to write."""
        store = self._state.store
        publish = store.publish

        def watched(lease: Lease, key: Key, now: int) -> None:
            most = max(lease.shared_len, self._proven.get(lease.id, 0))
            publish(lease, key, now)
            is_out = any(lease is each for step in self.out.values() for _, each, _ in step)
            if is_out and lease.shared_len > most:
                raise Broken(f"proven: {lease.holder} shares {lease.shared_len} tokens, results have shown {most}")

        store.publish = watched  # type: ignore[method-assign]

    def publishes(self, name: str, lease: Lease, length: int) -> None:
        """A lease goes to the prefix tree; without the window behind its last whole page it cannot be used there."""
        store = self._state.store
        if store.states is not None:
            length = self._last_shareable_state(lease, length - self._resolved.spec.pair)
        elif store.window_book is not None:
            whole_len = floor_to(max(0, length - 1), store.page_size)
            if lease.evicted_len > store.books[store.window_book].first_needed(whole_len, store.page_size):
                return  # it was cut back after its window had moved on
        self._published[name] = (length, self.num_evictions)
        self._frontiers[name] = lease.evicted_len

    def _last_shareable_state(self, lease: Lease, length: int) -> int:
        """The last position up to `length` at which the tree has a state of a lease's text, or is given one."""
        ledger, size = self._state.store.ledger, self._resolved.page_size
        own = {at for at, state in lease.states.items() if state.step <= ledger.collected}
        if not isinstance(lease.holder, str):  # of a turn that runs, the last one at a page's end must be there yet
            own |= {at for at in self._kept_states[lease.id] if at > lease.shared_len}
        found, walk = [at for at in own if at % size == 0], lease.node
        while walk.parent is not None:
            found += [walk.end] * (walk.state != NULL_PAGE)
            walk = walk.parent
        return max((at for at in found if at <= length), default=0)

    def dropped_states(self) -> None:
        """Somebody let go of states that are kept for later, some of which may be the last at a page's end."""
        for kept in self._kept_states.values():
            kept.clear()

    def _has_moved_on(self, name: str, length: int) -> bool:
        """Whether the window behind an earlier point was gone when somebody's pages went to the tree."""
        store = self._state.store
        if store.window_book is None or store.states is not None:
            return False
        first = store.books[store.window_book].first_needed(length, store.page_size)
        return self._frontiers.get(name, length) > first

    def reclaimed(self, session_id: str) -> None:
        """An idle session is reclaimed: no other that was used less recently may keep its lease."""
        table, known = self._state.sessions.table, self._checker.conversations
        lease = table[session_id].lease
        assert lease is not None
        self.publishes(session_id, lease, lease.proven_len)
        resident = [name for name, session in table.items() if session.lease is not None]
        idle = [known[name] for name in resident if name in known and not known[name].num_open_turns]
        before = [each.id for each in idle if each.last_used < known[session_id].last_used]
        if before and not known[session_id].num_open_turns:
            raise Broken(f"reclaim: {session_id} is reclaimed, {before} were used before it")

    def rewound(self, session_id: str, length: int) -> None:
        """A session is cut: no more than that much of what it published can be found, with windows perhaps nothing."""
        published, evictions = self._published.pop(session_id, (0, -1))
        if self._state.store.window_book is None:
            self._published[session_id] = (min(published, length), evictions)

    def forked(self, session_id: str, new_id: str, length: int) -> None:
        """A session is forked at a length: the other finds whole pages of what it holds, or has left in the tree."""
        lease = self._state.sessions.table[session_id].lease
        if lease is not None:
            self.publishes(new_id, lease, min(lease.proven_len, length))
            return
        left, evictions = self._published.get(session_id) or self._committed.get(session_id, (0, -1))
        if left <= length or self._state.store.window_book is None:  # else the window behind that point may be gone
            self._published[new_id] = (min(left, length), evictions)

    def _check_found(self, request_id: str, settled_len: int) -> None:
        """A suspended or reclaimed sequence finds what it published, unless it was evicted; only in its name space."""
        ask = self._checker.asks[request_id]
        submit = ask.submit
        request = self._state.requests[request_id]
        session_id = scoped(submit.client, submit.session_id) if submit.session_id else ""
        scoped_salt = self._scoped_salt(ask)
        if request.lease.node.scoped_salt != scoped_salt:
            raise Broken(f"salt: {request_id} of '{scoped_salt}' shares pages of '{request.lease.node.scoped_salt}'")
        for name in (request_id, session_id):
            length, evictions = self._published.pop(name, (0, -1))
            if evictions == self.num_evictions:
                page_size = self._resolved.page_size
                has_states, pair = self._resolved.states is not None, self._resolved.spec.pair
                least = min(length, request.turn.prefill_len - 1 - pair * has_states) - (not has_states)
                if submit.prompt_logprobs_from is not None and (ask.prompt_logprobs_next or 0) < len(ask.prompt) - 1:
                    least = min(
                        least, ask.prompt_logprobs_next or submit.prompt_logprobs_from
                    )  # the rest shall run, for log-probabilities
                    if self._has_moved_on(name, floor_to(max(0, least), page_size)):
                        least = 0
                if has_states and least < length:
                    least = 0  # that state is of no use, and nobody knows the one before it
                if settled_len < least // page_size * page_size:
                    raise Broken(f"resume: {request_id} finds {settled_len} tokens, {length} were published")

    def check_written_states(self, plan: StepPlan) -> None:
        """A state that a launched step has yet to write is nobody's but its lease's: the tree has none of them."""
        if plan.states is None:
            return
        pages = [PageId(page) for page in plan.states.kept_in.flatten().tolist() if page != NULL_PAGE]
        for page, account in zip(
            pages, self._state.store.ledger.accounts_of(len(self._resolved.books), pages), strict=True
        ):
            if account & 3 == 2:
                raise Broken(f"proven: state {page}, which step {plan.step} has yet to write, is '{describe(account)}'")

    def suspended(self, request_id: str, settled_len: int) -> None:
        """A request is preempted, or a step of it broke: what results have shown is there, and goes to the tree."""
        lease = self._state.requests[request_id].lease
        if settled_len < self._proven[lease.id]:
            raise Broken(f"proven: {request_id} has {settled_len} tokens, results have shown {self._proven[lease.id]}")
        self.publishes(request_id, lease, settled_len)

    def check_named_pages(self, step: int, named: Named, pages_of: list[list[list[PageId]]]) -> None:
        """A page that a launched step may touch is its lease's, the tree's, or retiring for that step."""
        for (request, lease, _), by_book in zip(named, pages_of, strict=True):
            for book, pages in enumerate(by_book):
                accounts = self._state.store.ledger.accounts_of(book, pages)
                for page, account in zip(pages, accounts, strict=True):
                    kind, owner = account & 3, account >> 2
                    fine = kind == 2 or account == leased(lease.id) or (kind == 3 and owner >= step)
                    if page != NULL_PAGE and not fine:
                        raise Broken(
                            f"named pages: step {step} may touch page {page} of book {book} for {request.id}, "
                            f"but it is '{describe(account)}'"
                        )

    def check_unpublished(self) -> None:
        """A session's running turn shares no more than it started with."""
        for request in self._state.running:
            if request.turn.session is not None and request.lease.shared_len > self._shared_at_start[request.id]:
                raise Broken(f"publish: {request.id} shared pages before its turn was committed")

    def check_flushed(self) -> None:
        """After a flush every page is free, and no session keeps any."""
        state = self._state
        free = [state.store.ledger.num_free(book) for book in range(len(self._resolved.pools))]
        if free != [pool.num_pages - 1 for pool in self._resolved.pools] or state.sessions.idle():
            raise Broken(f"flush: {free} pages are free after it")
