"""Root-mean-square norm, and the same of a sum.

y = weight * x / sqrt(mean(x^2) + eps) over the last dimension, in float32 with a float32 weight, rounded once; the sum
hidden + added is rounded to its type before it is normed, as the residual stream is. Reads every number once and writes
each result once; a row is one program's. The reference is `layers.norm.rms_norm`. Called by models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from roost.kernels.capability import can_overlap, launch_options

_BLOCK = 1024  # numbers of a program whose rows are short


def rms_norm(hidden: Tensor, weight: Tensor, eps: float, *, out: Tensor | None = None) -> Tensor:
    """Normalise [num_rows, row_len] by a weight [row_len], or [num_tokens, num_heads, head_dim] by one of each head."""
    normed = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
    _launch(hidden, None, weight, eps, None, normed)
    return normed


def add_rms_norm(
    hidden: Tensor, added: Tensor, weight: Tensor, eps: float, *, out: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor]:
    """The sum of two [num_rows, row_len], and its norm."""
    assert hidden.shape == added.shape and hidden.dtype == added.dtype and added.stride(-1) == 1
    summed, normed = (
        (torch.empty_like(hidden, memory_format=torch.contiguous_format) for _ in range(2)) if out is None else out
    )
    _launch(hidden, added, weight, eps, summed, normed)
    return summed, normed


def _launch(
    hidden: Tensor, added: Tensor | None, weight: Tensor, eps: float, summed: Tensor | None, normed: Tensor
) -> None:
    assert hidden.ndim in (2, 3) and hidden.stride(-1) == weight.stride(-1) == 1 and normed.is_contiguous()
    assert added is None or added.ndim == 2
    num_tokens, row_len = hidden.shape[0], hidden.shape[-1]
    num_heads = hidden.shape[1] if hidden.ndim == 3 else 1
    block_d = triton.next_power_of_2(row_len)
    block_h = min(triton.next_power_of_2(num_heads), max(1, _BLOCK // block_d))
    overlap = can_overlap(hidden.device)
    if normed.numel():
        _norm[(num_tokens, triton.cdiv(num_heads, block_h))](
            *(
                hidden,
                added,
                weight,
                summed,
                normed,
                eps,
                hidden.stride(0),
                hidden.stride(1) if hidden.ndim == 3 else 0,
            ),
            *(0 if added is None else added.stride(0), weight.stride(0) if weight.ndim == 2 else 0),
            NUM_HEADS=num_heads,
            ROW_LEN=row_len,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            OVERLAP=overlap,
            **launch_options(overlap),
            num_warps=max(1, min(16, block_h * block_d // 512)),
        )


@triton.jit
def _norm(
    hidden,
    added,
    weight,
    summed,
    normed,
    eps,
    token_stride,
    head_stride,
    added_stride,
    weight_stride,
    NUM_HEADS: tl.constexpr,
    ROW_LEN: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H))[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    is_in = (head < NUM_HEADS) & (dims < ROW_LEN)
    wide = tl.load(hidden + token * token_stride + head * head_stride + dims, mask=is_in, other=0.0).to(tl.float32)
    factor = tl.load(weight + head * weight_stride + dims, mask=is_in, other=0.0)
    place = (token * NUM_HEADS + head) * ROW_LEN + dims
    if added is not None:
        wide += tl.load(added + token * added_stride + dims, mask=is_in, other=0.0).to(tl.float32)
        rounded = wide.to(summed.dtype.element_ty)
        tl.store(summed + place, rounded, mask=is_in)
        wide = rounded.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / ROW_LEN + eps)
    tl.store(normed + place, (wide * scale[:, None] * factor).to(normed.dtype.element_ty), mask=is_in)
