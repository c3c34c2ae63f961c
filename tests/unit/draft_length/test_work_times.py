"""What a step of several rounds takes on a host is learned as a sum of what is in it, on a machine with known costs."""

import random

import pytest

from roost.draft_length.work_times import Work, WorkTimes

STEP, NODE, DRAFT, PASS = 8000, 400, 120, 500  # microseconds
SIZE = 8


def time_of(work: Work, pace: float = 1.0) -> int:
    """On the machine."""
    return int(pace * (STEP + NODE * work.nodes + DRAFT * work.drafts + PASS * work.passes))


def works(seed: int, count: int) -> list[Work]:
    """Steps of rounds that are looked up, drafted for by a head, or neither."""
    chances, found = random.Random(seed), list[Work]()
    for _ in range(count):
        num_found, width = chances.choice((0, 1, 2, 5)), chances.choice((1, 3, 3, 5))
        drafts = (SIZE - num_found) * (width - 1)
        nodes = drafts + sum(chances.choice((1, 8, 16)) for _ in range(num_found))
        found.append(Work(nodes=nodes, drafts=drafts, passes=width - 1))
    return found


def learned(times: WorkTimes, steps: list[Work], *, pace: float = 1.0, noise: float = 0.0, late: float = 0.0) -> None:
    """Have steps been seen, some of them late."""
    chances = random.Random(9)
    for work in steps:
        slow = 3.0 if chances.random() < late else 1.0
        times.note(SIZE, work, int(time_of(work, pace) * slow * chances.uniform(1 - noise, 1 + noise)))


@pytest.mark.parametrize("late", [0.0, 0.1])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_what_is_in_a_step_tells_its_time(noise: float, late: float) -> None:
    times = WorkTimes([1, 2, 4, SIZE])
    learned(times, works(1, 200), noise=noise, late=late)
    for work in works(2, 20):
        assert times.of(SIZE, work) == pytest.approx(time_of(work), rel=0.1 + noise)
    assert times.of_node(SIZE) == pytest.approx(NODE, rel=0.1 + 2 * noise)
    if not noise and not late:
        assert times.of_draft(SIZE) == pytest.approx(DRAFT, rel=0.2)


def test_a_machine_that_gets_busy_is_followed_and_a_late_step_is_not() -> None:
    times, plain = WorkTimes([SIZE]), Work()
    learned(times, works(1, 60))
    times.note(SIZE, plain, 10 * STEP)
    assert times.of(SIZE, plain) == pytest.approx(STEP, rel=0.05)
    learned(times, works(3, 60), pace=2.0)
    assert times.of(SIZE, plain) == pytest.approx(2 * STEP, rel=0.35)
    assert times.of_node(SIZE) / times.of(SIZE, plain) == pytest.approx(NODE / STEP, rel=0.35)


def test_what_was_never_seen_is_assumed_by_how_long_a_step_takes() -> None:
    times = WorkTimes([2, SIZE, 64])
    first = times.of(SIZE, Work()), times.of_node(SIZE)
    assert first[0] > first[1] > times.of_draft(SIZE) > 0
    for _ in range(50):
        times.note(SIZE, Work(), STEP)  # nothing is ever drafted
    assert times.of(SIZE, Work()) == pytest.approx(STEP, rel=0.01)
    assert times.of_node(SIZE) / STEP == pytest.approx(first[1] / first[0], rel=0.01)
    assert times.of_node(64) < first[1] < times.of_node(2), "of steps whose own time is not known"


def test_a_step_without_drafts_takes_some_time_however_steps_bend() -> None:
    times = WorkTimes([SIZE])
    for number in (20, 60, 110, 40, 90):
        times.note(SIZE, Work(nodes=number), STEP // 50 * number + number * number)
    assert times.of(SIZE, Work()) > 0
    assert times.of(SIZE, Work(nodes=60)) == pytest.approx(STEP // 50 * 60 + 3600, rel=0.3)


def test_no_work_is_free_of_charge_or_less() -> None:
    times = WorkTimes([SIZE])
    for number in range(40):  # wider steps that took less time
        times.note(SIZE, Work(nodes=number, drafts=0.0, passes=0.0), STEP - 100 * number)
    assert min(times.of_node(SIZE), times.of_draft(SIZE)) >= 0


def test_that_there_are_more_nodes_than_rounds_has_a_price_of_its_own() -> None:
    times, chances = WorkTimes([SIZE]), random.Random(4)
    for _ in range(120):
        nodes = chances.choice((0, 0, 1, 3, 8, 16))
        wider = float(nodes > 0)
        times.note(SIZE, Work(nodes=nodes, wider=wider), int(STEP + NODE * nodes + 2000 * wider))
    assert times.of_wider(SIZE) == pytest.approx(2000, rel=0.25)
    assert times.of_node(SIZE) == pytest.approx(NODE, rel=0.1)
    assert times.of(SIZE, Work()) == pytest.approx(STEP, rel=0.03)
    assert times.of(SIZE, Work(nodes=1, wider=1)) == pytest.approx(STEP + NODE + 2000, rel=0.05)
