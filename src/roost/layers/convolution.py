"""Short convolutions: each channel of a token is a weighted sum of the same channel of the last few tokens' inputs.

What a convolution over k tokens needs of a sequence is its last k - 1 inputs: they are kept in slots like keys, and a
window of k tokens lets go of them as of keys. Sums run from the token itself backwards, so that a token's bits are the
same in a chunk, in a round and alone. Called by layers, through whoever runs a pass.
"""

from typing import Protocol, runtime_checkable

from torch import Tensor

NOTHING_THERE = -1  # in place of a slot: before the first token


@runtime_checkable
class Convolves(Protocol):
    """A pass's way to the inputs of convolutions."""

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor) -> Tensor:
        """Keep the inputs [num_tokens, num_channels] of a layer, and convolve them with what was kept before."""
        ...


def convolution(inputs: Tensor, before: Tensor, weight: Tensor) -> Tensor:
    """Sums [num_tokens, num_channels] of inputs and those before them [num_tokens, k - 1, …], the last one nearest.

    `weight` [num_channels, k] has the token's own factor last.
    """
    total = inputs * weight[:, -1]
    for back in range(1, weight.shape[1]):
        total = total + before[:, -back] * weight[:, -1 - back]
    return total


def in_slots(buffer: Tensor, slots: Tensor) -> Tensor:
    """What lies in slots [num_tokens, n] of a buffer [num_slots, num_channels]; zeros before the first token."""
    return buffer[slots.clamp(min=0)].masked_fill((slots == NOTHING_THERE)[..., None], 0.0)
