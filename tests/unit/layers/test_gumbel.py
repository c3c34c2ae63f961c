"""Gumbel noise: a hash of (seed, position, token) that has the right distribution, the same in every form."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.layers import gumbel, host_gumbel
from roost.layers.gumbel import RowDraws
from roost.sampling.params import LOGIT_BIAS_ENTRIES_MAX
from tests.support import plain_sampler as plain

NUM_NUMBERS = 200_000
NEAR = 2e-5  # the table's straight lines, and units of 2**-20


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 2**22))
def test_noise_is_that_of_exact_arithmetic(seed: int, position: int, token: int) -> None:
    key = gumbel.draw_keys(torch.tensor([seed]), torch.tensor([position]))
    assert key.item() % 2**64 == plain.draw_key(seed, position)
    found = gumbel.noise(key, torch.tensor([token])).item()
    assert found == pytest.approx(plain.gumbel(plain.draw_key(seed, position), token), abs=NEAR)


def test_noise_is_right_at_both_ends_of_the_unit_interval() -> None:
    values, changes = gumbel.noise_table().astype(np.int64)
    edges = values.reshape(2, -1) / 2**gumbel.SCALE_BITS
    assert edges[0, 0] == pytest.approx(-math.log(-math.log(2.0**-33)), abs=1e-6)
    assert edges[1, 0] == pytest.approx(-math.log(-math.log1p(-(2.0**-33))), abs=1e-6)
    assert ((values + changes).reshape(2, -1)[:, :-1] == values.reshape(2, -1)[:, 1:]).all(), "without gaps"
    assert (changes.reshape(2, -1)[0] > 0).all() and (changes.reshape(2, -1)[1] < 0).all(), "never the same twice"


def _noise(seeds: torch.Tensor, positions: torch.Tensor, token: int) -> np.ndarray:
    return gumbel.noise(gumbel.draw_keys(seeds, positions), torch.tensor([token]))[:, 0].double().numpy()


@pytest.mark.parametrize("seed", [0, 1, 2**62 + 17])
def test_noise_along_positions_is_gumbels_and_unrelated(seed: int) -> None:
    _check(_noise(torch.tensor([seed]).expand(NUM_NUMBERS), torch.arange(NUM_NUMBERS), 17))


@pytest.mark.parametrize("position", [0, 1, 31_337])
def test_noise_along_seeds_is_gumbels_and_unrelated(position: int) -> None:
    _check(_noise(torch.arange(NUM_NUMBERS), torch.tensor([position]).expand(NUM_NUMBERS), 0))


@pytest.mark.parametrize("position", [0, 5, 2**30])
def test_noise_along_tokens_is_gumbels_and_unrelated(position: int) -> None:
    key = gumbel.draw_keys(torch.tensor([3]), torch.tensor([position]))
    _check(gumbel.noise(key, torch.arange(NUM_NUMBERS))[0].double().numpy())


@pytest.mark.parametrize("seed_shift", [1, -1])
def test_a_seed_a_position_or_a_token_is_no_shifted_copy_of_its_neighbour(seed_shift: int) -> None:
    positions, seeds = torch.arange(NUM_NUMBERS), torch.tensor([1000]).expand(NUM_NUMBERS)
    here = _noise(seeds, positions, 40)
    for shift in (0, 1, 2):
        for token in (39, 40, 41):
            _check_unrelated(here, _noise(seeds + seed_shift, positions + shift, token))
    for token in (39, 41, 40 + 2**16):
        _check_unrelated(here, _noise(seeds, positions, token))


def _check(noise: np.ndarray) -> None:
    """Against the distribution exp(-exp(-x)), whose numbers are uniform through it."""
    numbers = np.exp(-np.exp(-noise))
    assert abs(numbers.mean() - 0.5) < 4 * math.sqrt(1 / 12 / len(numbers))
    buckets = np.bincount((numbers * 100).astype(int), minlength=100)
    expected = len(numbers) / 100
    assert ((buckets - expected) ** 2 / expected).sum() < 99 + 4 * math.sqrt(2 * 99)
    for lag in (1, 2, 7):
        _check_unrelated(numbers[:-lag], numbers[lag:])


def _check_unrelated(left: np.ndarray, right: np.ndarray) -> None:
    assert abs(np.corrcoef(left, right)[0, 1]) < 4 / math.sqrt(len(left))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_are_drawn_as_often_as_they_are_probable(temperature: float) -> None:
    logits = torch.tensor([1.5, 0.0, -2.0, 3.0, 2.9, -torch.inf, -6.0])
    rows = torch.zeros(NUM_NUMBERS, dtype=torch.int64)
    draws = _draws(1, len(logits))
    draws.reals[0] = temperature
    found = gumbel.draw(logits.expand(NUM_NUMBERS, -1), rows, torch.arange(NUM_NUMBERS), draws)
    counts = np.bincount(found.numpy(), minlength=len(logits))
    wanted = (logits.double() / temperature).softmax(0).numpy() * NUM_NUMBERS
    is_common = wanted >= 5
    assert counts[5] == 0
    distance = ((counts - wanted) ** 2)[is_common] / wanted[is_common]
    freedom = is_common.sum() - 1
    assert distance.sum() < freedom + 4 * math.sqrt(2 * freedom)


def _draws(num_rows: int, vocab_size: int) -> RowDraws:
    draws = RowDraws.empty(num_rows, vocab_size, torch.device("cpu"))
    draws.reals[1], draws.wholes[1] = 1.0, vocab_size
    return draws


def test_there_is_room_for_every_bias() -> None:
    assert gumbel.BIASES_MAX == LOGIT_BIAS_ENTRIES_MAX


OPTIONS = {
    "greedy": (0.0, 1.0, 0.0, 0),
    "warm": (0.7, 1.0, 0.0, 0),
    "top-k": (0.9, 1.0, 0.0, 7),
    "top-p": (1.2, 0.8, 0.0, 0),
    "min-p": (1.0, 1.0, 0.05, 0),
    "all": (0.8, 0.9, 0.01, 40),
    "cold": (1e-40, 1.0, 0.0, 0),
}
VOCAB_SIZE, NUM_IDS = 3000, 700


def rows_of_options(num_biases: int = 3) -> tuple[RowDraws, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A row for each options, logits, the target's ids of a head's, and positions."""
    generator = torch.Generator().manual_seed(4)
    draws = _draws(len(OPTIONS) + 1, VOCAB_SIZE)
    for row, (temperature, top_p, min_p, top_k) in enumerate(OPTIONS.values()):
        draws.reals[:, row] = torch.tensor([temperature, top_p, min_p])
        draws.wholes[:, row] = torch.tensor([row * 7 + 1, top_k or VOCAB_SIZE, num_biases * (row % 2)])
        if num_biases * (row % 2):
            draws.bias_ids[row, :num_biases] = torch.tensor([5, 17, 2999])
            draws.biases[row, :num_biases] = torch.tensor([4.0, -100.0, 2.5])
    token_ids = torch.randperm(VOCAB_SIZE, generator=generator)[:NUM_IDS].sort().values
    token_ids[0], token_ids[1] = 5, 17
    logits = torch.randn(len(OPTIONS), NUM_IDS, generator=generator) * 3
    return draws, logits, token_ids, torch.arange(len(OPTIONS)) * 31


def test_drafts_on_the_host_are_those_of_the_reference() -> None:
    draws, logits, token_ids, positions = rows_of_options()
    rows = torch.arange(len(OPTIONS))
    wanted = gumbel.draft_scores(logits, token_ids, rows, positions, draws)
    assert torch.equal(host_gumbel.draft_scores(logits, token_ids, rows, positions, draws), wanted)
    best = gumbel.best_drafts(logits, token_ids, rows, positions, draws)
    assert torch.equal(host_gumbel.best_drafts(logits, token_ids, rows, positions, draws), best)


def test_without_numba_the_host_draws_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    draws, logits, token_ids, positions = rows_of_options()
    rows = torch.arange(len(OPTIONS))
    whole = torch.randn(len(OPTIONS), VOCAB_SIZE) * 4
    before = [
        host_gumbel.best_drafts(logits, token_ids, rows, positions, draws),
        host_gumbel.draft_scores(logits, token_ids, rows, positions, draws),
        host_gumbel.draw(whole, rows, positions, draws),
    ]
    monkeypatch.setattr(host_gumbel, "_kernels", lambda: None)
    after = [
        host_gumbel.best_drafts(logits, token_ids, rows, positions, draws),
        host_gumbel.draft_scores(logits, token_ids, rows, positions, draws),
        host_gumbel.draw(whole, rows, positions, draws),
    ]
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))
    assert torch.equal(
        before[2][1:], gumbel.draw(whole, rows, positions, draws)[1:]
    )  # row 0 is greedy, nobody draws it


def test_a_head_that_thinks_as_the_target_does_is_always_right() -> None:
    """Whatever the temperature: the same logits with the same noise."""
    draws, _, _, positions = rows_of_options(num_biases=0)
    rows, ids = torch.arange(len(OPTIONS)), torch.arange(VOCAB_SIZE)
    logits = torch.randn(len(OPTIONS), VOCAB_SIZE, generator=torch.Generator().manual_seed(1)) * 4
    drafts = gumbel.best_drafts(logits, ids, rows, positions, draws)
    for row, name in enumerate(OPTIONS):
        if name in ("warm", "cold"):
            assert drafts[row] == gumbel.draw(
                logits[row : row + 1], rows[row : row + 1], positions[row : row + 1], draws
            )
