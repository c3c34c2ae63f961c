"""Step budget: prompts have what the target leaves, a quarter of the step at least, and never more than was tried."""

from dataclasses import dataclass, field, replace

import pytest

from roost.config.options import EngineConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.obs.trace import Trace
from roost.sched.state import State, new_state
from roost.sched.step_budget import narrowed, prompt_budget, target_ns
from roost.step import StepId
from tests.support.spec_configs import AUTO_CHAIN, spec_config

MS = 1_000_000
MANY = 10**6  # prompt tokens that wait


@dataclass
class Measured:
    """A scheduler that was told the times of some steps."""

    target_ms: float | None = 25.0
    chunk: int = 8192
    auto: bool = False
    now: int = 0
    num_steps: int = 0
    state: State = field(init=False)

    def __post_init__(self) -> None:
        sched = SchedConfig(max_running=64, overlap=False, chunk=self.chunk, itl_target_ms=self.target_ms)
        spec = spec_config(AUTO_CHAIN, auto=True) if self.auto else EngineConfig().spec
        resolved = resolve(EngineConfig(sched=sched, spec=spec), ModelTraits(vocab_size=100))
        self.state = new_state(resolved, Trace())

    def step(self, num_rounds: int, num_tokens: int, ms: float, width: int = 1) -> None:
        """One step ran."""
        step, times = StepId(self.num_steps), self.state.step_times
        times.planned(step, num_rounds, width, num_tokens, num_out=0, now=self.now)
        self.now += int(ms * MS)
        times.collected(step, self.now)
        self.num_steps += 1

    def budget(self, num_rounds: int, width: int = 1, delays: bool = False) -> int:
        """Prompt tokens of the next step."""
        return prompt_budget(self.state, num_rounds, width, MANY, delays=delays)


def _measured(rounds_ms: float, token_ms: float, **options: float) -> Measured:
    """Eight rounds take `rounds_ms`, a prompt token `token_ms` more."""
    at = Measured(**options)  # type: ignore[arg-type]
    for num_tokens in (512, 0, 256, 0, 700, 300, 1024, 4096, 512):
        at.step(8, num_tokens, rounds_ms + token_ms * num_tokens)
        at.step(0, 512, token_ms * 512)
    return at


@pytest.mark.parametrize(("chunk", "first"), [(8192, 512), (512, 512), (511, 511), (1, 1)])
def test_before_anything_is_measured_a_step_has_512_prompt_tokens_or_what_it_may(chunk: int, first: int) -> None:
    at = Measured(chunk=chunk)
    assert at.budget(0) == at.budget(8) == first


@pytest.mark.parametrize("target_ms", [12.5, 25, 60])
def test_a_mixed_step_has_the_prompt_tokens_that_the_target_leaves(target_ms: float) -> None:
    at = _measured(5, 0.02, target_ms=target_ms)
    assert at.budget(8) == pytest.approx((target_ms - 5) / 0.02, rel=0.02)


def test_a_step_without_rounds_may_take_four_targets_and_one_that_delays_rounds_takes_one() -> None:
    at = _measured(5, 0.05)
    assert at.budget(0) == pytest.approx(4 * 25 / 0.05, rel=0.02)
    assert at.budget(0, delays=True) == pytest.approx(25 / 0.05, rel=0.02)


@pytest.mark.parametrize("target_ms", [0.001, 5, 30, 39])
def test_prefill_has_a_quarter_of_a_step_however_long_the_rounds_take(target_ms: float) -> None:
    at = _measured(30, 0.02, target_ms=target_ms)
    assert at.budget(8) == pytest.approx(10 / 0.02, rel=0.02)


def test_a_step_has_a_prompt_token_at_least_and_no_more_than_the_ceiling() -> None:
    assert _measured(0.001, 50, target_ms=1).budget(8) == 1
    assert _measured(5, 0.0001, chunk=700).budget(8) == 700


def test_without_a_target_a_step_takes_25_ms_or_some_times_its_rounds() -> None:
    fast, slow = _measured(4, 0.02, target_ms=None), _measured(20, 1, target_ms=None)
    assert target_ns(fast.state, 8) == 25 * MS
    assert target_ns(slow.state, 8) == pytest.approx(5 * 20 * MS, rel=0.02)
    assert slow.budget(8) == pytest.approx(80, rel=0.1)


def test_where_rounds_are_never_alone_their_time_is_told_from_mixed_steps() -> None:
    at = Measured(target_ms=None)
    for num_tokens in (100, 60, 20, 80, 40, 90, 10):
        at.step(8, num_tokens, 20 + num_tokens)
    assert at.budget(8) == pytest.approx(80, rel=0.1)


def test_a_step_has_at_most_twice_the_prompt_tokens_that_were_ever_measured() -> None:
    at = Measured()
    for tried in (512, 1024, 2048, 4096):
        at.step(0, tried, 0.01)
        assert at.budget(0) == 2 * tried
    assert Measured(chunk=3000).state.resolved.chunk == 3000


def test_one_or_two_steps_are_enough_to_know_about_what_fits() -> None:
    at = Measured()
    at.step(0, 512, 512 * 0.1)
    assert at.budget(0) == 1000
    at.step(8, 512, 5 + 512 * 0.1)
    assert at.budget(8) == pytest.approx(200, rel=0.15)


def test_after_a_prompt_of_one_token_the_steps_soon_grow() -> None:
    at = Measured()
    at.step(0, 1, 5)
    for _ in range(7):
        num_tokens = at.budget(8)
        at.step(8, num_tokens, 5 + 0.02 * num_tokens)
    assert at.budget(8) > 900  # (25 - 5) / 0.02


def test_a_single_late_step_does_not_move_the_budget() -> None:
    at = _measured(5, 0.02)
    before = at.budget(8)
    at.step(8, 900, 500)
    at.step(8, 0, 500)
    assert at.budget(8) == pytest.approx(before, rel=0.1)


def test_a_prompt_whose_tokens_get_dearer_keeps_to_the_target() -> None:
    at = _measured(5, 0.02)
    for number in range(60):
        num_tokens = at.budget(8)
        at.step(8, num_tokens, 5 + 0.02 * (1 + number / 60) * num_tokens)
    assert 5 + 0.04 * at.budget(8) == pytest.approx(25, rel=0.15)


def test_the_step_is_filled_to_a_captured_size_unless_that_starves_the_prompts() -> None:
    at = _measured(5, 0.02)
    at.state.resolved = replace(at.state.resolved, step_sizes=(100, 900, 2000))
    assert at.budget(8) == 900 - 8
    assert prompt_budget(at.state, 8, 1, 20, delays=False) > 900  # fewer wait: nothing to fill up with
    at.state.step_times = _measured(30, 0.02).state.step_times
    assert at.budget(8) == pytest.approx(500, rel=0.02)  # 100 would be less than a quarter of the step


def test_where_prompts_wait_drafts_leave_them_half_of_the_target() -> None:
    at = Measured(auto=True)
    for width, ms in ((1, 5), (2, 9), (3, 12), (4, 14), (5, 16)) * 3:
        at.step(8, 0, ms, width)
    assert [narrowed(at.state, 8, width) for width in (1, 2, 3, 4, 5)] == [1, 2, 3, 3, 3]
    assert narrowed(at.state, 8, 7) == 7  # nobody has measured it: it is tried
    dear = Measured(auto=True, target_ms=8)
    for width, ms in ((1, 5), (2, 9)) * 3:
        dear.step(8, 0, ms, width)
    assert narrowed(dear.state, 8, 2) == 1
