"""Capped logits equal cap * tanh(logits / cap), in place; nothing beside them is written."""

import pytest
import torch

from roost.layers.soft_cap import soft_cap
from tests.support.canaries import DTYPES, assert_near

caps = pytest.importorskip("roost.kernels.soft_cap")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", [4096, 5000, 97])
def test_capped_logits_equal_the_reference_and_their_neighbours_stay(
    vocab_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    buffer = (torch.randn((3, vocab_size + 10), generator=generator) * 40).to(device, dtype)
    buffer[0, 0], buffer[1, 1] = 6e4, -6e4  # where exponents run over
    logits, before = buffer[:, :vocab_size], buffer.clone()
    exact = 30 * torch.tanh(before[:, :vocab_size].to(torch.float32) / 30)
    expected = before[:, :vocab_size].clone()
    soft_cap(expected, 30.0)
    caps.soft_cap(logits, 30.0)
    assert_near(expected, exact.to(dtype))
    assert_near(logits, exact.to(dtype), steps=4.0)
    assert torch.equal(buffer[:, vocab_size:], before[:, vocab_size:])
    assert logits.abs().amax() <= 30
