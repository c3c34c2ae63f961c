"""Step times: how long a step takes, learned from the steps that ran, and predicted for those that may.

A step of rounds alone has a running median for each batch size and width. What prompt tokens add is learned in
`prompt_tokens`; the rest of a mixed step is the time of its rounds beside them. Says, too, which times tell exactly
what a step costs. Deterministic: time comes in from the loop. Part of the scheduler's state; fed by planner and settle.
"""

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from roost.graph_sizes import batch_sizes
from roost.step import StepId
from roost.step_times.median import NUM_KEPT, Median, weighted_median
from roost.step_times.prompt_tokens import PromptTokenTime

_NUM_KNOWN = 3  # steps of a kind after which their time is good enough to wait for

Key = tuple[int, int]  # index of the batch size, width


@dataclass(slots=True)
class TimedStep:
    """A step in flight, and its time once it was collected."""

    num_rounds: int
    width: int  # of its rounds; 0 without any
    num_tokens: int  # prompt tokens beside the rounds
    planned_at: int
    is_steady: bool  # planned as soon as a step was collected, or late by intention, with the usual number in flight
    time: int = 0  # once collected, if it is exact; else 0
    is_alone: bool = False  # whether neither this step nor its neighbours have prompt tokens


class StepTimes:
    """What was learned about the times of steps."""

    def __init__(self, rounds_max: int, depth: int) -> None:
        self._sizes, self._depth = batch_sizes(rounds_max), depth
        self.prompt_tokens = PromptTokenTime()
        self.num_tokens_seen = 0  # most prompt tokens of a step that was measured
        # by (index of the batch size, width): steps of rounds alone, and (time, prompt tokens) of mixed steps
        self._alone: dict[Key, Median] = {}
        self._beside: dict[Key, deque[tuple[int, int]]] = {}
        self._out: dict[StepId, TimedStep] = {}
        self._collected_at: int | None = None  # when the last step was collected; None: there was none, or it failed
        self._collected_chunks = True  # whether that step had prefill chunks
        self._plan_at: int | None = None  # when the next step is planned, if the loop does not rest

    # --- what happens ------------------------------------------------------------------------------------------

    def planned(self, step: StepId, num_rounds: int, width: int, num_tokens: int, *, num_out: int, now: int) -> None:
        """A step was planned, of `num_rounds` rounds and `num_tokens` prompt tokens, while `num_out` are in flight."""
        is_steady = num_out == self._depth and now == self._plan_at
        self._out[step] = TimedStep(num_rounds, width if num_rounds else 0, num_tokens, now, is_steady)

    def plans_late(self, now: int) -> None:
        """The loop has waited with the next plan, by intention, until now."""
        if self._plan_at is not None:
            self._plan_at = now

    def device_rested(self) -> None:
        """The next step was launched when the device had nothing to do: the time since is not all its own."""
        for each in self._out.values():
            each.is_steady = False

    def collected(self, step: StepId, now: int) -> TimedStep:
        """A step was collected; returns it with its time.

        That is the time from the end of the step before to its own end, if the loop did not rest in between: at
        depth 0 host and device time together, at depth 1 the longer of the two. The host's work for a step may fall
        into the time of the step before. So a time is exact only if the neighbours are like the step: all of them with
        prefill chunks, or all without.
        """
        mine = self._out.pop(step)
        before, self._collected_at, self._plan_at = self._collected_at, now, now
        around = {self._collected_chunks, *[each.num_tokens > 0 for each in self._out.values()]}
        self._collected_chunks = mine.num_tokens > 0
        mine.is_alone = not mine.num_tokens and around == {False}
        if mine.is_steady and before is not None and (mine.is_alone or around == {True}):
            mine.time = now - before
        time = now - (mine.planned_at if before is None else max(before, mine.planned_at))
        if time > 0:
            self._learn(mine, time)
        return mine

    def failed(self) -> None:
        """All steps in flight are void."""
        self._out.clear()
        self._collected_at = self._plan_at = None

    def _learn(self, step: TimedStep, time: int) -> None:
        key = bisect_left(self._sizes, step.num_rounds), step.width
        if not step.num_tokens:
            if key not in self._alone:
                self._alone[key] = Median()
            self._alone[key].add(time)
            return
        self.num_tokens_seen = max(self.num_tokens_seen, step.num_tokens)
        self.prompt_tokens.note(step.num_rounds, step.width, step.num_tokens, time)
        if step.num_rounds:
            self._beside.setdefault(key, deque(maxlen=NUM_KEPT)).append((time, step.num_tokens))

    # --- what is expected --------------------------------------------------------------------------------------

    @property
    def has_chunks_around(self) -> bool:
        """Whether a step in flight, or the last one that was collected, has prefill chunks."""
        return self._collected_chunks or any(each.num_tokens for each in self._out.values())

    def is_measured(self, num_rounds: int, width: int) -> bool:
        """Whether rounds of a width were seen with about so many of them."""
        key = bisect_left(self._sizes, num_rounds), width
        return key in self._alone or key in self._beside

    def of_rounds(self, num_rounds: int, width: int) -> float | None:
        """Time of a step of rounds alone; None if nothing is known."""
        found = self._alone.get((bisect_left(self._sizes, num_rounds), width))
        return found.value if found is not None else self._guess(num_rounds, width)

    def of_rounds_beside(self, num_rounds: int, width: int) -> float | None:
        """Time of a mixed step without its prompt tokens; None if nothing is known.

        Where the weights are read once for all, that is less than of rounds alone.
        """
        token_time = self.prompt_tokens.beside_rounds
        if not self._beside or token_time is None:
            return self.of_rounds(num_rounds, width)
        at = bisect_left(self._sizes, num_rounds)
        samples = self._beside.get((at, width))
        if samples is None:
            near = min(self._beside, key=lambda each: (abs(each[0] - at), abs(each[1] - width), each))
            samples = self._beside[near]
        return max(0.0, weighted_median((time - tokens * token_time, tokens) for time, tokens in samples))

    def num_tokens_within(self, num_rounds: int, width: int, time: float) -> float | None:
        """How many prompt tokens a step with these rounds can have if it may take so long; None if nothing is known.

        At least what follows from each of the last such steps: k times its prompt tokens take k times as long at most.
        """
        if not num_rounds:
            token_time = self.prompt_tokens.by_itself
            return None if token_time is None else time / token_time
        token_time, rounds = self.prompt_tokens.beside_rounds, self.of_rounds_beside(num_rounds, width)
        if token_time is None or rounds is None:
            return None
        seen = self._beside.get((bisect_left(self._sizes, num_rounds), width), ())
        certain = max((tokens * time / taken for taken, tokens in seen if taken <= time), default=0.0)
        return max(certain, (time - rounds) / max(token_time, 1.0))

    def of_running(self) -> float | None:
        """Time that the step on the device takes at least, the oldest in flight; None if too little is known.

        A step that is larger than those that were measured is taken to be as large as they were.
        """
        running = next(iter(self._out.values()), None)
        if running is None:
            return None
        if not running.num_rounds:
            return self.prompt_tokens.of_chunks(running.num_tokens)
        key = bisect_left(self._sizes, running.num_rounds), running.width
        beside = self._beside.get(key, ())
        if running.num_tokens and len(beside) >= _NUM_KNOWN:
            token_time = self.prompt_tokens.beside_rounds or 0.0
            rounds = self.of_rounds_beside(running.num_rounds, running.width) or 0.0
            return rounds + token_time * min(running.num_tokens, max(tokens for _, tokens in beside))
        alone = self._alone.get(key)
        return alone.value if alone is not None and alone.num_samples >= _NUM_KNOWN else None

    def _guess(self, num_rounds: int, width: int) -> float | None:
        """Time of rounds alone that were not measured: between batch sizes of the nearest width that were."""
        if not self._alone:
            return None
        near = min((each for _, each in self._alone), key=lambda each: (abs(each - width), each))
        times = {self._sizes[at]: median.value for (at, each), median in self._alone.items() if each == near}
        return _between(sorted(times.items()), num_rounds)


def _between(points: Iterable[tuple[int, float]], at: int) -> float:
    """The value at a place between (place, value) pairs, in order; outside of them, that of the nearest."""
    below: tuple[int, float] | None = None
    for place, value in points:
        if place >= at:
            if below is None:
                return value
            return below[1] + (value - below[1]) * (at - below[0]) / (place - below[0])
        below = place, value
    assert below is not None
    return below[1]
