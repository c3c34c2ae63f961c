"""Node times: what one node more costs is learned from steps that differ in nodes, whatever else they cost."""

import random

import pytest

from roost.draft_length.node_times import NodeTimes

SIZES = [1, 2, 4, 8]
KIND = (1, False)


def fed(*, base: float, node: float, noise: float = 0.0, num_rounds: int = 8, steps: int = 200) -> NodeTimes:
    """Steps of a machine that takes `base` and `node` for each node; every second node adds a token."""
    rng, times = random.Random(1), NodeTimes(SIZES)
    for _ in range(steps):
        num_nodes = num_rounds + rng.choice([0, 0, 3, 8, 16])
        time = (base + node * num_nodes) * (1 + noise * abs(rng.gauss(0, 1)))
        times.note(num_rounds, KIND, num_nodes, num_nodes // 2, int(time))
    return times


@pytest.mark.parametrize("node", [0, 50_000, 1_000_000])
def test_a_node_costs_the_tokens_that_fit_into_its_time(node: int) -> None:
    times = fed(base=4_000_000, node=node)
    rate = times._tokens[3] / times._time[3]
    assert times.price(8, 4.0, None) == pytest.approx(node * rate, rel=0.01, abs=1e-9)


def test_late_steps_move_it_little() -> None:
    plain, noisy = fed(base=4_000_000, node=500_000), fed(base=4_000_000, node=500_000, noise=0.02)
    assert noisy.price(8, 4.0, None) == pytest.approx(plain.price(8, 4.0, None), rel=0.3)


def test_steps_of_another_kind_are_not_compared() -> None:
    times = NodeTimes(SIZES)
    for number in range(40):  # a head runs in every second one, and those have fewer nodes
        times.note(8, (1, bool(number % 2)), 8 + 8 * (number % 2), 8, 10_000_000 - 5_000_000 * (number % 2))
    assert not times._pairs[3]


def test_at_first_a_node_costs_as_much_as_a_prompt_token() -> None:
    times = NodeTimes(SIZES)
    assert 0 < times.price(8, 8.0, None) < times.price(8, 16.0, None)
    times.note(8, KIND, 8, 8, 8_000_000)
    assert times.price(8, 8.0, 500_000.0) == pytest.approx(0.5)


def test_batch_sizes_have_times_of_their_own() -> None:
    times = fed(base=4_000_000, node=1_000_000, num_rounds=8)
    for number in range(40):
        times.note(2, KIND, 2 + number % 2, 2, 2_000_000)
    assert times.price(2, 2.0, None) == 0.0 < times.price(8, 8.0, None)
