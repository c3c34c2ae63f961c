"""Draws: random numbers, the order of tokens, and sums that no device can get wrong."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.sampling import draw
from tests.support import plain_sampler as plain

NUM_NUMBERS = 200_000


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40))
def test_the_number_is_that_of_exact_integer_arithmetic(seed: int, position: int) -> None:
    assert draw.uniform(torch.tensor([seed]), torch.tensor([position])).item() == plain.uniform(seed, position)


def _numbers(seeds: torch.Tensor, positions: torch.Tensor) -> np.ndarray:
    return draw.uniform(seeds, positions).numpy()


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 17])
def test_numbers_along_positions_are_uniform_and_unrelated(seed: int) -> None:
    _check_uniform(_numbers(torch.tensor(seed), torch.arange(NUM_NUMBERS)))


@pytest.mark.parametrize("position", [0, 1, 31_337])
def test_numbers_along_seeds_are_uniform_and_unrelated(position: int) -> None:
    _check_uniform(_numbers(torch.arange(NUM_NUMBERS), torch.tensor(position)))


@pytest.mark.parametrize("seed_shift", [1, -1])
def test_a_seed_is_no_shifted_copy_of_its_neighbour(seed_shift: int) -> None:
    positions = torch.arange(NUM_NUMBERS)
    here = _numbers(torch.tensor(1000), positions)
    for shift in (0, 1, 2):
        _check_unrelated(here, _numbers(torch.tensor(1000 + seed_shift), positions + shift))


def _check_uniform(numbers: np.ndarray) -> None:
    assert numbers.min() >= 0 and numbers.max() < 1
    assert abs(numbers.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(numbers))
    assert abs(numbers.var() - 1 / 12) < 4 * math.sqrt(1 / 180 / len(numbers))
    buckets = np.bincount((numbers * 100).astype(int), minlength=100)
    expected = len(numbers) / 100
    assert ((buckets - expected) ** 2 / expected).sum() < 99 + 4 * math.sqrt(2 * 99)
    for lag in (1, 2, 7):
        _check_unrelated(numbers[:-lag], numbers[lag:])


def _check_unrelated(left: np.ndarray, right: np.ndarray) -> None:
    assert abs(np.corrcoef(left, right)[0, 1]) < 4 / math.sqrt(len(left))


@given(st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=40))
def test_keys_are_distinct_and_order_by_logit_then_lowest_id(values: list[float]) -> None:
    logits = draw.sane(torch.tensor([values], dtype=torch.float32))
    keys = draw.ranking_keys(logits)[0].tolist()
    assert len(set(keys)) == len(keys)
    best_first = sorted(range(len(keys)), key=lambda token: -keys[token])
    assert best_first == plain.ranked(logits[0].numpy())


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.integers(0, 2**53 - 1))
def test_a_token_of_weight_zero_is_never_drawn(weights: list[int], bits: int) -> None:
    table = torch.tensor([weights])
    token = draw.drawn(table, torch.tensor([bits * 2.0**-53], dtype=torch.float64)).item()
    assert token == 0 if not any(weights) else weights[token] > 0


@pytest.mark.parametrize("vocab_size", [1, 2, 3, 1000, 262_144])
def test_the_ends_of_the_unit_interval_stay_in_the_vocabulary(vocab_size: int) -> None:
    weights = torch.full((2, vocab_size), draw.WEIGHT_ONE)
    weights[:, -1] = 0 if vocab_size > 1 else 1
    ends = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert draw.drawn(weights, ends).tolist() == [0, max(0, vocab_size - 2)]


def test_a_sum_of_the_largest_vocabulary_does_not_overflow() -> None:
    assert draw.VOCAB_SIZE_MAX * draw.WEIGHT_ONE < 2**63
