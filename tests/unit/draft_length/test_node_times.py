"""Node times: what a node more costs a step is seen between steps that differ in nothing else."""

import pytest

from roost.draft_length.node_times import NodeTimes

KIND = (4, True)


def alternating(node_time: int, num_rounds: int = 2, *, kinds: tuple[tuple[int, bool], ...] = (KIND,)) -> NodeTimes:
    """One that has seen steps of few and many nodes, of 3 tokens each."""
    times = NodeTimes([1, 2, 4, 8])
    for step in range(40):
        num_nodes = 5 + 9 * (step // len(kinds) % 2)
        times.note(num_rounds, kinds[step % len(kinds)], num_nodes, 3, 1000 + node_time * num_nodes)
    return times


@pytest.mark.parametrize("node_time", [0, 10, 300])
def test_a_node_costs_the_tokens_that_come_in_its_time(node_time: int) -> None:
    per_step = 3 / (1000 + node_time * (5 + 14) / 2)
    found = alternating(node_time).price(2, 3.0, prompt_token_time=None)
    assert found == pytest.approx(node_time * per_step, rel=0.15, abs=1e-9)


def test_steps_of_different_kinds_are_not_compared() -> None:
    times = alternating(300, kinds=(KIND, (2, True)))
    assert not times._pairs[1]


def test_before_steps_differ_in_nodes_a_node_takes_a_part_of_a_step_and_no_longer_than_a_prompt_token() -> None:
    times = NodeTimes([1, 2, 4, 8])
    assert times.price(2, 3.0, prompt_token_time=50) == times.price(2, 3.0, None) > 0  # nothing was timed at all
    for _ in range(40):
        times.note(2, KIND, 5, 3, 1000)
    assert times.price(2, 3.0, prompt_token_time=20) == pytest.approx(20 * 3 / 1000)
    assert times.price(2, 3.0, prompt_token_time=5000) == times.price(2, 3.0, None) < 50 * 3 / 1000


def test_each_batch_size_has_its_own_and_a_late_step_changes_nothing() -> None:
    times = alternating(10)
    before = times.price(2, 3.0, None)
    times.note(2, KIND, 7, 3, 90_000)
    assert times.price(2, 3.0, None) < before * 1.1
    assert times.price(8, 3.0, None) == NodeTimes([1, 2, 4, 8]).price(8, 3.0, None)
