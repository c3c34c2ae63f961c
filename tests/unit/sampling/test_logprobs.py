"""Log-probabilities against float64 arithmetic."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.sampling.logprobs import log_probabilities
from tests.support.plain_sampler import ranked


def _exact(logits: torch.Tensor) -> np.ndarray:
    values = logits.to(torch.float64).numpy()
    shifted = values - values.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0.0, 3000.0, -3000.0])
def test_log_probabilities_are_those_of_exact_arithmetic(dtype: torch.dtype, offset: float) -> None:
    generator = torch.Generator().manual_seed(1)
    logits = (torch.randn(5, 50_000, generator=generator) * 4 + offset).to(dtype)
    chosen = torch.tensor([0, 49_999, 7, 1234, 31_000])
    got, ids, tops = log_probabilities(logits, chosen, 20)
    exact = _exact(logits)
    assert got.dtype == tops.dtype == torch.float32
    np.testing.assert_allclose(got.numpy(), exact[np.arange(5), chosen.numpy()], rtol=1e-6, atol=2e-6)
    np.testing.assert_allclose(tops.numpy(), np.take_along_axis(exact, ids.numpy(), axis=1), rtol=1e-6, atol=2e-6)
    for row, row_ids in enumerate(ids.tolist()):
        assert row_ids == ranked(logits[row].float().numpy())[:20]


@given(st.lists(st.sampled_from([0.0, -0.0, 1.0, -5.0]), min_size=1, max_size=12), st.data())
def test_equal_alternatives_come_lowest_id_first(values: list[float], data: st.DataObject) -> None:
    top = data.draw(st.integers(0, len(values)))
    logits = torch.tensor([values])
    _, ids, tops = log_probabilities(logits, torch.tensor([0]), top)
    assert ids.shape == tops.shape == (1, top)
    assert ids[0].tolist() == ranked(logits[0].numpy())[:top]


def test_alternatives_far_below_the_best_keep_their_order() -> None:
    _, ids, _ = log_probabilities(torch.tensor([[1.0, 1.5, 1e9, 1.25]]), torch.tensor([0]), 4)
    assert ids[0].tolist() == [2, 1, 3, 0]


def test_no_alternatives_are_no_columns() -> None:
    got, ids, tops = log_probabilities(torch.zeros(3, 4), torch.tensor([0, 1, 3]), 0)
    assert ids.shape == tops.shape == (3, 0)
    np.testing.assert_allclose(got.numpy(), np.log(0.25), rtol=1e-6)


def test_a_wide_gap_keeps_its_size() -> None:
    got, _, _ = log_probabilities(torch.tensor([[20_000.0, 20_000.5]]), torch.tensor([0]), 0)
    assert got.item() == pytest.approx(-0.5 - np.log1p(np.exp(-0.5)), abs=1e-6)


def test_logits_that_are_no_numbers_are_impossible_tokens() -> None:
    logits = torch.tensor([[torch.nan, 0.0, -torch.inf, 0.0], [torch.nan] * 4])
    got, ids, tops = log_probabilities(logits, torch.tensor([1, 2]), 4)
    assert got[0].item() == pytest.approx(np.log(0.5)) and got[1].item() == -torch.inf
    assert ids[0].tolist() == [1, 3, 0, 2] and ids[1].tolist() == [0, 1, 2, 3]
    assert not tops.isnan().any() and tops[1].isneginf().all()


def test_the_logits_stay_as_they_are() -> None:
    logits = torch.tensor([[3.0, torch.nan, -1.0]])
    before = logits.clone()
    log_probabilities(logits, torch.tensor([0]), 2)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
