"""Quantised KV, the torch reference: a head's vector as eight-bit codes and one scale.

scale = largest magnitude / largest code; code = vector / scale, to the nearest, ties to even; code * scale is read. So
what a slot holds depends on its token alone, not on who is written beside it or on what it held before. A vector of
zeros, or of numbers too small for a scale, is kept as zeros with scale 0. One with an infinity or a NaN gets the scale
NaN, and whoever reads it sees that, as without quantisation. Called by attention backends and by KV shapes.
"""

import torch
from torch import Tensor

CODE_DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}  # --kv-cache-dtype -> type of the codes
CODE_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}
SCALE_DTYPE = torch.float32
SCALE_LEAST = 2.0**-126  # below it a scale has no reciprocal


def quantise(vectors: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Codes of vectors [..., head_dim], and their scales [...]."""
    most, wide = CODE_MAX[dtype], vectors.to(SCALE_DTYPE)
    sizes = wide.abs()
    sizes = sizes.where(sizes < torch.inf, torch.inf).amax(dim=-1)  # infinite for a NaN, too
    scales = sizes * (1 / most)
    is_coded = (scales >= SCALE_LEAST) & (sizes < torch.inf)
    codes = (wide * scales.reciprocal()[..., None]).where(is_coded[..., None], 0.0).clamp_(-most, most)
    if dtype == torch.int8:
        codes.round_()
    nothing = torch.where(sizes < torch.inf, 0.0, torch.nan)
    return codes.to(dtype), scales.where(is_coded, nothing)


def dequantise(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors [..., head_dim] of codes and their scales [...]."""
    return (codes.to(SCALE_DTYPE) * scales[..., None]).to(dtype)
