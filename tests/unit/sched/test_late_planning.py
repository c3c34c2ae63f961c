"""Late planning: who arrives while a step runs is in the next one, and the device does not wait for it."""

import pytest

from bench.virtual_mix import MS, ArrivalClock, Device
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.messages import Event, Finished, Submit, Tokens
from roost.sched.engine import Engine
from roost.sched.late_planning import LatePlanning
from roost.step import StepId
from roost.step_times.times import StepTimes


class Served:
    """An engine over a device whose steps take `step_ms`, beside one long request."""

    def __init__(self, step_ms: float = 10.0, overlap: bool = True) -> None:
        self.clock, self.step_ms, self.told = ArrivalClock(), step_ms, list[tuple[int, Event]]()
        self.device = Device(self.clock, lambda *_: self.step_ms, 1, host_ms=0.2, noise=0.0)
        config = EngineConfig(
            memory=MemoryConfig(pool_tokens=8192), sched=SchedConfig(context=2048, max_running=4, overlap=overlap)
        )
        self.engine = Engine(resolve(config, ModelTraits(vocab_size=100)), self.device, self.clock)
        self.submit("long", 1500)

    def submit(self, name: str, max_new_tokens: int) -> None:
        """A request of one prompt token."""
        submit = Submit(request_id=name, tokens=(7,), max_new_tokens=max_new_tokens)
        self.engine.post(submit, lambda event: self.told.append((self.clock.now_ns(), event)))

    def tick(self, count: int) -> None:
        """Run the loop."""
        for _ in range(count):
            self.engine.tick()

    def first_token_ms(self, after_ms: float) -> float:
        """Time to first token of a request that arrives so long after the next step began."""
        self.tick(20)
        arrival = self.clock.now_ns() + int(after_ms * MS)
        self.clock.at(arrival, lambda: self.submit("late", 1))
        self.tick(8)
        times = [at for at, event in self.told if isinstance(event, Tokens) and event.request_id == "late"]
        return (times[0] - arrival) / MS


def test_who_arrives_while_a_step_runs_is_in_the_next_one() -> None:
    assert Served().first_token_ms(5) < 2 * 10


def test_without_waiting_it_would_be_the_one_after() -> None:
    served = Served()
    served.engine._late_planning.launched = lambda host_time: None  # type: ignore[method-assign]
    assert served.first_token_ms(5) > 2 * 10


def test_the_device_has_always_something_to_do() -> None:
    served = Served()
    served.tick(20)
    before = served.device.idle_ns
    served.tick(200)
    assert served.device.idle_ns == before


def test_steps_that_get_shorter_cost_a_few_pauses_and_no_more() -> None:
    served = Served(step_ms=20)
    served.tick(40)
    before = served.device.idle_ns
    served.step_ms = 6
    served.tick(100)
    assert 0 < served.device.idle_ns - before < 60 * MS  # four steps, until the median has followed
    before = served.device.idle_ns
    served.tick(100)
    assert served.device.idle_ns == before


@pytest.mark.parametrize("step_ms", [3.9, 10])
def test_nobody_waits_for_mail_while_steps_are_short(step_ms: float, monkeypatch: pytest.MonkeyPatch) -> None:
    served, waits = Served(step_ms), []
    receive = served.clock.receive
    monkeypatch.setattr(served.clock, "receive", lambda *args: waits.append(args) or receive(*args))
    served.tick(40)
    assert bool(waits) == (step_ms > 4)


@pytest.mark.parametrize("case", ["depth 0", "stopping", "few steps", "failed"])
def test_the_loop_does_not_wait_where_there_is_nothing_to_gain_or_known(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served(overlap=case != "depth 0")
    if case != "few steps":
        served.tick(20)
    waits: list[object] = []
    monkeypatch.setattr(served.clock, "receive", lambda *args: waits.append(args))
    if case == "stopping":
        served.engine.stop()
    if case == "failed":
        served.engine.state.in_flight.clear()
        served.engine.state.step_times.failed()
        served.tick(1)
    else:
        served.tick(4)
    assert not waits


def test_what_was_asked_to_stop_ends_while_it_waits() -> None:
    served = Served()
    served.tick(20)
    served.clock.at(served.clock.now_ns() + 3 * MS, served.engine.stop)
    served.tick(1)
    assert served.engine.state.stopping
    served.engine.run()
    assert isinstance(served.told[-1][1], Finished)


def _times(step_ms: int) -> StepTimes:
    """Three steps took so long, and one like them runs."""
    times = StepTimes(4, 1)
    for number in range(3):
        times.planned(StepId(number), 1, 1, 0, num_out=1, now=number * step_ms * MS)
        times.collected(StepId(number), (number + 1) * step_ms * MS)
    times.planned(StepId(3), 1, 1, 0, num_out=1, now=3 * step_ms * MS)
    return times


def test_the_lead_is_what_the_host_takes_a_part_of_the_step_and_some_time_at_least() -> None:
    times, late = _times(10), LatePlanning()
    for _ in range(7):
        late.launched(100_000)
    assert late.plan_at(times, 10 * MS) == 10 * MS  # too little is known of the host
    late.launched(100_000)
    assert late.plan_at(times, 10 * MS) == 20 * MS - 1_500_000
    for _ in range(8):
        late.launched(MS)
    assert late.plan_at(times, 10 * MS) == 20 * MS - 3 * MS


def test_a_device_that_was_idle_is_waited_for_less_and_with_time_more_again() -> None:
    times, late = _times(40), LatePlanning()
    for _ in range(8):
        late.launched(100_000)
    planned = [late.plan_at(times, 0)]
    for _ in range(6):
        assert late.is_too_late(blocked=199_999) == (planned[-1] > 0)
        planned.append(late.plan_at(times, 0))
    assert planned == sorted(planned, reverse=True) and planned[-1] == 0 and planned[1] == planned[0] - MS


def test_a_result_that_had_to_be_waited_for_was_not_late() -> None:
    times, late = _times(40), LatePlanning()
    for _ in range(8):
        late.launched(100_000)
    first = late.plan_at(times, 0)
    assert first == (40 - 6) * MS  # 15% of the step
    assert not late.is_too_late(blocked=200_000)
    assert late.plan_at(times, 0) == first
