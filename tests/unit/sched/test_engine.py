"""Engine: sleeps when idle, keeps to its depth, and lets a broken step cost only the guilty."""

import threading
from collections import deque
from collections.abc import Callable

import pytest

from roost.clock import SystemClock, VirtualClock
from roost.errors import StepFailure
from roost.messages import Abort, Event, Finished, OpenSession, Submit
from roost.sched.engine import Engine
from roost.step import Executor, StepPlan, StepResult, Ticket
from tests.support.engine_client import engine_client, resolved, witness


class Breaking:
    """Breaks, at launch or at collect, every step that `is_bad` points out, and those behind it."""

    def __init__(self, inner: Executor, is_bad: Callable[[StepPlan], bool], at_launch: bool) -> None:
        self._inner, self._is_bad, self._at_launch = inner, is_bad, at_launch
        self._bad: set[int] = set()
        self.num_out_max = 0
        self.num_broken = 0
        self.launched: list[list[int]] = []  # rows of each step since the last one that broke
        self._out: list[int] = []

    def launch(self, plan: StepPlan) -> Ticket:
        """Launch, or break."""
        if self._is_bad(plan):
            self.num_broken += 1
            if self._at_launch:
                self.launched.clear()
                raise StepFailure("no")
            self._bad.add(plan.step)
        self.launched.append(plan.rows.tolist())
        self._out.append(plan.step)
        self.num_out_max = max(self.num_out_max, len(self._out))
        return self._inner.launch(plan)

    def collect(self, ticket: Ticket) -> StepResult:
        """Collect, or break."""
        self._out.remove(ticket.step)
        result = self._inner.collect(ticket)
        if any(step <= ticket.step for step in self._bad):
            self._bad.discard(ticket.step)
            self.launched.clear()
            raise StepFailure("broken")
        return result


def _submit(name: str, first: int) -> Submit:
    return Submit(request_id=name, tokens=(first, 2, 3, 4, 5), max_new_tokens=6)


def _never(plan: StepPlan) -> bool:
    return False


@pytest.mark.parametrize(("overlap", "num_out"), [(False, 1), (True, 2)])
def test_no_more_steps_are_out_than_the_depth_and_the_one_just_launched(overlap: bool, num_out: int) -> None:
    options = resolved(overlap=overlap)
    executor = Breaking(witness(options), _never, at_launch=False)
    at = engine_client(executor, overlap=overlap)
    for name in ("a", "b"):
        at.send(_submit(name, 1))
    at.run()
    assert executor.num_out_max == num_out


@pytest.mark.parametrize("at_launch", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_that_breaks_every_step_ends_alone(overlap: bool, at_launch: bool) -> None:
    options = resolved(overlap=overlap)

    def has_bad_prompt(plan: StepPlan) -> bool:
        return 49 in plan.tokens.tolist()

    executor = Breaking(witness(options), has_bad_prompt, at_launch)
    at = engine_client(executor, overlap=overlap)
    good = engine_client(overlap=overlap)
    for name, first in (("a", 1), ("b", 49), ("c", 3)):
        at.engine.post(_submit(name, first), at.events.append)
        good.engine.post(_submit(name, first), good.events.append)
    at.run()
    good.run()
    assert [_ends(at.events, name) for name in "abc"] == [["length"], ["error"], ["length"]]
    (message,) = [event.message for event in at.events if isinstance(event, Finished) and event.request_id == "b"]
    assert "twice" in message and executor.num_broken == 2
    assert _tokens(at.events, "a") == _tokens(good.events, "a")
    assert _tokens(at.events, "c") == _tokens(good.events, "c")


@pytest.mark.parametrize("at_launch", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_broken_step_is_logged_with_its_times(overlap: bool, at_launch: bool) -> None:
    at = engine_client(Breaking(witness(resolved(overlap=overlap)), _breaks(1), at_launch), overlap=overlap)
    at.send(_submit("a", 1))
    while at.engine.has_work:
        at.wait(1)
    logged = at.engine.state.step_log.since(-1)
    assert [step.number for step in logged if step.has_failed] == [1]
    assert all(min(step.host, step.device, step.collect) >= 0 for step in logged)


def _breaks(*steps: int) -> Callable[[StepPlan], bool]:
    return lambda plan: plan.step in steps


@pytest.mark.parametrize("at_launch", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_a_step_that_breaks_once_costs_no_request_anything(overlap: bool, at_launch: bool) -> None:
    options = resolved(overlap=overlap)
    at = engine_client(Breaking(witness(options), _breaks(3), at_launch), overlap=overlap)
    good = engine_client(overlap=overlap)
    for each in (at, good):
        for name in ("a", "b"):
            each.engine.post(_submit(name, 1), each.events.append)
        each.run()
    assert [_ends(at.events, name) for name in "ab"] == [["length"], ["length"]]
    assert [_tokens(at.events, name) for name in "ab"] == [_tokens(good.events, name) for name in "ab"]


@pytest.mark.parametrize("at_launch", [True, False])
@pytest.mark.parametrize("overlap", [True, False])
def test_after_a_broken_step_each_of_its_requests_runs_alone_before_they_run_together(
    overlap: bool, at_launch: bool
) -> None:
    executor = Breaking(witness(resolved(overlap=overlap)), _breaks(3), at_launch)
    at = engine_client(executor, overlap=overlap)
    for name in ("a", "b"):
        at.engine.post(Submit(request_id=name, tokens=(1, 2, 3), max_new_tokens=20), at.events.append)
    at.run()
    num_alone = next(i for i, rows in enumerate(executor.launched) if len(rows) > 1)
    assert {row for rows in executor.launched[:num_alone] for row in rows} == set(executor.launched[num_alone])


def test_a_suspect_that_has_nothing_left_to_launch_does_not_hold_up_the_next() -> None:
    executor = Breaking(witness(resolved()), _breaks(1), at_launch=False)
    at = engine_client(executor)
    for name, max_new_tokens in (("short", 2), ("long", 9)):
        at.engine.post(Submit(request_id=name, tokens=(1, 2, 3), max_new_tokens=max_new_tokens), at.events.append)
    at.tick(4)  # step 1, with a round of each, breaks in the fourth
    assert {request.num_failures for request in at.engine.state.requests.values()} == {1}
    at.tick()
    short, long = (at.engine.state.requests[name].row for name in ("short", "long"))
    assert executor.launched == [[short], [long]], "the last token of one is on its way, the other goes on"


def test_a_request_is_not_blamed_for_a_step_it_was_only_launched_behind() -> None:
    at = engine_client(Breaking(witness(resolved()), _breaks(0), at_launch=False))
    for name in ("a", "b"):  # b joins in step 1, while step 0 is out
        at.send(_submit(name, 1))
    at.engine.tick()
    assert {name: request.num_failures for name, request in at.engine.state.requests.items()} == {"a": 1, "b": 0}


@pytest.mark.parametrize("overlap", [True, False])
def test_failures_with_a_good_step_between_them_do_not_add_up(overlap: bool) -> None:
    options = resolved(overlap=overlap)
    at = engine_client(Breaking(witness(options), _breaks(2, 6, 10), at_launch=False), overlap=overlap)
    at.send(Submit(request_id="a", tokens=(1, 2, 3), max_new_tokens=20))
    at.run()
    assert _ends(at.events, "a") == ["length"]


def _ends(events: list[Event], name: str) -> list[str]:
    return [event.reason for event in events if isinstance(event, Finished) and event.request_id == name]


def _tokens(events: list[Event], name: str) -> list[int]:
    parts = [getattr(event, "tokens", ()) for event in events if getattr(event, "request_id", "") == name]
    return [token for part in parts for token in part]


class Counting(Engine):
    """Counts its ticks."""

    num_ticks = 0

    def tick(self) -> None:
        """One turn of the loop, counted."""
        self.num_ticks += 1
        super().tick()


class Asleep(Exception):
    """The loop waits for mail that does not come."""


class Mailbox(deque[object]):
    """A mailbox that can tell when somebody sleeps on it: only a `get` without a time limit is sleep."""

    put = deque.append

    def empty(self) -> bool:
        """Whether a `get` would sleep."""
        return not self

    def get(self) -> object:
        """The next mail."""
        if not self:
            raise Asleep
        return self.popleft()


def _counting() -> Counting:
    options = resolved()
    engine = Counting(options, witness(options), VirtualClock())
    engine._mailbox = Mailbox()  # type: ignore[assignment]
    return engine


def _run_until_asleep(engine: Counting) -> int:
    """Ticks until the loop sleeps."""
    before = engine.num_ticks
    with pytest.raises(Asleep):
        engine.run()
    return engine.num_ticks - before


def test_an_idle_engine_sleeps_on_its_mailbox_and_does_not_tick() -> None:
    engine, events = _counting(), list[Event]()
    assert _run_until_asleep(engine) == 0
    engine.post(OpenSession(session_id="s"), events.append)
    engine.post(Submit(request_id="a", tokens=(1, 2), max_new_tokens=3, session_id="s"), events.append)
    assert _run_until_asleep(engine) > 0
    assert _ends(events, "a") == ["length"]
    assert _run_until_asleep(engine) == 0  # an open, resident session is no work
    engine.post(Abort(request_id="nobody"), events.append)
    assert _run_until_asleep(engine) == 1


def test_stop_ends_the_loop_once_everything_accepted_has_ended() -> None:
    engine, events = _counting(), list[Event]()
    for name in ("a", "b"):
        engine.post(_submit(name, 1), events.append)
    engine.stop()
    engine.run()
    assert [_ends(events, name) for name in "ab"] == [["length"], ["length"]]
    assert not engine.has_work


def test_stop_wakes_an_idle_engine() -> None:
    engine = _counting()
    engine.stop()
    engine.run()
    assert engine.num_ticks <= 1


def test_an_idle_engine_does_not_tick_and_stop_lets_accepted_work_end() -> None:
    options = resolved()
    engine = Counting(options, witness(options), SystemClock())
    thread = threading.Thread(target=engine.run)
    thread.start()
    done = threading.Event()
    events: list[Event] = []

    def reply(event: Event) -> None:
        events.append(event)
        if isinstance(event, Finished):
            done.set()

    engine.post(_submit("a", 1), reply)
    assert done.wait(30)
    engine.post(_submit("b", 1), reply)
    engine.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert [event.request_id for event in events if isinstance(event, Finished)] == ["a", "b"]
    # 5 prompt tokens, 6 new ones, one step a tick, and one more to see the rest: waiting did not add to it
    assert engine.num_ticks <= 2 * (1 + 6 + 3)
