"""Promises: what users may count on beyond right tokens, watched over one engine.

Nothing is taken from anybody without need (`waste.py`), whoever can run does (`progress.py`), whoever can start does
(`waiting.py`). Fed with the engine's trace, its plans and its ticks, by the simulator and by tests of the scheduler.
"""

from roost.obs.trace import Note
from roost.sched.request import Mark, Request
from roost.sched.state import State
from roost.step import StepPlan
from tests.sim.progress import Progress
from tests.sim.waiting import Waiting
from tests.sim.waste import Waste


class Promises:
    """Watches one engine."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._waste, self._progress, self._waiting = Waste(state), Progress(state), Waiting(state)

    def preempt(self, request: Request) -> None:
        """Have a request preempted, as if its pages were needed."""
        self._state.mark(request, Mark.PREEMPT)
        self._waiting.preempted(request.id)

    def noted(self, note: Note, no_pages_for: int | None = None) -> None:
        """The engine notes something; `no_pages_for` is a lease that was denied pages by a fault."""
        kind, subject, numbers = note
        requests = self._state.requests
        if kind == "admit":
            self._waste.admitted()
            self._waiting.admitted(requests[subject])
        elif kind == "reclaim":
            self._waiting.reclaimed()
        elif kind == "preempt":
            self._waste.preempted(subject, *numbers)
            self._waiting.preempted(subject)
        elif kind == "sit_out":
            self._waste.sits_out(subject, is_injected=requests[subject].lease.id == no_pages_for)
            self._progress.sits_out(subject)
        elif kind == "suspend":
            self._waiting.suspended(requests[subject])
        elif kind == "fail":
            self._progress.broke()
            self._waiting.broke(numbers[0])

    def launched(self, plan: StepPlan, requests: list[Request]) -> None:
        """A step is launched, with these requests as its rows."""
        self._waste.launched(plan, requests)
        self._progress.launched(plan, requests)
        self._waiting.launched(plan.step)

    def after_tick(self) -> None:
        """The loop has turned once."""
        self._waste.after_tick()
        self._progress.after_tick()
        self._waiting.after_tick()
