"""Late planning: how long the loop may wait, while a step runs, before it plans the next one.

With steps that overlap, the next one could be planned as soon as one begins to run; whoever arrives during that step
would then wait for two. So the plan is made shortly before the running step is expected to end. If the device is found
idle more than once, the loop waits less; where little is known, or steps are short, it does not wait. Never waits
itself. Called by the loop.
"""

from roost.step_times.median import Median
from roost.step_times.times import StepTimes

_STEP_LEAST = 4_000_000  # nanoseconds: while a shorter step runs, waiting gains nothing
_LEAD_LEAST = 1_500_000  # nanoseconds that a plan is made before the running step ends, at least
_LEAD_HOST = 3  # and at least so many times what the host takes to plan and launch
_LEAD_PART = 0.15  # and at least this part of the step: predictions are no better
_STEPS_KNOWN = 8  # plans after which the host's time is taken as known
_BLOCKED_LEAST = 200_000  # nanoseconds: a result that came sooner was there before it was asked for
_CAUTION_STEP = 1_000_000  # nanoseconds added to the lead when the device was idle, on top of twice what was added
_CAUTION_DECAY = 7 / 8  # with every step that was not


class LatePlanning:
    """When the next step is planned."""

    def __init__(self) -> None:
        self._host = Median()  # time of a plan and its launch
        self._num_plans = 0
        self._caution = 0.0  # nanoseconds that plans are made earlier, since predictions were too long
        self._waited = False  # whether the loop waited before the last plan

    def plan_at(self, times: StepTimes, began: int) -> int:
        """When to plan the next step, if the running one began at `began`; not later than that: at once."""
        self._waited = False
        expected = times.of_running()
        if expected is None or expected < _STEP_LEAST or self._num_plans < _STEPS_KNOWN:
            return began
        lead = max(_LEAD_LEAST, _LEAD_HOST * self._host.value, _LEAD_PART * expected) + self._caution
        self._waited = lead < expected
        return began + max(0, int(expected - lead))

    def launched(self, host_time: int) -> None:
        """A step was planned and launched, which took the host so long."""
        self._num_plans += 1
        self._host.add(host_time)

    def is_too_late(self, blocked: int) -> bool:
        """Whether the device had ended a step before the one after it, planned late, was launched.

        `blocked` is how long the loop then waited for the result of that step.
        """
        if not self._waited:
            return False
        was_idle = blocked < _BLOCKED_LEAST
        self._caution = 2 * self._caution + _CAUTION_STEP if was_idle else _CAUTION_DECAY * self._caution
        return was_idle
