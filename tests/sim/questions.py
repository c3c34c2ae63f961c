"""Questions: the simulated operator asks for statistics and flushes the cache, and checks the answers.

Statistics must agree with what clients were told; a flush is refused while anything runs.
"""

from roost.messages import Event, FlushCache, Flushed, GetFrame, GetStats, Refused, Stats
from roost.sched.engine import Engine
from tests.sim.checker import Broken, Checker
from tests.sim.rules import Rules
from tests.sim.visits import Visits
from tests.sim.watcher import Watcher


class Questions:
    """The operator of one engine."""

    def __init__(self, engine: Engine, checker: Checker, rules: Rules, visits: Visits, counts: dict[str, int]) -> None:
        self._engine, self._checker, self._rules, self._visits, self._counts = engine, checker, rules, visits, counts
        self._watcher = Watcher(engine)
        self.num_steps = 0  # collected
        self.num_broken = 0
        self.broken: AssertionError | None = None  # the engine shields itself from clients that raise

    def ask_stats(self) -> None:
        """Ask for statistics, and compare them with what clients were told."""

        def reply(event: Event) -> None:
            try:
                assert isinstance(event, Stats), event
                self._checker.check_stats(event)
                self._check_activity(event)
                self._check_sessions(event)
            except AssertionError as broken:
                self.broken = self.broken or broken

        def look(event: Event) -> None:
            try:
                self._watcher.hear(event)
            except AssertionError as broken:
                self.broken = self.broken or broken

        self._count("stats")
        self._engine.post(GetStats(), reply)
        self._engine.post(GetFrame(), look)

    def _check_activity(self, stats: Stats) -> None:
        state = self._engine.state
        told = (stats.queued + stats.running, stats.running, stats.steps, stats.failed_steps, stats.retractions)
        suspended = self._counts.get("note: suspend", 0)
        if told != (len(state.requests), len(state.running), self.num_steps, self.num_broken, suspended):
            raise Broken(f"stats: {stats}, steps {self.num_steps} and {self.num_broken} broken, {suspended} suspended")
        for book, pool in enumerate(stats.pools):
            kinds = [account & 3 for _, account in state.store.ledger.accounts(book)][1:]
            if [kinds.count(kind) for kind in range(4)] != [pool.free, pool.leased, pool.cached, pool.retiring]:
                raise Broken(f"stats: {pool}, accounts {[kinds.count(kind) for kind in range(4)]}")
        if stats.step_age_ms < 0 or (stats.step_age_ms and not (state.requests or state.in_flight)):
            raise Broken(f"stats: the last step is {stats.step_age_ms} ms old")

    def _check_sessions(self, stats: Stats) -> None:
        counts, state = self._visits.counts, self._engine.state
        told = (stats.sessions_opened, stats.sessions_closed, stats.sessions_expired, stats.sessions)
        opened, closed, expired = (counts.get(what, 0) for what in ("opened", "closed", "expired"))
        if told != (opened, closed, expired, opened - closed - expired):
            raise Broken(f"stats: {stats}, sessions {counts}")
        kept = [lease.settled_len for lease in state.store.leases.values() if isinstance(lease.holder, str)]
        on_turns = sum(request.turn.session is not None for request in state.running)
        if (stats.sessions_resident, stats.session_tokens) != (len(kept) + on_turns, sum(kept)):
            raise Broken(f"stats: {stats}, sessions keep {kept}, {on_turns} run")
        reclaimed = self._counts.get("note: reclaim", 0) + self._counts.get("note: over_limit", 0)
        if stats.sessions_reclaimed < reclaimed or ("flushed" not in self._counts) > (
            stats.sessions_reclaimed == reclaimed
        ):
            raise Broken(f"stats: {stats}, {reclaimed} sessions were reclaimed")

    def flush(self) -> None:
        """Flush the cache, which must be refused while anything runs."""

        def reply(event: Event) -> None:
            try:
                busy = any(not ask.ended for ask in self._checker.asks.values()) or bool(self._engine.state.in_flight)
                if busy != isinstance(event, Refused) or (isinstance(event, Refused) and event.status != 409):
                    raise Broken(f"flush: answered with {event}, {len(self._engine.state.in_flight)} steps are out")
                if isinstance(event, Flushed):
                    self._count("flushed")
                    self._rules.check_flushed()
                    for conversation in self._checker.conversations.values():
                        conversation.cached = None
            except AssertionError as broken:
                self.broken = self.broken or broken

        self._count("flush")
        self._engine.post(FlushCache(), reply)

    def _count(self, what: str) -> None:
        self._counts[what] = self._counts.get(what, 0) + 1
