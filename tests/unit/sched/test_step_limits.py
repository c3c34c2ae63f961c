"""Step limits: the size that a device can run is learned from few failed steps, and raised when it can run more."""

from collections.abc import Callable
from math import ceil, log2

import pytest

from roost.draft_length.choice import DraftLengthPolicy
from roost.messages import Finished, GetStats, Stats, Submit
from roost.sched.step_limits import PATIENCE, SizeLimit, StepLimits
from roost.step import StepPlan
from tests.support.engine_client import EngineClientDouble, engine_client, resolved, witness
from tests.unit.sched.test_engine import Breaking

NOBODY: frozenset[int] = frozenset()


def _drive(limit: SizeLimit, wanted: int, works: Callable[[int], bool], num_steps: int) -> int:
    """Steps as large as somebody wants and the limit allows; how many broke. After each, everybody goes alone."""
    num_broken = 0
    for _ in range(num_steps):
        size = wanted if limit.most is None else min(wanted, limit.most)
        if works(size):
            limit.worked(size)
        else:
            num_broken += 1
            limit.broke(size, NOBODY)
            limit.worked(1)
    return num_broken


@pytest.mark.parametrize("most", [1, 2, 3, 20, 63, 64, 100, 255])
@pytest.mark.parametrize("wanted", [2, 64, 256])
def test_a_device_that_is_too_small_breaks_few_steps_in_a_long_time(wanted: int, most: int) -> None:
    limit, num_steps = SizeLimit(), 20_000
    num_broken = _drive(limit, wanted, lambda size: size <= most, num_steps)
    assert num_broken <= ceil(log2(wanted)) + log2(num_steps / PATIENCE) + 1
    if most < wanted:
        assert num_broken >= 1 and limit.most is not None
        assert most // 2 <= limit.good <= most  # at least half of what works is used, and more in time


def test_a_size_that_is_reached_step_by_step_is_known_exactly_after_one_that_broke() -> None:
    limit = SizeLimit()
    for size in range(1, 41):
        limit.worked(size)
    limit.broke(41, NOBODY)
    assert limit.most == 40


def test_a_larger_step_is_tried_after_so_many_good_ones_and_not_before() -> None:
    limit = SizeLimit()
    limit.broke(64, NOBODY)
    for _ in range(PATIENCE - 1):
        limit.worked(32)
    assert limit.most == 32
    limit.worked(32)
    assert limit.most == 48


def test_a_fault_that_passes_limits_nobody_for_ever() -> None:
    limit = SizeLimit()
    limit.broke(64, NOBODY)
    assert limit.most == 32
    assert _drive(limit, 64, lambda size: True, 7 * PATIENCE) == 0
    assert limit.most is None


@pytest.mark.parametrize("width", [2, 5, 7])
def test_a_fault_that_passes_limits_nobody_also_where_sizes_come_in_widths(width: int) -> None:
    limit = SizeLimit()
    for number in range(1, 20):
        limit.worked(number * width)
    limit.broke(20 * width, NOBODY)
    for _ in range(400 * PATIENCE):
        if limit.most is None:
            break
        limit.worked(limit.most // width * width)
    assert limit.most is None


# --- in the engine ----------------------------------------------------------------------------------------------------


def _serve(
    is_bad: Callable[[StepPlan], bool], num_requests: int = 40, **sched: int | bool
) -> tuple[EngineClientDouble, Breaking]:
    """Many requests on a device that breaks some steps."""
    options: dict[str, int | bool] = {"max_running": 8, "max_queued": 100, "num_pages": 200, **sched}
    executor = Breaking(witness(resolved(**options)), is_bad, at_launch=False)  # type: ignore[arg-type]
    at = engine_client(executor, **options)
    for number in range(num_requests):
        tokens = (number % 48, 2, 3, 4, 5, 6, 7, 8, 9, 10)
        at.engine.post(Submit(request_id=f"r{number}", tokens=tokens, max_new_tokens=20), at.events.append)
    while at.engine.has_work:
        at.tick()
    return at, executor


def _reasons(at: EngineClientDouble) -> set[str]:
    return {event.reason for event in at.events if isinstance(event, Finished)}


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("rows_max", [1, 3, 5, 7])
def test_a_device_for_few_rows_breaks_few_steps_and_ends_nobody(rows_max: int, overlap: bool) -> None:
    at, executor = _serve(lambda plan: len(plan.rows) > rows_max, overlap=overlap)
    totals = at.engine.state.totals
    tries = log2(totals.steps / PATIENCE)
    assert _reasons(at) == {"length"}
    assert totals.failed_steps <= (1 + overlap) * (log2(8) + tries + 1)
    assert totals.preemptions <= 8 * executor.num_broken


@pytest.mark.parametrize("tokens_max", [1, 2, 7, 10, 16])
def test_a_device_for_few_tokens_makes_chunks_and_batches_shorter(tokens_max: int) -> None:
    at, _ = _serve(lambda plan: int(plan.query_lens.sum()) > tokens_max, overlap=False)
    totals = at.engine.state.totals
    assert _reasons(at) == {"length"}
    assert totals.failed_steps <= log2(16 + 8) + log2(totals.steps / PATIENCE) + 1


def test_what_one_request_breaks_alone_limits_nobody() -> None:
    def has_bad_prompt(plan: StepPlan) -> bool:
        return 49 in plan.tokens[plan.token_offsets[:-1][plan.start_positions == 0]].tolist()

    at, executor = _serve(has_bad_prompt, num_requests=0)
    for number in range(5):
        tokens = (49 if number == 3 else 1, 2, 3, 4, 5, 6)
        at.engine.post(Submit(request_id=f"r{number}", tokens=tokens, max_new_tokens=20), at.events.append)
    at.run()
    assert [at.finished(f"r{number}").reason for number in range(5)] == ["length"] * 3 + ["error", "length"]
    assert executor.num_broken == 2
    limits = at.engine.state.step_limits
    assert (limits.rows.most, limits.tokens.most) == (None, None)
    assert max(map(len, executor.launched)) == 4


def test_a_size_that_has_worked_is_suspected_only_when_it_breaks_again() -> None:
    broken: list[int] = []

    def breaks(plan: StepPlan) -> bool:
        is_bad = len(plan.rows) == 4 and plan.step > 8 and len(broken) < 2
        broken.extend([plan.step] * is_bad)
        return is_bad

    at, _ = _serve(breaks, num_requests=4, overlap=False, max_running=4)
    limits = at.engine.state.step_limits
    assert len(broken) == 2 and _reasons(at) == {"length"}
    assert limits.rows.most is not None and limits.rows.most < 4


def test_what_is_in_force_is_told() -> None:
    at, _ = _serve(lambda plan: len(plan.rows) > 3, num_requests=4, overlap=False)
    for number in range(4):
        at.engine.post(Submit(request_id=f"s{number}", tokens=(1,), max_new_tokens=8), at.events.append)
    at.tick(2)
    assert at.engine.waiting_for == "2 requests run: larger steps failed"
    (stats,) = at.send(GetStats())
    assert isinstance(stats, Stats) and (stats.step_rows_max, stats.step_tokens_max) == (2, 16)


def test_a_row_always_has_a_place_in_an_empty_step() -> None:
    limits = StepLimits(rows=SizeLimit(most=1), tokens=SizeLimit(most=2))
    assert limits.has_place(0, 0, 5) and not limits.has_place(1, 1, 1)


def test_where_tokens_are_few_rounds_are_narrow_and_all_of_them_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        DraftLengthPolicy, "choose", lambda self, num_rounds, has_prefill: self._widths.of(num_rounds)[-1]
    )
    at = engine_client(
        witness(resolved(spec="ngram", max_running=8, num_pages=200)), spec="ngram", max_running=8, num_pages=200
    )
    limit = at.engine.state.step_limits.tokens
    limit.most, limit.good, limit.bad, limit.patience = 8, 8, 1000, 10**9
    for number in range(3):
        tokens = tuple([1, 2, 3, 4] * 3)
        at.engine.post(Submit(request_id=f"r{number}", tokens=tokens, max_new_tokens=40), at.events.append)
    for _ in range(30):
        at.tick()
    rows = [request.output_len for request in at.engine.state.running]
    assert len(rows) == 3 and min(rows) > max(rows) // 4, rows
    while at.engine.has_work:
        at.tick()
