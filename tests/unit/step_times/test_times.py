"""Step times: medians of what was seen, sensible guesses between, and which times are exact."""

import pytest

from roost.step import StepId
from roost.step_times.median import weighted_median
from roost.step_times.times import StepTimes

MS = 1_000_000


class Run:
    """Steps one after the other, at depth 0."""

    def __init__(self, rounds_max: int = 64) -> None:
        self.times, self.now, self.num_steps = StepTimes(rounds_max, 0), 0, 0

    def step(self, num_rounds: int, num_tokens: int, ms: float, width: int = 1, count: int = 1) -> None:
        """Some steps that take so long."""
        for _ in range(count):
            self.plan(num_rounds, num_tokens, width)
            self.now += int(ms * MS)
            self.times.collected(StepId(self.num_steps - 1), self.now)

    def plan(self, num_rounds: int, num_tokens: int, width: int = 1) -> None:
        """A step goes out."""
        self.times.planned(StepId(self.num_steps), num_rounds, width, num_tokens, num_out=0, now=self.now)
        self.num_steps += 1


def test_nothing_is_said_before_anything_was_seen() -> None:
    times = StepTimes(64, 0)
    assert times.of_rounds(4, 1) is times.of_rounds_beside(4, 1) is times.num_tokens_within(4, 1, MS) is None
    assert times.num_tokens_within(0, 0, MS) is times.of_running() is None


def test_rounds_have_the_median_of_their_batch_size_and_width() -> None:
    run = Run()
    for ms in (5, 6, 400, 5, 6, 6):
        run.step(4, 0, ms)
    run.step(4, 0, 9, width=3)
    run.step(16, 0, 12)
    assert [run.times.of_rounds(4, 1), run.times.of_rounds(4, 3), run.times.of_rounds(16, 1)] == [6e6, 9e6, 12e6]
    assert run.times.of_rounds(3, 1) == 6e6  # runs on the graph of four


def test_between_batch_sizes_that_were_seen_time_grows_evenly_and_beyond_them_it_stays() -> None:
    run = Run()
    run.step(8, 0, 5)
    run.step(64, 0, 12)
    assert run.times.of_rounds(36, 1) == pytest.approx(8.5e6)
    assert run.times.of_rounds(1, 1) == 5e6
    assert run.times.of_rounds(36, 4) == pytest.approx(8.5e6)  # no such width was seen: as the nearest


def test_a_prompt_token_of_a_large_step_says_more_than_one_of_a_small_step() -> None:
    run = Run()
    for num_tokens in (3, 900, 5, 2):
        run.step(0, num_tokens, 5 + 0.01 * num_tokens)
    assert run.times.num_tokens_within(0, 0, 28 * MS) == pytest.approx(28 / 14 * 900)


def test_the_running_step_is_known_after_three_like_it() -> None:
    run = Run()
    run.step(4, 0, 5, count=2)
    run.plan(4, 0)
    assert run.times.of_running() is None
    run.times.failed()
    run.step(4, 0, 5)
    run.plan(4, 0)
    assert run.times.of_running() == 5e6


def test_a_running_step_of_chunks_is_known_after_three_and_taken_to_be_no_larger_than_they_were() -> None:
    run = Run()
    run.step(0, 100, 10, count=2)
    run.plan(0, 50)
    assert run.times.of_running() is None
    run.times.failed()
    run.step(0, 100, 10)
    for num_tokens, ms in ((50, 5), (100, 10), (400, 10)):
        run.plan(0, num_tokens)
        assert run.times.of_running() == pytest.approx(ms * MS)
        run.times.failed()


def test_a_running_mixed_step_takes_as_long_as_its_rounds_until_it_is_known() -> None:
    run = Run()
    run.step(0, 100, 10, count=3)
    run.step(4, 0, 5, count=3)
    run.step(4, 100, 15, count=2)
    run.plan(4, 200)
    assert run.times.of_running() == 5e6
    run.times.failed()
    run.step(4, 100, 15)
    run.plan(4, 200)
    assert run.times.of_running() == 15e6


def test_a_step_behind_a_pause_of_the_device_has_no_exact_time() -> None:
    run = Run()
    run.step(4, 0, 5, count=3)
    run.plan(4, 0)
    run.times.device_rested()
    run.now += 5 * MS
    assert run.times.collected(StepId(run.num_steps - 1), run.now).time == 0
    run.plan(4, 0)
    run.now += 5 * MS
    assert run.times.collected(StepId(run.num_steps - 1), run.now).time == 5 * MS


def test_a_step_that_was_planned_late_by_intention_has_an_exact_time() -> None:
    for is_meant in (True, False):
        run = Run()
        run.step(4, 0, 5, count=3)
        run.now += 3 * MS
        if is_meant:
            run.times.plans_late(run.now)
        run.plan(4, 0)
        run.now += 2 * MS
        assert run.times.collected(StepId(run.num_steps - 1), run.now).time == (5 * MS if is_meant else 0)


def test_the_weighted_median_has_half_of_the_weight_on_each_side() -> None:
    assert weighted_median([(1.0, 1), (9.0, 1)]) == 1.0
    assert weighted_median([(9.0, 3), (1.0, 2), (2.0, 2)]) == 2.0
    assert weighted_median([(9.0, 5), (1.0, 2), (2.0, 2)]) == 9.0
