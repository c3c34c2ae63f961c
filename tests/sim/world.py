"""World: one simulated run, from a seed to a verdict.

Simulated clients above, a device with faults below, the real scheduler in between; checker and audits watch every tick.
After a time with faults comes one without: everything accepted must end, and every page must be free again.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace

from roost.errors import StepFailure
from roost.kv.lease import Lease, StateKind
from roost.kv.ledger import OutOfPages
from roost.kv.pages import PageId
from roost.messages import Abort, Event, Finished, Refused, Submit
from roost.obs.trace import Note, Trace
from roost.sched.engine import Engine
from roost.sched.request import Mark, Request
from roost.sched.state_columns import NO_STATES
from roost.step import StepPlan, StepResult, Ticket
from tests.sim.balance import check_all_ended, check_all_free
from tests.sim.checker import Ask, Broken, Checker, Conversation
from tests.sim.device_time import DeviceTime
from tests.sim.options import Options, draw
from tests.sim.promises import Promises
from tests.sim.questions import Questions
from tests.sim.replicas import has_fleet, run_fleet
from tests.sim.report import Report
from tests.sim.rounds import Rounds
from tests.sim.rules import Rules
from tests.sim.visits import TICK_NS, Visits
from tests.sim.wishes import SimStopFinder, compiles_at_once, draw_extras, with_grammar
from tests.sim.witness import Witness, drafts_of, states_named

CALM_TICKS_MAX = 6000  # after a request has ended, until another does
SLOW_NS = 25 * TICK_NS


class World:
    """One run."""

    def __init__(self, options: Options, log: Callable[[str], None] | None = None) -> None:
        self.options = options
        self.rng = random.Random(f"world {options.seed}")
        self.troubled = True
        self.clock = DeviceTime(options.seed, options.step_ns, self._meanwhile)
        resolved = options.resolved
        self.witness = Witness(resolved, options.model, options.layer_books, self._decide, self._is_too_large)
        self.engine = Engine(resolved, self, self.clock, Trace(self._note), SimStopFinder, compiles_at_once)
        self.checker = Checker(options.model, resolved, has_step_faults=options.faults.step > 0)
        self.rules = Rules(self.engine.state, self.checker, resolved)
        self.rounds = Rounds(self.engine.state, self.checker, options.model)
        self.report = Report(seed=options.seed)
        self.visits = Visits(options.seed, options.habits, self.engine, self.checker, self.rules, self.clock)
        self.questions = Questions(self.engine, self.checker, self.rules, self.visits, self.report.counts)
        self._log = log
        self._named = 0
        self._collecting = -1
        self._aborted: list[Ask] = []
        self._broken: AssertionError | None = None
        self._no_pages_for: int | None = None  # a lease for which every allocation of this tick fails
        self._wishing = random.Random(f"wishing {options.seed}")  # its own, so that a new option changes little
        self._asking = random.Random(f"asking {options.seed}")
        self._rows: dict[int, dict[str, int]] = {}
        self._plans: dict[int, StepPlan] = {}
        self._pages: dict[int, list[list[list[PageId]]]] = {}
        prompts = [[self._token() for _ in range(resolved.context)] for _ in range(options.shared_prompts)]
        self._prompts = prompts
        self._inject_allocation_faults()
        self.promises = Promises(self.engine.state)

    # --- the executor, watched ---------------------------------------------------------------------------------

    def launch(self, plan: StepPlan) -> Ticket:
        """Remember whose rows these are, then launch."""
        rows = plan.rows.tolist()
        if len(set(rows)) != len(rows):
            raise Broken(f"plan: a row has two roles in step {plan.step}: {rows}")
        by_row = {request.row: request for request in self.engine.state.running}
        named = [(by_row[row], by_row[row].lease, by_row[row].lease.epoch) for row in rows]
        self.rules.launched(plan, named)
        self.promises.launched(plan, [request for request, _, _ in named])
        self.rounds.launched([request for request, _, _ in named])
        for step, before in self.rules.out.items():
            for request, _, _ in before:
                user = by_row.get(self._rows[step][request.id])
                if user is not None and user is not request:
                    raise Broken(f"row: {user.id} has a row that step {step} still uses for {request.id}")
        if self.troubled and self.rng.random() < self.options.faults.step / 4:
            self._count("fault: launch")
            self.questions.num_broken += 1
            raise StepFailure(f"step {plan.step} is not launched")
        self.rules.out[plan.step] = named
        self._rows[plan.step] = {request.id: row for (request, _, _), row in zip(named, rows, strict=True)}
        if any(self._is_poisoned(request, i, plan) for i, (request, _, _) in enumerate(named)):
            self.witness.doomed.add(plan.step)
        self._plans[plan.step] = plan
        self._pages[plan.step] = [
            [*map(list, lease.pages), states_named(plan, i)] for i, (_, lease, _) in enumerate(named)
        ]
        for request, _, _ in named:
            self.checker.asks[request.id].last_launch = plan.step
        self.clock.launched(plan)
        return self.witness.launch(plan)

    def _is_poisoned(self, request: Request, index: int, plan: StepPlan) -> bool:
        """Whether a request makes this step fail: it reaches its poisoned position."""
        at = self.checker.asks[request.id].poisoned_at
        end = (
            plan.start_positions[index] + plan.query_lens[index]
            if plan.is_prefill[index]
            else plan.device_lens_max[index] + 1
        )
        return at is not None and bool(end > at)

    def collect(self, ticket: Ticket) -> StepResult:
        """Collect, and hold every live row against the oracle: tokens and accept count."""
        named, plan = self.rules.out.pop(ticket.step), self._plans.pop(ticket.step)
        del self._rows[ticket.step], self._pages[ticket.step]
        self._collecting = ticket.step
        if self.troubled and self.rng.random() < self.options.faults.slow:
            self._count("fault: slow step")
            self.clock.advance(SLOW_NS)
        self.clock.advance(self.options.draft_ns * (1 + sum(drafts_of(plan))))
        self.clock.collected(ticket.step)
        self.checker.told_at = self.clock.now_ns()
        self.questions.num_broken += 1
        result = self.witness.collect(ticket)
        self.questions.num_broken -= 1
        self.questions.num_steps += 1
        self.rules.collected(named, plan, result)
        self.rounds.collected(plan)
        for i, (request, lease, epoch) in enumerate(named):
            if request.turn.lease is lease and lease.epoch == epoch and result.accept_lens[i]:
                self.rounds.sampled(plan, i, request, result.tokens[i, : result.accept_lens[i]].tolist())
        return result

    def _decide(self, what: str) -> bool:
        if what == "early":
            return self.rng.random() < self.options.faults.early
        happens = self.troubled and self.rng.random() < self.options.faults.step
        if happens:
            self._count("fault: step")
        return happens

    def _is_too_large(self, plan: StepPlan) -> bool:
        """Whether a step does not fit the device: a single round always does."""
        faults, num_tokens = self.options.faults, int(plan.query_lens.sum())
        has_rows = faults.rows_max is not None and len(plan.rows) > faults.rows_max
        has_tokens = faults.tokens_max is not None and num_tokens > faults.tokens_max
        if has_rows or has_tokens:
            self._count("fault: size")
            self.rules.broke_for_size()
        return has_rows or has_tokens

    def _inject_allocation_faults(self) -> None:
        store = self.engine.state.store
        reserve = store.reserve

        def sometimes(
            lease: Lease, length: int, reserves: Sequence[int], states: Mapping[int, StateKind] = NO_STATES
        ) -> None:
            if self._no_pages_for == lease.id:
                self._count("fault: allocation")
                raise OutOfPages(self.rng.randrange(len(store.pools)), 1, 0)
            reserve(lease, length, reserves, states)

        evict = store.tree.evict

        def counted(book: int, count: int) -> None:
            before = [store.tree.num_evictable(number) for number in range(len(store.pools))]
            evict(book, count)
            after = [store.tree.num_evictable(number) for number in range(len(store.pools))]
            self.rules.num_evictions += before != after

        store.reserve = sometimes  # type: ignore[method-assign,assignment]
        store.tree.evict = counted  # type: ignore[method-assign]

    def _note(self, note: Note) -> None:
        kind, subject, numbers = note
        self._say(f"  {kind} {subject} {numbers if numbers else ''}")
        self._count("note: " + kind)
        if kind == "lost_client":
            raise Broken(f"client: {subject}")
        if kind == "broken_command":  # the others would go on, but it is a bug
            raise Broken(f"command: {subject}")
        if kind == "suspend":
            self.checker.disturbed(subject)
            self.rules.suspended(subject, numbers[0])
        elif kind in ("reclaim", "over_limit"):
            self.checker.lost_residence(subject)
            if numbers[-1] <= 0:
                raise Broken(f"reclaim: {subject} is reclaimed although nothing is missing")
            self.rules.reclaimed(subject)
        elif kind == "expire":
            self.visits.expired(subject)
        elif kind == "admit":
            self.rules.admitted(subject, numbers[0])
        elif kind == "drop_states":
            self.checker.dropped_states()
            self.rules.dropped_states()
        elif kind == "fail":
            for conversation in self.checker.conversations.values():
                conversation.cached = None
        elif kind == "sit_out":
            self.checker.asks[subject].sat_out_at = self.report.ticks
        elif kind == "preempt":
            self.checker.asks[subject].sat_out_at = self.report.ticks
            self.rules.preempted(subject, *numbers)
        self.promises.noted(note, self._no_pages_for)

    # --- clients -----------------------------------------------------------------------------------------------

    def _token(self) -> int:
        return self.rng.randrange(self.options.model.vocab)

    def _fresh(self, kind: str) -> str:
        self._named += 1
        return f"{kind}{self._named}"

    def _submit(self, conversation: Conversation | None, queue: bool = False, taken_at: int | None = None) -> Ask:
        rng, context = self.rng, self.options.resolved.context
        if conversation is None:
            length = rng.randint(1, context) if rng.random() < 0.2 else rng.randint(1, max(1, context // 2))
            shared = rng.randint(0, length) if rng.random() < 0.7 else 0
            tokens = [*rng.choice(self._prompts)[:shared], *(self._token() for _ in range(length - shared))]
        else:
            first = [1, 4, 8, 17] if not conversation.tokens else [0, 1, 1, 2, 3, 5, 9, 17]
            tokens = [self._token() for _ in range(rng.choice(first))]
        length = len(tokens) + (len(conversation.tokens) if conversation else 0)
        max_new = rng.choice([None, 0, 1, 2, 3, 4, 8, 20, max(0, context - length), context])
        if rng.random() < 0.9 and max_new is not None:
            max_new = max(0, min(max_new, context - length))
        stop_ids = frozenset(self._token() for _ in range(self.options.num_stops))
        salt = "" if conversation else rng.choice(["", "", "salt"])
        submit = Submit(
            request_id=self._fresh("r"),
            tokens=tuple(tokens),
            max_new_tokens=max_new,
            stop_token_ids=stop_ids,
            session_id=conversation.name if conversation else None,
            queue=queue,
            cache_salt=salt,
            client=self._asker(conversation),
        )
        ask = self._send(self.visits.salt(self.visits.number(submit)), taken_at)
        num_waiting = len(self.engine.state.requests) - len(self.engine.state.running)
        has_place = num_waiting + 3 < self.options.resolved.sched.max_queued or self._wishing.random() < 0.1
        if has_place and taken_at is None and self._wishing.random() < self.options.wishes.group:
            self._follow(ask.submit)
        return ask

    def _asker(self, conversation: Conversation | None) -> str:
        """Who asks: for a turn its session's client, hardly ever another, who has no such session."""
        if conversation is not None and self._asking.random() > 0.03:
            return conversation.client
        return self._asking.choice([*self.options.resolved.clients, *([] if self.options.resolved.clients else [""])])

    def _follow(self, leader: Submit) -> None:
        """More requests with one's prompt, or another's: they share its pages, if there are any to share."""
        rng = self._wishing
        open_names = [name for name, ask in self.checker.asks.items() if not ask.ended]
        for _ in range(rng.randint(1, 3)):
            strange = rng.random() < 0.2
            submit = Submit(
                request_id=self._fresh("r"),
                tokens=leader.tokens[rng.randint(0, 1) :] or (0,),
                max_new_tokens=rng.choice([leader.max_new_tokens, 0, 1, 2]),
                stop_token_ids=leader.stop_token_ids,
                shares_with=rng.choice(["nobody", *open_names]) if strange else leader.request_id,
                cache_salt=rng.choice([leader.cache_salt, leader.cache_salt, ""]),
                client=leader.client,
            )
            self._send(submit)

    def _send(self, submit: Submit, taken_at: int | None = None) -> Ask:
        extras = draw_extras(
            self._wishing, self.options.wishes, self.options.model.vocab, len(submit.tokens), submit.max_new_tokens
        )
        submit = replace(submit, **{each.name: getattr(extras, each.name) for each in fields(extras)})
        submit = with_grammar(submit, self.options.seed, self.options.model.vocab)
        self.report.requests += 1
        ask = self.checker.sent(submit, taken_at or self.clock.now_ns() + TICK_NS)
        if self.rng.random() < self.options.faults.poison:
            self._count("fault: poison")
            ask.poisoned_at = self.rng.randint(0, self.options.resolved.context)
        self._say(f"submit {submit}")
        self.engine.post(submit, lambda event: self._deliver(ask, event))
        return ask

    def _deliver(self, ask: Ask, event: Event) -> None:
        self._say(f"    -> {event}")
        try:
            if isinstance(event, Finished) and event.reason in ("stop", "length") and ask.conversation is not None:
                self._check_last_round(ask, event)
            self.rules.told(ask, event)
            self.checker.event(ask, event, self._collecting)
        except AssertionError as broken:  # the engine shields itself from clients that raise
            self._broken = self._broken or broken

    def _check_last_round(self, ask: Ask, event: Finished) -> None:
        """At depth 1 a session turn's next round was launched when it ends, so that its last token's KV is written."""
        resolved = self.options.resolved
        if not resolved.sched.overlap or not resolved.sched.mixed or event.max_new_tokens == 0:
            return
        faults = self.options.faults
        if faults.step or faults.poison or faults.rows_max or faults.tokens_max:  # then requests go alone for a step
            return
        if ask.last_launch <= self._collecting and ask.sat_out_at < self.report.ticks - 2:
            raise Broken(f"last round: {ask.submit.request_id} ended with nothing in flight")

    def _close(self, conversation: Conversation) -> None:
        if conversation.closing:
            return
        self._say(f"close {conversation.id}")
        self._count("fault: close" if self.troubled else "close")
        self.visits.close(conversation)

    def _abort(self, ask: Ask) -> None:
        ask.aborted = True
        self._say(f"abort {ask.submit.request_id}")
        self._count("fault: abort")

        def reply(event: Event) -> None:
            if not (isinstance(event, Refused) and event.status == 404):
                self._broken = Broken(f"terminal: an abort was answered with {event}")

        self._aborted.append(ask)
        self.engine.post(Abort(request_id=ask.submit.request_id), reply)

    def _clients(self) -> None:
        """What clients do before one tick."""
        rng, options = self.rng, self.options
        self.visits.visit(options.num_sessions, self._fresh)
        num_waiting = len(self.engine.state.requests) - len(self.engine.state.running)
        has_place = num_waiting < options.resolved.sched.max_queued or rng.random() < 0.1
        if rng.random() < options.submit_rate and has_place:
            self._submit(None)
        talks = list(self.checker.conversations.values())
        if len(talks) < options.num_sessions:
            self.visits.open(self._fresh("s"), self.rng.choice(["", "salt"]))
        for conversation in talks:
            if conversation.closing:
                continue
            if conversation.num_open_turns == 0 and len(conversation.tokens) > 0.8 * options.resolved.context:
                self._close(conversation)
            elif conversation.num_open_turns == 0 and has_place and rng.random() < 0.5:
                self._submit(conversation)
            elif rng.random() < 0.04:
                self._submit(conversation, queue=rng.random() < 0.6)
        self._misbehave(talks)
        if self._wishing.random() < options.wishes.stats:
            self.questions.ask_stats()
        if self._wishing.random() < options.wishes.flush:
            self.questions.flush()

    def _misbehave(self, talks: list[Conversation]) -> None:
        rng, faults = self.rng, self.options.faults
        open_asks = [ask for ask in self.checker.asks.values() if not ask.ended]
        if open_asks and rng.random() < faults.abort:
            ask = rng.choice(open_asks)
            self._abort(ask)
            if ask.conversation is not None and not ask.conversation.closing and rng.random() < 0.6:
                self._count("fault: instant next turn")
                self._submit(ask.conversation)
        if open_asks and rng.random() < 0.02:
            self._duplicate(rng.choice(open_asks))
        if rng.random() < 0.01:
            self._unknown_session()
        if talks and rng.random() < faults.close:
            self._close(rng.choice(talks))
        running = [request for request in self.engine.state.running[1:] if request.mark is Mark.NONE]
        if running and rng.random() < faults.preempt:
            self._count("fault: preempt")
            victim = rng.choice(running)
            self.checker.asks[victim.id].sat_out_at = self.report.ticks
            self.promises.preempt(victim)

    def _meanwhile(self) -> None:
        """What clients do while the loop waits: they are read at once."""
        self.checker.now = self.checker.told_at = self.clock.now_ns()
        self.checker.fresh = [ask for ask in self.checker.fresh if ask.conversation is None]  # turns have been read
        self.visits.before_tick()
        if self.troubled and len(self.engine.state.queued) < 2:
            self._submit(None, taken_at=self.clock.now_ns())

    def _duplicate(self, ask: Ask) -> None:
        self._count("fault: duplicate id")

        def reply(event: Event) -> None:
            refused = isinstance(event, Refused) and event.status == 409
            if not refused and not ask.ended:
                self._broken = Broken(f"duplicate: {ask.submit.request_id} was taken twice: {event}")

        if ask.submit.request_id in self.engine.state.requests:
            self.engine.post(Submit(request_id=ask.submit.request_id, tokens=(0,), max_new_tokens=0), reply)

    def _unknown_session(self) -> None:
        self._count("fault: unknown session")
        submit = Submit(request_id=self._fresh("r"), tokens=(0,), session_id="nobody")
        ask = self.checker.sent(submit, self.clock.now_ns() + TICK_NS)
        self.engine.post(ask.submit, lambda event: self._deliver(ask, event))

    # --- time --------------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self.clock.advance(TICK_NS)
        self.checker.now = self.checker.told_at = self.clock.now_ns()
        self.report.ticks += 1
        self._collecting = -1
        self._say(f"tick {self.report.ticks}")
        aborted, self._aborted = self._aborted, []
        running = [request.lease.id for request in self.engine.state.running]
        fails = running and self.troubled and self.rng.random() < self.options.faults.allocation
        self._no_pages_for = self.rng.choice(running) if fails else None
        self.visits.before_tick()
        self.engine.tick()  # audits every page: --strict-memory 2
        broken = self._broken or self.questions.broken or self.visits.broken
        if broken is not None:
            raise broken
        for step, named in self.rules.out.items():
            self.rules.check_named_pages(step, named, self._pages[step])
            self.rules.check_written_states(self._plans[step])
        self.rules.check_unpublished()
        self.rules.after_tick()
        self.rounds.after_tick()
        self.promises.after_tick()
        self.visits.after_tick()
        self.report.audits += 1
        for ask in aborted:
            if not ask.ended:
                raise Broken(f"abort: {ask.submit.request_id} goes on after it was aborted")

    def run(self) -> Report:
        """Run with faults, then without, then check the final balance."""
        try:
            for _ in range(self.options.num_ticks):
                self.visits.jump()
                self._clients()
                self._tick()
            self.troubled = False
            self._calm_down()
            if self.options.wishes.flush:
                self._second_act()
            self._final_count()
        except Exception as error:  # noqa: BLE001 (a crash is a verdict too)
            self.report.failure = f"{type(error).__name__}: {error}"
        self.report.tokens = self.checker.num_tokens
        self.report.digest = self.checker.digest()
        for how, count in self.checker.counts.items():
            self.report.counts["ended: " + how] = count
        for what, count in self.visits.counts.items():
            self.report.counts["visit: " + what] = count
        return self.report

    def _calm_down(self) -> None:
        ticks, num_left = 0, len(self.engine.state.requests)
        while self.engine.has_work:
            if self.options.wishes.flush and not self.engine.state.requests:
                self.questions.flush()  # nobody is left, but a step is
            self._tick()
            ticks, before, num_left = ticks + 1, num_left, len(self.engine.state.requests)
            if num_left < before:
                ticks = 0
            if ticks > CALM_TICKS_MAX:
                waiting = [request.id for request in self.engine.state.requests.values()]
                raise Broken(f"liveness: {waiting} do not end; the queue waits for: {self.engine.waiting_for}")

    def _second_act(self) -> None:
        """Flush the cache, then run one more turn of every session, which prefills its history again."""
        self.questions.flush()
        self._tick()
        for conversation in list(self.checker.conversations.values()):
            if not conversation.closing:
                self._submit(conversation)
        self._calm_down()

    def _final_count(self) -> None:
        state, resolved = self.engine.state, self.options.resolved
        check_all_ended(state, self.checker, resolved)
        self.questions.ask_stats()
        for conversation in list(self.checker.conversations.values()):
            self._close(conversation)
        self._tick()
        check_all_free(state, self.checker, resolved)

    def _count(self, what: str) -> None:
        self.report.counts[what] = self.report.counts.get(what, 0) + 1

    def _say(self, line: str) -> None:
        if self._log is not None:
            self._log(line)


def run_seed(seed: int, log: Callable[[str], None] | None = None) -> Report:
    """Run one seed to its verdict, some with replicas behind it."""
    report = World(draw(seed), log).run()
    if not report.failure and has_fleet(seed):
        report.add(run_fleet(seed, log))
    return report
