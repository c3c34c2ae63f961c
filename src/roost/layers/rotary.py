"""Rotary position embedding, the torch reference.

Dimension i of a head is rotated together with dimension i + head_dim / 2, by the angle position * frequency(i).
Frequencies are theta^(-2i / head_dim), slowed down where a checkpoint was stretched to longer contexts. Angles are
float32 whatever the model's type. Called by models: frequencies once, cos and sin once a forward pass, `rotate` in
every layer.
"""

from dataclasses import dataclass, replace
from math import ceil, floor, log, pi

import torch
from torch import Tensor
from torch.nn.functional import pad

CosSin = tuple[Tensor, Tensor]  # cos [num_tokens, 1, head_dim] and sin [num_tokens, 1, head_dim / 2]


@dataclass(frozen=True, slots=True, kw_only=True)
class Bands:
    """Which frequencies Llama 3 slows down: those that rotate less than this often in the original context."""

    low_freq_factor: float  # up to this many rotations: slowed by the whole factor
    high_freq_factor: float  # from this many on: left alone; in between by a mix of both
    original_len: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Yarn:
    """Which frequencies YaRN slows down: those that rotate less than this often in the original context."""

    beta_fast: float  # from this many rotations on: left alone
    beta_slow: float  # up to this many: slowed by the whole factor; in between by a mix of both, pair by pair
    original_len: int
    truncate: bool  # whether the mix begins and ends at whole pairs


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How fast the dimensions of a head rotate."""

    theta: float
    factor: float = 1.0  # frequencies are divided by it
    bands: Bands | None = None  # None: all frequencies alike
    yarn: Yarn | None = None
    length: float = 1.0  # what rotates is so much longer afterwards: see `DecoderConfig.heads_of`
    divisors: tuple[float, ...] = ()  # of each frequency, where a checkpoint states them instead
    rotated_len: int | None = None  # so many dimensions rotate, and the rest stay as they are; None: all rotate
    pairs_share: float = 1.0  # of the pairs of dimensions the first so many rotate, as fast as if all did


def frequencies(rope: Rope, head_dim: int, device: torch.device) -> Tensor:
    """Angle per position of each pair of dimensions: [head_dim / 2]."""
    if rope.rotated_len is not None:  # pairs that stay as they are, are behind the others: see `rotated_order`
        fast = frequencies(replace(rope, rotated_len=None), rope.rotated_len, device)
        return pad(fast, (0, (head_dim - rope.rotated_len) // 2))
    if rope.pairs_share != 1.0:
        every = frequencies(replace(rope, pairs_share=1.0), head_dim, device)
        return every * (torch.arange(head_dim // 2, device=device) < int(rope.pairs_share * head_dim // 2))
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    fast = 1.0 / rope.theta**exponents
    if rope.divisors:
        return (fast / torch.tensor(rope.divisors)).to(device)
    slow, bands = fast / rope.factor, rope.bands
    if rope.yarn is not None:
        return torch.lerp(fast, slow, _yarn_shares(rope.theta, rope.yarn, head_dim)).to(device)
    if bands is None:
        return slow.to(device)
    rotations = bands.original_len * fast / (2 * pi)
    share = (rotations - bands.low_freq_factor) / (bands.high_freq_factor - bands.low_freq_factor)
    return torch.lerp(slow, fast, share.clamp(0, 1)).to(device)


def _yarn_shares(theta: float, yarn: Yarn, head_dim: int) -> Tensor:
    """How much each pair of dimensions is slowed down: from 0, not at all, to 1, by the whole factor."""
    low, high = (  # pairs that rotate so often in the original context
        head_dim * log(yarn.original_len / (rotations * 2 * pi)) / (2 * log(theta))
        for rotations in (yarn.beta_fast, yarn.beta_slow)
    )
    if yarn.truncate:
        low, high = floor(low), ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    steps = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / ((high - low) or 0.001)
    return steps.clamp(0, 1)


def rotated_order(rotated_len: int, head_dim: int) -> list[int]:
    """Dimensions of a head, of which the first `rotated_len` rotate among themselves, in the order described above.

    Those that rotate together are half a head apart. Products of queries and keys are the same in any order.
    """
    half, rest = rotated_len // 2, (head_dim - rotated_len) // 2
    first, second = range(half), range(half, rotated_len)
    return [*first, *range(rotated_len, rotated_len + rest), *second, *range(rotated_len + rest, head_dim)]


def cos_sin_at(positions: Tensor, frequency: Tensor, dtype: torch.dtype) -> CosSin:
    """Cosines and sines of each token's angles, ready for `rotate`."""
    angles = (positions[:, None] * frequency)[:, None]
    cos = angles.cos().to(dtype)
    return torch.cat([cos, cos], dim=-1), angles.sin().to(dtype)


def rotate(heads: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate queries or keys [num_tokens, num_heads, head_dim] by their angles."""
    cos, sin = cos_sin
    rotated = heads * cos
    left, right = heads.chunk(2, dim=-1)
    rotated_left, rotated_right = rotated.chunk(2, dim=-1)
    rotated_left.addcmul_(right, sin, value=-1)  # in place: a prefill chunk is bound by memory here
    rotated_right.addcmul_(left, sin)
    return rotated
