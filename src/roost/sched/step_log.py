"""Step log: when the last steps were planned, launched and collected, and what they carried, for people who watch.

Kept by the loop, a few numbers a step; read by the live view.
"""

from collections import deque
from dataclasses import dataclass

from roost.sched.request import LaunchedStep

STEPS_KEPT = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggedStep:
    """One step, in nanoseconds of the clock."""

    number: int
    planned_at: int
    host: int  # until it was launched
    device: int  # from its launch, or from the end of the step before it, until it was collected
    collect: int  # that the loop waited for its result
    num_rows: int
    chunk_tokens: int
    width: int
    num_tokens: int  # that it said
    has_failed: bool


class StepLog:
    """The last steps."""

    def __init__(self) -> None:
        self._last: deque[LoggedStep] = deque(maxlen=STEPS_KEPT)
        self._collected_at = 0

    def note(self, launched: LaunchedStep, asked_at: int, now: int, num_tokens: int, *, has_failed: bool) -> None:
        """A step was collected, or it failed."""
        self._last.append(
            LoggedStep(
                number=launched.plan.step,
                planned_at=launched.planned_at,
                host=launched.launched_at - launched.planned_at,
                device=now - max(launched.launched_at, self._collected_at),
                collect=now - asked_at,
                num_rows=len(launched.requests),
                chunk_tokens=sum(launched.chunks),
                width=launched.round_width if 0 in launched.chunks else 0,
                num_tokens=num_tokens,
                has_failed=has_failed,
            )
        )
        self._collected_at = now

    @property
    def last(self) -> LoggedStep | None:
        """The last step; None: there was none."""
        return self._last[-1] if self._last else None

    def since(self, number: int) -> list[LoggedStep]:
        """The steps past a number, as far as they are kept."""
        found = []
        for step in reversed(self._last):
            if step.number <= number:
                break
            found.append(step)
        return found[::-1]
