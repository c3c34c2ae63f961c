"""Executor: the step seam on torch. Steps run one after the other, in launch order.

`launch` returns at once, so the loop plans the next step while this one runs: on a thread of its own where the host
computes, by itself where the device runs beside the host. A step launched behind one that broke breaks too, until the
loop has collected it. Never changes a plan. Called by the loop, from one thread.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import torch

from roost.config.resolved import Resolved
from roost.device.open import open_device
from roost.errors import InvariantError, StepFailure
from roost.grammar.matcher import NewMatcher
from roost.models.model import Head, Model
from roost.runner.runner import Finish, Runner
from roost.step import StepId, StepPlan, StepResult, Ticket

P = ParamSpec("P")
T = TypeVar("T")


class TorchExecutor:
    """Runs steps of a model, and of a draft head if there is one, on a device."""

    def __init__(
        self,
        model: Model,
        resolved: Resolved,
        device: torch.device,
        head: Head | None = None,
        new_matcher: NewMatcher | None = None,
    ) -> None:
        opened = self._device = open_device(device)
        self._worker = None
        if not opened.runs_beside_the_host:
            self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="step")
        self.runner = self._begin(
            Runner, model, resolved, opened, head, new_matcher
        ).result()  # whatever computes, does so there
        self._out: dict[StepId, Future[Finish]] = {}  # launched and not collected, in launch order

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step and return at once."""
        before = next(reversed(self._out.values()), None)
        self._out[plan.step] = self._begin(self._start, plan, before)
        return Ticket(step=plan.step)

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step; raises StepFailure if it, or one before it, broke."""
        if ticket.step not in self._out:
            raise InvariantError(f"step {ticket.step} is not out: it was never launched, or collected before")
        finish = self._out.pop(ticket.step).result()
        try:
            return finish()
        except torch.AcceleratorError as error:  # what broke on a device beside the host shows only now, and for good
            raise InvariantError(f"the device is lost: {error}") from error

    def watch(self, ticket: Ticket, told: Callable[[BaseException | None], None]) -> None:
        """Have somebody told when a step that was just launched has been started, or why it broke there."""
        self._out[ticket.step].add_done_callback(lambda started: told(started.exception()))

    @property
    def runs_beside_the_host(self) -> bool:
        """Whether a launched step goes on by itself."""
        return self._device.runs_beside_the_host

    def close(self) -> None:
        """End the thread, once what was launched has run."""
        if self._worker is not None:
            self._worker.shutdown()

    def _begin(self, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Have some work done: on the worker, or here and now."""
        if self._worker is not None:
            return self._worker.submit(work, *args, **kwargs)
        future: Future[T] = Future()
        try:
            future.set_result(work(*args, **kwargs))
        except BaseException as error:  # noqa: BLE001 (kept for whoever asks, as a worker keeps it)
            future.set_exception(error)
        return future

    def _start(self, plan: StepPlan, before: "Future[Finish] | None") -> Finish:
        """Start one step, unless the step it builds on broke."""
        try:
            with torch.inference_mode(), self._device.forward():
                self.runner.apply(plan)  # broken or not: rows keep their entries, whatever became of a step
                if before is not None and before.exception() is not None:
                    raise StepFailure(f"step {plan.step} was launched behind one that broke")
                return self.runner.run(plan)
        except (InvariantError, StepFailure):
            raise
        except torch.AcceleratorError as error:
            raise InvariantError(f"the device is lost: {error}") from error
        except Exception as error:  # whatever broke on the device, the loop's answer is the same
            raise StepFailure(f"step {plan.step} broke: {error}") from error
