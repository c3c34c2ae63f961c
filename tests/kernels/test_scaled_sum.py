"""The scaled sum equals the reference, rounded as the residual stream is."""

import pytest
import torch

from roost.layers.ops import TORCH_OPS, Residual
from tests.support.canaries import DTYPES, Fenced, assert_near

sums = pytest.importorskip("roost.kernels.scaled_sum")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1.0, 0.37])
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("shape", [(1, 4096), (3, 1001), (2, 5)])
def test_a_scaled_sum_equals_the_reference(
    shape: tuple[int, int], is_sum: bool, factor: float, dtype: torch.dtype, device: torch.device
) -> None:
    buffer = torch.randn((2, shape[0], shape[1] + 24), generator=torch.Generator().manual_seed(shape[1]))
    hidden, added = (buffer * 3).to(device, dtype)[:, :, 8 : 8 + shape[1]]
    stream, out = Residual(hidden, added if is_sum else None), Fenced(shape, dtype, device)
    sums.scaled_sum(stream.hidden, stream.added, factor, out=out.tensor)
    out.check()
    assert_near(out.tensor, TORCH_OPS.scaled_sum(stream, factor), steps=3.0)
