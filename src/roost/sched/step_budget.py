"""Step budget: how many prompt tokens the next step may have, so that it takes about as long as it should.

Steps were measured (`step_times`), and the target is a time: `--itl-target-ms`. Beside decode rounds prompts have what
the rounds leave of it, and at least a quarter of the step's time, so a full batch never starves a prompt. Without
rounds nobody waits for the next token, only newcomers for their first: such a step may take longer. Called by the
planner.
"""

from roost.config.options import ITL_TARGET_MS, ITL_TARGET_ROUNDS
from roost.graph_sizes import fill_size
from roost.sched.state import State

_MS = 1_000_000  # nanoseconds
_FIRST = 512  # prompt tokens of a step before anything was measured
_GROWTH = 2  # a step has at most so many times the prompt tokens of the largest that was measured
_PREFILL_PART = 1 / 4  # of the time of a mixed step, at least
_TARGETS_ALONE = 4  # a step without rounds may take so many targets
_DRAFTED_PART = 1 / 2  # of the target: where prompts wait, rounds with drafts take no more


def target_ns(state: State, num_rounds: int) -> float:
    """The time that a step of so many rounds and some prompt tokens aims at."""
    given = state.resolved.sched.itl_target_ms
    if given is not None:
        return given * _MS
    times, num_rounds = state.step_times, max(1, num_rounds)
    width = state.resolved.widths.of(num_rounds)[0]
    rounds = max(times.of_rounds(num_rounds, width) or 0.0, times.of_rounds_beside(num_rounds, width) or 0.0)
    return max(ITL_TARGET_MS * _MS, ITL_TARGET_ROUNDS * rounds)


def prompt_budget(state: State, num_rounds: int, width: int, num_waiting: int, *, delays: bool) -> int:
    """Prompt tokens of the next step, beside `num_rounds` rounds; `num_waiting` wait, `delays`: so do other rounds."""
    times, target, least = state.step_times, target_ns(state, num_rounds), 1
    if num_rounds:
        rounds = times.of_rounds_beside(num_rounds, width)
        if rounds is not None:
            time_least = rounds / (1 - _PREFILL_PART)
            least = max(1, int(times.num_tokens_within(num_rounds, width, time_least) or 1))
            target = max(target, time_least)
    elif not delays:
        target *= _TARGETS_ALONE
    most = min(state.resolved.chunk, max(_FIRST, _GROWTH * times.num_tokens_seen))
    fitting = times.num_tokens_within(num_rounds, width, target)
    budget = min(most, _FIRST if fitting is None else max(1, int(fitting)))
    if num_waiting <= budget:
        return budget
    return fill_size(state.resolved.step_sizes, num_rounds * width, min(least, budget), budget)


def narrowed(state: State, num_rounds: int, width: int) -> int:
    """The width of rounds beside prompts that wait: the chosen one, or a narrower one that leaves them enough time."""
    times, most = state.step_times, _DRAFTED_PART * target_ns(state, num_rounds)
    if not times.is_measured(num_rounds, width) or (times.of_rounds_beside(num_rounds, width) or 0.0) <= most:
        return width
    narrower = [each for each in state.resolved.widths.of(num_rounds) if each < width]
    fitting = [each for each in narrower if (times.of_rounds_beside(num_rounds, each) or 0.0) <= most]
    return max(fitting, default=min(narrower, default=width))
