"""Norms equal the reference on hidden states, on heads that are views, and on sums."""

import pytest
import torch
from torch import Tensor

from roost.layers.norm import rms_norm
from tests.support.canaries import DTYPES, Fenced, assert_near

norm = pytest.importorskip("roost.kernels.norm")
EPS = 1e-5


def wide(shape: tuple[int, int], dtype: torch.dtype, device: torch.device, seed: int = 0) -> Tensor:
    """Random rows that lie further apart than they are long."""
    buffer = torch.randn((shape[0], shape[1] + 24), generator=torch.Generator().manual_seed(seed)) * 3
    return buffer.to(device, dtype)[:, 8 : 8 + shape[1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (5, 576), (3, 100), (2, 7), (1, 8192 + 32)])
def test_a_norm_of_rows(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    hidden, weight = wide(shape, dtype, device), torch.rand(shape[1], device=device) + 0.5
    out = Fenced(shape, dtype, device)
    assert_near(norm.rms_norm(hidden, weight, EPS, out=out.tensor), rms_norm(hidden, weight, EPS))
    out.check()
    assert torch.equal(norm.rms_norm(hidden, weight, EPS), out.tensor)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_heads", "head_dim"), [(40, 128), (12, 64), (5, 80), (3, 256)])
def test_a_norm_of_heads_by_a_weight_of_each(
    num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    heads = wide((3, (num_heads + 2) * head_dim), dtype, device).unflatten(1, (-1, head_dim))[:, :num_heads]
    weight = torch.rand((num_heads, head_dim), device=device) + 0.5
    out = Fenced(heads.shape, dtype, device)
    assert_near(norm.rms_norm(heads, weight, EPS, out=out.tensor), rms_norm(heads, weight, EPS))
    out.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (5, 576), (3, 100)])
def test_a_sum_is_rounded_before_it_is_normed(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    hidden, added = wide(shape, dtype, device), wide(shape, dtype, device, seed=1)
    weight = torch.rand(shape[1], device=device) + 0.5
    summed, normed = Fenced(shape, dtype, device), Fenced(shape, dtype, device)
    norm.add_rms_norm(hidden, added, weight, EPS, out=(summed.tensor, normed.tensor))
    summed.check(), normed.check()
    assert_near(summed.tensor, hidden + added)
    assert_near(normed.tensor, rms_norm(summed.tensor, weight, EPS))  # of the sum as it was written
    again = norm.add_rms_norm(hidden, added, weight, EPS)
    assert torch.equal(again[0], summed.tensor) and torch.equal(again[1], normed.tensor)
