"""Progress is a promise: how many steps a prompt waits for its first token, and that nobody stands still for it.

The script holds every step to the rules of `tests/sim/progress.py`; here are the bounds that follow from them.
"""

import pytest

from roost.sched.state import State
from roost.step import StepPlan
from tests.sim.progress import prompt_budget
from tests.sim.script import CHAIN, Handle, Script, Setting, depths, prompt_of

NUM_DECODING = 3
SHORT, LONG = 6, 80


def _decoding(setting: Setting) -> Script:
    """A script in which a few long answers are under way, so that all rounds of a step are known."""
    script = Script(setting)
    handles = [script.submit(prompt_of(2, salt), 90) for salt in range(NUM_DECODING)]
    script.until(lambda: all(handle.tokens for handle in handles))
    return script


def _least(script: Script) -> int:
    """Prompt tokens that each step with prefill has at least, beside the answers under way."""
    num_rounds = NUM_DECODING if script.state.resolved.sched.mixed else 0
    return prompt_budget(script.state, num_rounds, CHAIN.tokens)[0]


def _steps_to_first_token(script: Script, handle: Handle) -> int:
    """Steps launched from now until the one that brought the first token, those launched behind it left out."""
    num_before = len(script.watch.plans)
    script.until(lambda: bool(handle.tokens))
    return len(script.watch.plans) - num_before - (1 + script.state.resolved.depth)


def _setting(mixed: bool, overlap: bool, chunk: int) -> Setting:
    return Setting(spec=CHAIN, chunk=chunk, mixed=mixed, overlap=overlap, num_pages=400, max_running=9, draft_skill=0)


def _rows(state: State) -> set[int]:
    """The rows of the answers under way."""
    return {request.row for request in state.running[:NUM_DECODING] if request.row is not None}


@depths
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("chunk", [64, 12, 3])
def test_a_prompt_beside_a_full_batch_takes_the_steps_of_its_share(mixed: bool, overlap: bool, chunk: int) -> None:
    """Its n tokens take n / b steps of b prompt tokens; without mixed steps each has one of rounds before it."""
    script = _decoding(_setting(mixed, overlap, chunk))
    num_steps = -(-LONG // _least(script))
    handle = script.submit(prompt_of(LONG, 9), 1)
    assert _steps_to_first_token(script, handle) <= (num_steps if mixed else 2 * num_steps)


@depths
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("chunk", [64, 32, 12])
def test_short_prompts_beside_a_flood_of_long_ones_wait_for_shorter_ones_alone(
    mixed: bool, overlap: bool, chunk: int
) -> None:
    """The shorter have b / 2 of a step, the shortest first: 2 (n + s) / b steps, with s tokens shorter than n."""
    script = _decoding(_setting(mixed, overlap, chunk))
    for salt in range(3):
        script.submit(prompt_of(LONG, 10 + salt), 1)
    script.tick(2)
    others = [script.submit(prompt_of(SHORT - 1, 20 + number), 1) for number in range(2)]
    handle = script.submit(prompt_of(SHORT, 30), 1)
    work = SHORT + sum(len(each.submit.tokens) for each in others)
    num_steps = -(-work // max(1, _least(script) // 2))
    assert _steps_to_first_token(script, handle) <= (num_steps if mixed else 2 * num_steps)
    assert all(each.tokens for each in others)


@depths
def test_prompts_that_keep_coming_leave_every_answer_its_round_in_every_step(overlap: bool) -> None:
    script = _decoding(_setting(True, overlap, 8))
    rows, first = _rows(script.state), len(script.watch.plans)
    for salt in range(4):
        script.submit(prompt_of(40, 10 + salt), 1)
        script.tick(2)
    plans = script.watch.plans[first:]
    assert all(rows <= _round_rows(plan) for plan in plans)
    assert sum(plan.is_prefill.any() for plan in plans) == len(plans), "and each has prefill beside them"


@depths
def test_without_mixed_steps_prefill_and_rounds_take_turns(overlap: bool) -> None:
    script = _decoding(_setting(False, overlap, 8))
    rows, first = _rows(script.state), len(script.watch.plans)
    for salt in range(4):
        script.submit(prompt_of(40, 10 + salt), 1)
        script.tick(2)
    plans = script.watch.plans[first:]
    assert [bool(plan.is_prefill.any()) for plan in plans] == [True, False] * (len(plans) // 2)
    assert all(rows <= _round_rows(plan) for plan in plans[1::2])


def _round_rows(plan: StepPlan) -> set[int]:
    return set(plan.rows[~plan.is_prefill].tolist())


@depths
def test_who_waits_for_pages_starts_in_the_tick_in_which_they_are_on_their_way(overlap: bool) -> None:
    """The pages of a request that ends retire while a step in flight may write them: they are promised at once."""
    script = Script(Setting(spec=CHAIN, num_pages=14, overlap=overlap, context=48, draft_skill=0))
    first = script.submit(prompt_of(30), 8)
    script.tick()
    second = script.submit(prompt_of(30, 1), 8)
    script.until(lambda: first.end is not None)
    assert script.request(second).row is not None
    script.run()


@depths
def test_a_shortage_costs_the_last_in_line_its_pages_and_nobody_else(overlap: bool) -> None:
    """Three answers outgrow the pool; each time, the last one alone is preempted, and it comes back when one ends."""
    script = Script(Setting(spec=CHAIN, num_pages=33, overlap=overlap, max_running=3, context=64, draft_skill=0))
    handles = [script.submit(prompt_of(16, salt), 40) for salt in range(3)]
    script.until(lambda: script.state.totals.preemptions > 0)
    assert [request.id for request in script.state.running] == [each.submit.request_id for each in handles[:2]]
    script.until(lambda: any(each.end is not None for each in handles))
    assert script.state.totals.preemptions == 1 and handles[2].end is None
    script.run()
