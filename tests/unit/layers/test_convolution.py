"""A short convolution is torch's, causal and channel by channel, and a token's bits do not depend on its batch."""

import pytest
import torch
from torch.nn.functional import conv1d, pad

from roost.layers.convolution import NOTHING_THERE, convolution, in_slots


@pytest.mark.parametrize("conv_len", [2, 3, 5])
def test_a_convolution_is_that_of_torch(conv_len: int) -> None:
    generator = torch.Generator().manual_seed(conv_len)
    inputs, weight = torch.randn(11, 6, generator=generator), torch.randn(6, conv_len, generator=generator)
    slots = torch.arange(11)[:, None] - torch.arange(conv_len - 1, 0, -1)
    before = in_slots(inputs, slots.where(slots >= 0, NOTHING_THERE))
    wanted = conv1d(pad(inputs.t(), (conv_len - 1, 0)), weight[:, None], groups=6).t()
    found = convolution(inputs, before, weight)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)
    for token in range(11):
        one = convolution(inputs[token : token + 1], before[token : token + 1], weight)
        assert torch.equal(one, found[token : token + 1])


def test_before_the_first_token_there_are_zeros_whatever_lies_in_the_slots() -> None:
    buffer = torch.full((4, 3), torch.nan)
    buffer[2] = 1.0
    found = in_slots(buffer, torch.tensor([[NOTHING_THERE, 2]]))
    assert found.tolist() == [[[0.0] * 3, [1.0] * 3]]
