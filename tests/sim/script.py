"""Script: the real engine over the witness device, driven by a test, tick by tick.

For tests that need one exact situation: explicit options, chosen accept counts, and a device that runs steps as late as
stream order allows. Everything that clients receive, and every live row of a collected step, is compared with the
oracle; after every tick, no page that a step in flight names may belong to another owner, and what users were promised
holds (`promises.py`).
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import pytest

from roost.clock import VirtualClock
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig, SessionConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits, Resolved
from roost.kv import ledger
from roost.kv.audit import audit_pages
from roost.kv.lease import Lease
from roost.kv.pages import NULL_PAGE, PageId, ceil_to
from roost.messages import (
    Abort,
    Begun,
    CloseSession,
    Event,
    Finished,
    ForkSession,
    OpenSession,
    Refused,
    RewindSession,
    SessionClosed,
    SessionState,
    SpecStats,
    Submit,
    Tokens,
)
from roost.obs.trace import Note, Trace
from roost.sched.engine import Engine
from roost.sched.request import Request
from roost.sched.state import State
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.step import StepPlan, StepResult, Ticket
from tests.sim import model as oracle
from tests.sim.drafting import Drafting
from tests.sim.prediction import Oracle
from tests.sim.promises import Promises
from tests.sim.witness import Witness, states_named
from tests.support.spec_configs import spec_config

VOCAB = 997
TICKS_MAX = 1000

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
NGRAM = SpecShape(steps=3, topk=1, tokens=4, reads_history=True)
TREE = SpecShape(steps=5, topk=4, tokens=8, draft_kv=DraftKv.PAIR)
WIDE_TREE = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)
_SHAPES = {"plain": PLAIN, "chain": CHAIN, "ngram": NGRAM, "tree": TREE}

depths = pytest.mark.parametrize("overlap", [False, True], ids=["depth0", "depth1"])


def shapes(*names: str) -> pytest.MarkDecorator:
    """The shapes of speculation that a test runs with."""
    return pytest.mark.parametrize("spec", [_SHAPES[name] for name in names], ids=names)


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Options of a script."""

    page_size: int = 4
    num_pages: int = 64  # of each book, without the null page
    spec: SpecShape = CHAIN
    spec_max_batch: int | None = None
    auto: bool = False  # draft length chosen by cost
    overlap: bool = True
    window: int | None = None  # None: full layers only; else one full layer and one window layer
    recurrent: bool = False  # one full layer and a recurrent one
    num_states: int | None = None  # without the null page; None: what is right for so many requests
    state_turns: int | None = None
    state_spacing: int | None = None
    chunk: int = 64
    mixed: bool = True
    context: int = 96
    max_running: int = 4
    draft_skill: float = 1.0
    session: SessionConfig = SessionConfig()

    def resolved(self) -> Resolved:
        """The engine's configuration."""
        pool = (self.num_pages + 1) * self.page_size
        memory = MemoryConfig(
            page_size=self.page_size,
            pool_tokens=pool,
            window_pool_tokens=pool,
            strict_memory=2,
            state_pool=None if self.num_states is None else self.num_states + 1,
            state_turns=self.state_turns,
            state_spacing=self.state_spacing,
        )
        sched = SchedConfig(
            context=self.context,
            max_running=self.max_running,
            chunk=self.chunk,
            mixed=self.mixed,
            overlap=self.overlap,
        )
        traits = ModelTraits(vocab_size=VOCAB, window=self.window, recurrent_state=self.recurrent)
        spec = spec_config(self.spec, self.spec_max_batch, auto=self.auto)
        return resolve(EngineConfig(memory=memory, sched=sched, session=self.session, spec=spec), traits)


class NarrowRows(Resolved):
    """A configuration whose rows have no room for the reserve."""

    __slots__ = ()

    @property
    def row_width(self) -> int:
        """The context alone, in whole pages."""
        return ceil_to(self.sched.context, self.page_size)


def narrow(resolved: Resolved) -> NarrowRows:
    """The same configuration with rows that are not widened."""
    return NarrowRows(**{each.name: getattr(resolved, each.name) for each in fields(resolved)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptedModel(oracle.Model):
    """A model whose drafter also misses where the script says so."""

    misses: set[int] = field(default_factory=set)  # states at which it does not know the next token

    def draft_knows(self, state: int) -> bool:
        """Whether the drafter would propose the target's next token here."""
        return state not in self.misses and oracle.Model.draft_knows(self, state)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The oracle's next `count` tokens."""
        sequence, state, output = oracle.Sequence(self), 0, []
        for token in prompt:
            state = sequence.push(token)[2]
        for _ in range(count):
            output.append(self.next_token(state))
            state = sequence.push(output[-1])[2]
        return output

    def arrange(self, prompt: Sequence[int], accept_lens: Sequence[int], accept_max: int) -> None:
        """See that the first rounds after `prompt` accept exactly these numbers of tokens."""
        tokens = [*prompt, *self.greedy(prompt, 1 + sum(accept_lens))]
        states = oracle.states_of(self, np.array(tokens, dtype=np.int64)).tolist()
        length = len(prompt) + 1  # the prefill samples one
        for accept_len in accept_lens:
            length += accept_len
            if accept_len < accept_max:
                self.misses.add(states[length - 2])  # its last token, the bonus, was not drafted


def prompt_of(length: int, salt: int = 0) -> tuple[int, ...]:
    """Some tokens; different salts differ from the first token on."""
    return tuple((salt * 101 + oracle.mix(salt, i) % 89) % VOCAB for i in range(length))


def accounts(state: State, book: int = 0) -> dict[str, int]:
    """Pages of a book by kind of account, the null page left out."""
    kinds = Counter(ledger.describe(account).split()[0] for _, account in state.store.ledger.accounts(book))
    return {kind: kinds[kind] for kind in ("free", "leased", "cached", "retiring")}


def late(what: str) -> bool:
    """The device runs a step as late as stream order allows, and none breaks."""
    return False


def early(what: str) -> bool:
    """The device runs a step when it is launched, and none breaks."""
    return what == "early"


@dataclass(slots=True, kw_only=True, eq=False)
class Handle:
    """A client's end of one request."""

    submit: Submit
    begun: Begun | None = None
    tokens: list[int] = field(default_factory=list)
    end: Finished | Refused | None = None

    @property
    def finished(self) -> Finished:
        """Its terminal event, which must be that of an accepted request."""
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def refused(self) -> Refused:
        """Its terminal event, which must be a refusal."""
        assert isinstance(self.end, Refused), self.end
        return self.end

    @property
    def cached(self) -> int:
        """Tokens it found in place."""
        return self.finished.usage.cached_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """What one row of a launched step names."""

    request: Request
    lease: Lease
    epoch: int
    row: int
    pages: list[list[PageId]]  # per book, and last of states


class Watch:
    """The witness device, with every launched step remembered until it is collected."""

    state: State  # of the engine that launches here
    promises: Promises  # to its clients

    def __init__(self, witness: Witness, rounds: Oracle) -> None:
        self.named: dict[int, list[Named]] = {}  # by step
        self.histograms: dict[str, list[int]] = {}  # by request: live rounds with drafts, by accept_len - 1
        self.plans: list[StepPlan] = []
        self._witness, self._rounds = witness, rounds
        self._out: dict[int, StepPlan] = {}  # by step

    def launch(self, plan: StepPlan) -> Ticket:
        """Remember what the step names; no row of it may still be another's."""
        by_row = {request.row: request for request in self.state.running}
        users = [by_row[row] for row in plan.rows.tolist()]
        out = {each.row: each.request for step in self.named.values() for each in step}
        for user in users:
            assert out.get(user.row, user) is user, f"{user.id} has row {user.row} of a step in flight"
        self.named[plan.step] = [
            Named(
                request=user,
                lease=user.lease,
                epoch=user.lease.epoch,
                row=user.row,
                pages=[*map(list, user.lease.pages), states_named(plan, place)],
            )
            for place, user in enumerate(users)
        ]
        self.plans.append(plan)
        self._out[plan.step] = plan
        self.promises.launched(plan, users)
        return self._witness.launch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        """Collect, and hold what each live row accepted against the oracle."""
        named, plan = self.named.pop(ticket.step), self._out.pop(ticket.step)
        result = self._witness.collect(ticket)
        for place, each in enumerate(named):
            tokens = result.tokens[place, : result.accept_lens[place]].tolist()
            if tokens and each.request.turn.lease is each.lease and each.lease.epoch == each.epoch:
                self._check_row(plan, place, each.request, tokens)
        return result

    def check_pages(self) -> None:
        """What a launched step names is still its lease's, the tree's, or retiring for it."""
        for step, rows in self.named.items():
            for each in rows:
                for book, pages in enumerate(each.pages):
                    held = [page for page in pages if page != NULL_PAGE]
                    for page, account in zip(held, self.state.store.ledger.accounts_of(book, held), strict=True):
                        kind, owner = account & 3, account >> 2
                        fine = kind == 2 or account == ledger.leased(each.lease.id) or (kind == 3 and owner >= step)
                        assert fine, f"step {step} names page {page}, which is {ledger.describe(account)}"

    def _check_row(self, plan: StepPlan, place: int, request: Request, tokens: list[int]) -> None:
        expected = self._rounds.predict_round(plan, place, request)
        assert tokens == expected.tokens, f"{request.id} accepted {tokens}, the oracle says {expected}"
        if expected.drafted.num_nodes > 1:
            histogram = self.histograms.setdefault(request.id, [0] * self.state.resolved.spec.accept_max)
            histogram[len(tokens) - 1] += 1


class Script:
    """One engine and its clients."""

    def __init__(
        self, setting: Setting, resolved: Resolved | None = None, decide: Callable[[str], bool] = late
    ) -> None:
        resolved = resolved or setting.resolved()
        how = {"window_1": None, "window_2": setting.window, "recurrent": setting.recurrent}
        self.model = ScriptedModel(vocab=VOCAB, draft_skill=setting.draft_skill, **how)
        witness = Witness(resolved, self.model, (0, len(resolved.books) - 1), decide)
        self.watch = Watch(witness, Oracle(self.model, Drafting(resolved)))
        self._clock = VirtualClock()
        self.engine = Engine(resolved, self.watch, self._clock, Trace(self._noted))
        self.state = self.watch.state = self.engine.state
        self.promises = self.watch.promises = Promises(self.state)
        self.histories: dict[str, list[int]] = {}  # what each open session's finished turns make
        self.closed: list[str] = []
        self.ended: list[Finished] = []
        self._num_submitted = 0

    # --- clients -----------------------------------------------------------------------------------------------

    def open(self, *session_ids: str) -> None:
        """Open empty sessions."""
        for session_id in session_ids:
            self.engine.post(OpenSession(session_id=session_id), lambda event: None)
            self.histories[session_id] = []

    def submit(
        self,
        tokens: Sequence[int],
        max_new: int | None,
        session: str | None = None,
        *,
        stops: Sequence[int] = (),
        queue: bool = False,
    ) -> Handle:
        """Post a request; its events collect in the handle."""
        self._num_submitted += 1
        submit = Submit(
            request_id=f"r{self._num_submitted}",
            tokens=tuple(tokens),
            max_new_tokens=max_new,
            stop_token_ids=frozenset(stops),
            session_id=session,
            queue=queue,
        )
        handle = Handle(submit=submit)
        self.engine.post(submit, lambda event: self._deliver(handle, event))
        return handle

    def abort(self, handle: Handle) -> None:
        """Post an abort; it is answered only when there is nothing to abort."""

        def reply(event: Event) -> None:
            assert isinstance(event, Refused) and event.status == 404, event

        self.engine.post(Abort(request_id=handle.submit.request_id), reply)

    def close(self, session_id: str) -> None:
        """Post a close."""

        def reply(event: Event) -> None:
            assert isinstance(event, SessionClosed), event
            self.closed.append(event.session_id)
            del self.histories[event.session_id]

        self.engine.post(CloseSession(session_id=session_id), reply)

    def rewind(self, session_id: str, length: int) -> SessionState | Refused:
        """Cut a session's history, in a tick of its own, unless that is refused."""

        def cut(state: SessionState) -> None:
            assert state.length == length
            del self.histories[session_id][length:]

        return self._command(RewindSession(session_id=session_id, length=length), cut)

    def fork(self, session_id: str, new_id: str, *, length: int | None = None) -> SessionState | Refused:
        """Open a session with another's history, in a tick of its own, unless that is refused."""

        def copy(state: SessionState) -> None:
            self.histories[new_id] = self.histories[session_id][:length]

        return self._command(ForkSession(session_id=session_id, new_id=new_id, length=length), copy)

    def _command(
        self, command: RewindSession | ForkSession, done: Callable[[SessionState], None]
    ) -> SessionState | Refused:
        answers: list[SessionState | Refused] = []

        def reply(event: Event) -> None:
            assert isinstance(event, SessionState | Refused), event
            answers.append(event)
            if isinstance(event, SessionState):
                done(event)

        self.engine.post(command, reply)
        self.tick()
        (answer,) = answers
        return answer

    def _deliver(self, handle: Handle, event: Event) -> None:
        assert handle.end is None, f"{handle} got {event} after its end"
        match event:
            case Begun():
                assert handle.begun is None and not handle.tokens, handle
                handle.begun = event
            case Tokens():
                assert handle.begun is not None, handle
                handle.tokens.extend(event.tokens)
            case Finished():
                handle.end = event
                self._check_end(handle, event)
            case Refused():
                assert not handle.tokens, handle
                handle.end = event

    def _check_end(self, handle: Handle, event: Finished) -> None:
        """Every token is the oracle's; a turn that finished becomes its session's history."""
        submit, usage = handle.submit, event.usage
        prompt = [*self.histories.get(submit.session_id or "", []), *submit.tokens]
        assert handle.tokens == self.model.greedy(prompt, len(handle.tokens)), handle
        assert usage.completion_tokens == len(handle.tokens), handle
        if (begun := handle.begun) is not None:
            assert (usage.prompt_tokens, usage.cached_tokens) == (begun.prompt_tokens, begun.cached_tokens), handle
        nothing = [0] * self.state.resolved.spec.accept_max
        assert list(event.spec.histogram) == self.watch.histograms.get(submit.request_id, nothing), handle
        self.ended.append(event)
        if event.reason in ("stop", "length"):
            assert usage.prompt_tokens == len(prompt), handle
            if submit.session_id is not None:
                self.histories[submit.session_id] = prompt + handle.tokens

    # --- the engine --------------------------------------------------------------------------------------------

    def _noted(self, note: Note) -> None:
        self.promises.noted(note)

    def tick(self, count: int = 1) -> None:
        """Run the loop a number of times."""
        for _ in range(count):
            self._clock.advance(1)
            self.engine.tick()  # audits page by page
            raised = [note for note in self.state.trace.last() if note[0] == "lost_client"]
            assert not raised, raised  # the engine shields itself from clients that raise: ours are the checks
            self.watch.check_pages()
            self.promises.after_tick()

    def until(self, condition: Callable[[], bool]) -> None:
        """Tick until something holds."""
        for _ in range(TICKS_MAX):
            if condition():
                return
            self.tick()
        raise AssertionError(f"nothing moves: the queue waits for {self.engine.waiting_for!r}")

    def run(self) -> None:
        """Tick until everything accepted has ended and nothing is in flight."""
        self.until(lambda: not self.engine.has_work)

    def turn(self, session: str, length: int, max_new: int, salt: int = 0) -> Handle:
        """One whole turn of new tokens, until nothing is in flight."""
        handle = self.submit(prompt_of(length, salt), max_new, session)
        self.run()
        return handle

    def request(self, handle: Handle) -> Request:
        """The engine's side of a request that has not ended."""
        return self.state.requests[handle.submit.request_id]

    def preempt(self, handle: Handle) -> None:
        """Have a running request preempted, as if its pages were needed."""
        self.promises.preempt(self.request(handle))

    def lease(self, session_id: str) -> Lease:
        """The lease that an idle, resident session keeps."""
        lease = self.state.sessions.table[session_id].lease
        assert lease is not None, session_id
        return lease

    def wind_up(self) -> None:
        """Let everything end, close every session, evict the prefix tree: every page and row must be free."""
        self.run()
        audit_pages(self.state.store)
        self._check_statistics()
        for session_id in list(self.histories):
            self.close(session_id)
        self.run()
        state, pools = self.state, self.state.resolved.pools
        assert not self.histories and not state.sessions.table and not state.store.leases
        assert not any(node.pins or node.window_pins or node.state_pins for node in state.store.tree.nodes.values())
        for number, pool in enumerate(pools):
            state.store.tree.evict(number, pool.num_pages)
        assert not state.store.tree.nodes
        for number, pool in enumerate(pools):
            assert state.store.ledger.num_free(number) == pool.num_pages - 1
        assert state.rows.num_free == state.resolved.num_rows
        audit_pages(state.store)

    def _check_statistics(self) -> None:
        """The statistics that clients were told add up to the engine's."""
        told, total = [event.spec for event in self.ended], self.state.spec_counters.snapshot()
        assert total == SpecStats(
            rounds=sum(each.rounds for each in told),
            drafts_offered=sum(each.drafts_offered for each in told),
            drafts_accepted=sum(each.drafts_accepted for each in told),
            overshoot=sum(each.overshoot for each in told),
            lookup_rounds=sum(each.lookup_rounds for each in told),
            lookup_offered=sum(each.lookup_offered for each in told),
            lookup_accepted=sum(each.lookup_accepted for each in told),
            histogram=tuple(sum(each.histogram[i] for each in told) for i in range(len(total.histogram))),
        )
