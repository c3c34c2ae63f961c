"""Group executor: the step seam over several ranks. Each plan goes to the followers, then to rank 0's own executor.

No token travels: all ranks compute the same logits, bit for bit, and draw by seed and position. What came of steps is
compared every so many of them, and soon after the last; a step that breaks must break on all ranks. Called by the loop,
from one thread, and every second by a thread of the ranks'.
"""

import struct
import threading
from functools import partial

from roost.errors import RoostError, StepFailure, first_line
from roost.parallel.agreement import RankAgreement
from roost.parallel.channel import Kind
from roost.parallel.digest import StepDigest
from roost.parallel.group import DistributedGroup
from roost.parallel.plan_wire import encode
from roost.parallel.ranks import Ranks
from roost.runner.executor import TorchExecutor
from roost.step import StepId, StepPlan, StepResult, Ticket

CHECK_STEPS = 64  # collected since the last check; then ranks compare what came of them
_COUNT, _STEP = struct.Struct("<I"), struct.Struct("<q")


class GroupExecutor:
    """Rank 0's executor, and those of its followers."""

    def __init__(self, inner: TorchExecutor, group: DistributedGroup, ranks: Ranks) -> None:
        self._inner = inner
        self._group = group
        self._ranks = ranks
        self._agreement = RankAgreement(ranks)
        self._lock = threading.Lock()  # of what follows, and of the order in which the others hear of it
        self._digest = StepDigest()
        self._collected: list[StepId] = []  # and the followers have not been told

    def begin(self) -> None:
        """All ranks are ready: watch them from now on."""
        self._ranks.begin(self._agreement.look, self._check_soon)

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step on all ranks and return at once."""
        with self._lock:
            self._ranks.send(Kind.STEP, self._told() + encode(plan))
        ticket = self._inner.launch(plan)
        self._inner.watch(ticket, partial(self._note, plan.step))
        return ticket

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step; raises StepFailure if it broke, on all ranks, and RankError if one is lost."""
        try:
            result = self._collect(ticket)
        except StepFailure as error:
            self._note(ticket.step, error)
            self._agreement.await_all_broke(ticket.step)
            with self._lock:
                self._collected.append(ticket.step)
            raise
        except RoostError as error:
            raise self._ranks.lose(f"step {ticket.step} broke for good on rank 0: {first_line(error)}") from error
        if self._ranks.lost is not None:
            raise self._ranks.lost
        with self._lock:
            self._collected.append(ticket.step)
            self._digest.add(result)
            if self._digest.num_steps == CHECK_STEPS:
                self._check()
        return result

    def close(self) -> None:
        """End all ranks."""
        self._ranks.close()
        self._inner.close()
        self._group.abort()

    def _collect(self, ticket: Ticket) -> StepResult:
        """Collect a step of rank 0; on a device beside the host, a wait for another rank has no limit of its own."""
        if not self._inner.runs_beside_the_host:
            return self._inner.collect(ticket)
        self._agreement.waits(ticket.step)
        try:
            return self._inner.collect(ticket)
        finally:
            self._agreement.waits(None)

    def _note(self, step: StepId, error: BaseException | None) -> None:
        """A step was started, or broke: the others must hear of that before anybody waits for it."""
        if isinstance(error, StepFailure):
            self._agreement.broke(step, self._group.num_calls, first_line(error))

    def _check_soon(self) -> None:
        """Compare what came of the steps since the last check, if there are any; on a thread of the ranks'."""
        with self._lock:
            if self._digest.num_steps:
                self._check()

    def _check(self) -> None:
        digest, self._digest = self._digest, StepDigest()
        self._agreement.check(digest, self._told())

    def _told(self) -> bytes:
        """The steps that were collected, as the followers are told: they do so, too, before anything else."""
        steps, self._collected = self._collected, []
        return _COUNT.pack(len(steps)) + b"".join(_STEP.pack(step) for step in steps)


def collected_of(payload: bytes) -> tuple[list[StepId], bytes]:
    """The steps to collect that a message begins with, and what comes after them."""
    (count,) = _COUNT.unpack_from(payload)
    end = _COUNT.size + count * _STEP.size
    return [StepId(step) for (step,) in _STEP.iter_unpack(payload[_COUNT.size : end])], payload[end:]
