"""Cosines and sines of the tokens' rotary angles, in one kernel a pass.

cos(position * frequency) and sin of the same, in float32, rounded once. A program is a block of tokens; writes 2 *
head_dim / 2 numbers a token. The reference is `layers.rotary.cos_sin_at`, whose cosines come twice, for both halves of
a head; the rotary kernel reads the first half alone. One of the `Ops` of models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.layers.rotary import CosSin

_BLOCK = 1024  # angles of a program


def cos_sin(positions: Tensor, frequency: Tensor, dtype: torch.dtype) -> CosSin:
    """Cosines and sines [num_tokens, 1, head_dim / 2] of positions [num_tokens]."""
    num_tokens, half = len(positions), len(frequency)
    assert frequency.is_contiguous()
    both = torch.empty((2, num_tokens, 1, half), dtype=dtype, device=positions.device)
    block_d = triton.next_power_of_2(half)
    block_t = max(1, _BLOCK // block_d)
    if num_tokens:
        _cos_sin[(triton.cdiv(num_tokens, block_t),)](
            *(positions, frequency, both, positions.stride(0), num_tokens),
            HALF=half,
            BLOCK_T=block_t,
            BLOCK_D=block_d,
            num_warps=4,
        )
    return both[0], both[1]


@triton.jit(do_not_specialize=["num_tokens", "position_stride"], do_not_specialize_on_alignment=["positions"])
def _cos_sin(
    positions,
    frequency,
    both,
    position_stride,
    num_tokens,
    HALF: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    position = tl.load(positions + token * position_stride, mask=token < num_tokens, other=0).to(tl.float32)
    angle = position[:, None] * tl.load(frequency + dims, mask=dims < HALF, other=0.0)[None, :]
    cells = both + token[:, None] * HALF + dims[None, :]
    is_in = (token < num_tokens)[:, None] & (dims < HALF)[None, :]
    tl.store(cells, tl.cos(angle).to(both.dtype.element_ty), mask=is_in)
    tl.store(cells + num_tokens.to(tl.int64) * HALF, tl.sin(angle).to(both.dtype.element_ty), mask=is_in)
