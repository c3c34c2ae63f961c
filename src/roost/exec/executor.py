"""Executor: the step seam on torch. Steps run one after the other on a thread of their own, in launch order.

`launch` returns at once, so the loop plans the next step while this one runs. A step launched behind one that broke
breaks too, until the loop has collected it. Never changes a plan. Called by the loop, from one thread.
"""

from concurrent.futures import Future, ThreadPoolExecutor

import torch

from roost.config import Resolved
from roost.errors import InvariantError, StepFailure
from roost.exec.runner import Runner
from roost.models.model import Head, Model
from roost.step import StepId, StepPlan, StepResult, Ticket


class TorchExecutor:
    """Runs steps of a model, and of a draft head if there is one, on a device."""

    def __init__(self, model: Model, resolved: Resolved, device: torch.device, head: Head | None = None) -> None:
        windows = {book.window for book in resolved.books}
        if not windows >= set(model.kv.windows):
            raise InvariantError(f"books of windows {windows} do not serve layers of windows {set(model.kv.windows)}")
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self.runner = self._worker.submit(
            Runner, model, resolved, device, head
        ).result()  # whatever computes, does so there
        self._out: dict[StepId, Future[StepResult]] = {}  # launched and not collected, in launch order

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step and return at once."""
        before = next(reversed(self._out.values()), None)
        self._out[plan.step] = self._worker.submit(self._run, plan, before)
        return Ticket(step=plan.step)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step; raises StepFailure if it, or one before it, broke."""
        if ticket.step not in self._out:
            raise InvariantError(f"step {ticket.step} is not out: it was never launched, or collected before")
        return self._out.pop(ticket.step).result()

    def close(self) -> None:
        """End the thread, once what was launched has run."""
        self._worker.shutdown()

    def _run(self, plan: StepPlan, before: Future[StepResult] | None) -> StepResult:
        """On the worker: one step, unless the step it builds on broke."""
        try:
            self.runner.apply(plan)  # broken or not: rows keep their entries, whatever became of a step
            if before is not None and before.exception() is not None:
                raise StepFailure(f"step {plan.step} was launched behind one that broke")
            return self.runner.run(plan)
        except (InvariantError, StepFailure):
            raise
        except Exception as error:  # whatever broke on the device, the loop's answer is the same
            raise StepFailure(f"step {plan.step} broke: {error}") from error
