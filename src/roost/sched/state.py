"""State of the scheduler: everything the loop's stages share, in one place.

Each stage is a module of functions over this. Nothing here is touched by another thread.
"""

from bisect import insort
from collections import deque
from dataclasses import dataclass, field

from roost.config.resolved import Resolved
from roost.draft_length.choice import DraftLengthPolicy
from roost.kv.lease import TurnId
from roost.kv.store import Store
from roost.messages import Event, Reply
from roost.obs.trace import Trace
from roost.sched.counters import SpecCounters, Totals
from roost.sched.request import LaunchedStep, Mark, NewStopFinder, Request, StartCompiling
from roost.sched.rows import Rows
from roost.sched.step_limits import StepLimits
from roost.sched.step_log import StepLog
from roost.sched.watched import Watched
from roost.session.journal import SessionJournal
from roost.session.table import Session, Sessions
from roost.step_times.times import StepTimes


def _ignore(event: Event) -> None:
    """The reply function of a client that has gone away."""


def _order(request: Request) -> tuple[int, int]:
    return request.order


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionRefusal:
    """A turn that did not get in, and how things stood then."""

    turn: TurnId
    margins: list[int]  # per book: pages that were not promised to anyone
    num_leases_kept: int  # leases that sessions had been left: one more may be reclaimed
    num_pinned: int  # first pins of the tree's nodes: one may hold its prompt, whose pages it need not take then
    reason: str


@dataclass(slots=True, kw_only=True, eq=False)
class State:
    """What the loop knows."""

    resolved: Resolved
    trace: Trace
    store: Store
    sessions: Sessions
    rows: Rows
    spec_counters: SpecCounters
    step_times: StepTimes
    draft_policy: DraftLengthPolicy
    step_limits: StepLimits = field(default_factory=StepLimits)
    totals: Totals = field(default_factory=Totals)
    new_stop_finder: NewStopFinder | None = None  # None: stop strings are refused
    start_compiling: StartCompiling | None = None  # None: grammars are refused
    journal: SessionJournal | None = None  # None: sessions end with the engine
    requests: dict[str, Request] = field(default_factory=dict)  # accepted and not ended, by id
    turns: dict[TurnId, Request] = field(default_factory=dict)  # the same, by turn
    queued: list[Request] = field(default_factory=list)  # in order
    running: list[Request] = field(default_factory=list)  # in order
    marked: list[Request] = field(default_factory=list)
    in_flight: deque[LaunchedStep] = field(default_factory=deque)
    close_replies: dict[str, Reply] = field(default_factory=dict)  # who waits for a session to close
    expiry_min: int | None = None  # no session's time is up before; None: no session that is idle has a ttl
    num_arrived: int = 0
    prefilled_last: bool = False  # whether the last step had a prefill chunk
    stopping: bool = False  # nothing new is accepted
    last_refusal: AdmissionRefusal | None = None  # why the head of the queue was last refused
    waiting_for: str = ""  # why the head of the queue is not running
    step_log: StepLog = field(default_factory=StepLog)
    watched: Watched | None = None  # None: nobody watches
    now: int = 0  # of the clock, when the tick began, the last command was read or the last step was collected

    def enqueue(self, request: Request) -> None:
        """Put a request into the queue, by priority and arrival."""
        insort(self.queued, request, key=_order)

    def start_running(self, request: Request) -> None:
        """Move a request from the queue to the running ones."""
        self.queued.remove(request)
        insort(self.running, request, key=_order)

    def send(self, request: Request, event: Event) -> None:
        """Tell a request's client something; a client that cannot be told is taken to have gone away."""
        if not self.tell(request.reply, event):
            request.reply = _ignore
            if request.id in self.requests:
                self.mark(request, Mark.ABORT)

    def tell(self, reply: Reply, event: Event) -> bool:
        """Call a client's function; whatever it does, the others go on."""
        try:
            reply(event)
            return True
        except Exception as error:  # noqa: BLE001 (it is not our code)
            self.trace.note("lost_client", repr(error))
            return False

    def may_expire(self, session: Session) -> None:
        """A session's time may have begun to run."""
        if session.expires_at is not None:
            first = self.expiry_min
            self.expiry_min = session.expires_at if first is None else min(first, session.expires_at)

    def mark(self, request: Request, mark: Mark) -> None:
        """Say what settle shall do with a request."""
        if request.mark is Mark.NONE:
            self.marked.append(request)
        request.mark = max(request.mark, mark)


def new_state(
    resolved: Resolved,
    trace: Trace,
    new_stop_finder: NewStopFinder | None = None,
    start_compiling: StartCompiling | None = None,
    journal: SessionJournal | None = None,
) -> State:
    """An empty scheduler for a configuration."""
    pair = resolved.spec.pair
    store = Store(resolved.page_size, resolved.books, resolved.states)
    step_times = StepTimes(resolved.sched.max_running, resolved.depth)
    return State(
        resolved=resolved,
        trace=trace,
        store=store,
        sessions=Sessions(store, pair),
        rows=Rows(resolved.num_rows),
        spec_counters=SpecCounters(accept_max=resolved.spec.accept_max),
        step_times=step_times,
        draft_policy=DraftLengthPolicy(resolved.widths, resolved.sched.max_running, step_times),
        new_stop_finder=new_stop_finder,
        start_compiling=start_compiling,
        journal=journal,
    )
