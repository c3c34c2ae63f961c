"""The angles' cosines and sines are those of the reference."""

import pytest
import torch

from roost.layers.rotary import Rope, cos_sin_at, frequencies
from tests.support.canaries import DTYPES, assert_near

kernel = pytest.importorskip("roost.kernels.cos_sin")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "head_dim"), [(1, 128), (7, 64), (33, 80), (5, 22), (0, 64)])
def test_cos_and_sin_equal_the_reference(
    num_tokens: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    positions = torch.randint(0, 130_000, (num_tokens,), generator=generator).to(device)
    frequency = frequencies(Rope(theta=500_000.0), head_dim, device)
    cos, sin = kernel.cos_sin(positions, frequency, dtype)
    both, wanted = cos_sin_at(positions, frequency, dtype)
    assert_near(cos, both[..., : head_dim // 2])
    assert_near(sin, wanted)


def test_branches_of_one_round_share_their_position(device: torch.device) -> None:
    frequency = frequencies(Rope(theta=10_000.0), 64, device)
    positions = torch.tensor([[77]], device=device).expand(1, 4).flatten()
    assert positions.stride() == (0,)
    cos, sin = kernel.cos_sin(positions, frequency, torch.float32)
    both, wanted = cos_sin_at(positions, frequency, torch.float32)
    assert_near(cos, both[..., :32])
    assert_near(sin, wanted)
