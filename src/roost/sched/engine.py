"""Engine: the scheduler's loop. Drain the mailbox, collect the due step, settle, admit, plan, launch.

Depth 0 and 1 (overlap of host and device) are the same code: a step is due when more than `depth` of them are in
flight. Owns the state and the only thread that touches it; others talk to it through `post`. Sleeps on the mailbox when
there is nothing to do, and while a long step runs until it is time to plan the next (`late_planning`).
"""

from collections import deque
from contextlib import suppress
from queue import Empty, SimpleQueue

from roost.clock import Clock
from roost.config.resolved import Resolved
from roost.errors import InvariantError, RoostError, StepFailure, first_line
from roost.kv.audit import audit_pages, audit_sums
from roost.messages import Command, Reply
from roost.obs.trace import Trace
from roost.sched.admission import admit
from roost.sched.intake import handle_command
from roost.sched.late_planning import LatePlanning
from roost.sched.planner import plan
from roost.sched.request import LaunchedStep, Mark, NewStopFinder, StartCompiling
from roost.sched.sessions import expire
from roost.sched.settle import act_on_marks, end_overdue, fail, settle
from roost.sched.state import State, new_state
from roost.session.journal import SessionJournal
from roost.step import Executor, StepId, StepResult

_Mail = tuple[Command, Reply, int | None] | RoostError | None  # None: accept nothing more


class Engine:
    """The scheduler over one executor."""

    def __init__(
        self,
        resolved: Resolved,
        executor: Executor,
        clock: Clock,
        trace: Trace | None = None,
        new_stop_finder: NewStopFinder | None = None,
        start_compiling: StartCompiling | None = None,
        journal: SessionJournal | None = None,
    ) -> None:
        self.state: State = new_state(resolved, trace or Trace(), new_stop_finder, start_compiling, journal)
        self._executor = executor
        self._clock = clock
        self._mailbox: SimpleQueue[_Mail] = SimpleQueue()
        self._next_step = StepId(0)
        self._launched = False  # whether the last tick launched a step
        self._late_planning = LatePlanning()

    def post(self, command: Command, reply: Reply, read_by: int | None = None) -> None:
        """Hand a command to the engine, from any thread; one that is read past `read_by`, of the clock, is refused."""
        self._mailbox.put((command, reply, read_by))

    def stop(self) -> None:
        """Accept nothing more, and end `run` once everything accepted has ended; from any thread."""
        self._mailbox.put(None)

    def fail(self, error: RoostError) -> None:
        """Have `run` raise an error, also where it sleeps: nothing can go on; from any thread."""
        self._mailbox.put(error)

    def run(self) -> None:
        """Tick while there is work, sleep on the mailbox while there is none, until `stop`."""
        while True:
            if not self.has_work:
                if self.state.stopping:
                    return
                self._receive(self._mailbox.get())
            self.tick()

    @property
    def waiting_for(self) -> str:
        """Why the head of the queue is not running; empty if nobody waits."""
        return self.state.waiting_for

    @property
    def has_work(self) -> bool:
        """Whether a tick would do anything: requests that have not ended, or steps in flight."""
        return bool(self.state.requests or self.state.in_flight) or not self._mailbox.empty()

    def tick(self) -> None:
        """One turn of the loop."""
        state = self.state
        state.now = self._clock.now_ns()
        expire(state)
        while not self._mailbox.empty():
            self._receive(self._mailbox.get())
        act_on_marks(state, Mark.ABORT)  # an abort that was read comes before a result that was not
        end_overdue(state)
        if state.in_flight and (len(state.in_flight) > state.resolved.depth or not self._launched):
            self._collect()
            if state.in_flight and state.resolved.depth:
                self._wait_to_plan()
        act_on_marks(state, Mark.PREEMPT)
        state.waiting_for = admit(state)
        launched = plan(state, self._next_step)
        self._launched = launched is not None
        if launched is not None:
            self._launch(launched)
        self._audit()

    def _wait_to_plan(self) -> None:
        """Read the mailbox until shortly before the running step ends, so that whoever comes is in the next plan."""
        state = self.state
        plan_at = self._late_planning.plan_at(state.step_times, state.now)
        if plan_at <= state.now:
            return
        while not state.stopping:
            try:
                self._receive(self._clock.receive(self._mailbox, plan_at))
            except Empty:
                break
        state.now = self._clock.now_ns()
        state.step_times.plans_late(state.now)
        expire(state)
        end_overdue(state)

    def _receive(self, mail: _Mail) -> None:
        if isinstance(mail, RoostError):
            raise mail
        self.state.now = self._clock.now_ns()
        if not (self.state.requests or self.state.in_flight):
            self.state.totals.last_step_at = self.state.now
        if mail is None:
            self.state.stopping = True
        else:
            expire(self.state)
            handle_command(self.state, *mail)

    def _launch(self, launched: LaunchedStep) -> None:
        self._next_step = StepId(self._next_step + 1)
        self.state.in_flight.append(launched)
        launched.planned_at = self.state.now
        try:
            launched.ticket = self._executor.launch(launched.plan)
        except StepFailure:
            launched.launched_at = self._clock.now_ns()  # that was tried: it is logged
            while self.state.in_flight:  # nothing may be launched behind it: settle those before it, then fail it
                self._collect()
        launched.launched_at = self._clock.now_ns()
        self._late_planning.launched(launched.launched_at - self.state.now)

    def _collect(self) -> None:
        launched, asked_at = self.state.in_flight.popleft(), self._clock.now_ns()
        try:
            result = self._result_of(launched)
        except StepFailure as error:
            self._fail(launched, first_line(error))
            self.state.step_log.note(launched, asked_at, self.state.now, 0, has_failed=True)
            return
        self.state.now = self.state.totals.last_step_at = self._clock.now_ns()  # steps take time
        num_tokens = int(result.accept_lens.sum())
        self.state.step_log.note(launched, asked_at, self.state.now, num_tokens, has_failed=False)
        settle(self.state, launched, result)
        if self._late_planning.is_too_late(self.state.now - asked_at):
            self.state.step_times.device_rested()
        if self.state.resolved.memory.strict_memory >= 2:
            self._check_device_lengths(launched, result)

    def _result_of(self, launched: LaunchedStep) -> StepResult:
        if launched.ticket is None:
            raise StepFailure(f"step {launched.plan.step} could not be launched")
        return self._executor.collect(launched.ticket)

    def _fail(self, first: LaunchedStep, why: str) -> None:
        """A step broke: those launched after it are void too, but must have left the device."""
        failed = [first, *self.state.in_flight]
        self.state.in_flight = deque()
        for launched in failed[1:]:
            with suppress(StepFailure):
                self._result_of(launched)
        self.state.now = self._clock.now_ns()
        self.state.trace.note("fail", why, first.plan.step, failed[-1].plan.step)
        fail(self.state, failed, failed[-1].plan.step)

    def _audit(self) -> None:
        strict = self.state.resolved.memory.strict_memory
        if strict == 1 or (strict == 0 and not self.has_work):
            audit_sums(self.state.store)
        elif strict == 2:
            audit_pages(self.state.store)

    def _check_device_lengths(self, launched: LaunchedStep, result: StepResult) -> None:
        """After a step: the device's length of each live row is between what is promised and what is bounded."""
        for i, request in enumerate(launched.requests):
            lease = launched.leases[i]
            if request.turn.lease is not lease or lease.epoch != launched.plan.epochs[i]:
                continue
            length = int(result.lengths[i])
            if not (length == lease.settled_len and length <= lease.claimed_len <= lease.device_len_max):
                raise InvariantError(
                    f"request {request.id}: device length {length} after step {result.step}, "
                    f"settled {lease.settled_len}, certain {lease.claimed_len}, at most {lease.device_len_max}"
                )
