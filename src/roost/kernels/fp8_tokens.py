"""Tokens as e4m3 numbers, each with a scale of its own: what a W8A8 product reads.

scale[m] = max over k of |x[m, k]| / 448, values = x / scale rounded to the nearest e4m3 number. Reads every number once
and writes a byte for it; a row is one program's. The reference is `layers.fp8.round_tokens`. Called by `fp8_linear`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from roost.kernels.capability import can_overlap, launch_options
from roost.layers.fp8 import FP8, FP8_MAX, SCALE_LEAST

_INTERPRETED = knobs.runtime.interpret


def round_tokens(hidden: Tensor, *, out: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Rows as e4m3 numbers [num_rows, row_len] and a float32 scale for each [num_rows, 1]."""
    assert hidden.ndim == 2 and hidden.stride(1) == 1
    num_rows, row_len = hidden.shape
    values = torch.empty((num_rows, row_len), dtype=FP8, device=hidden.device) if out is None else out
    scales = torch.empty((num_rows, 1), dtype=torch.float32, device=hidden.device)
    block, overlap = triton.next_power_of_2(row_len), can_overlap(hidden.device)
    if num_rows:
        _round_tokens[(num_rows,)](
            *(hidden, values, scales, hidden.stride(0)),
            ROW_LEN=row_len,
            LARGEST=FP8_MAX,
            SCALE_LEAST=SCALE_LEAST,
            BLOCK=block,
            OVERLAP=overlap,
            WIDE=_INTERPRETED,
            num_warps=max(1, min(16, block // 512)),
            **launch_options(overlap),
        )
    return values, scales


@triton.jit
def _round_tokens(
    hidden,
    values,
    scales,
    row_stride,
    ROW_LEN: tl.constexpr,
    LARGEST: tl.constexpr,
    SCALE_LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDE: tl.constexpr,  # round before the conversion: the interpreter's loses carries
):
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    is_in = place < ROW_LEN
    wide = tl.load(hidden + row * row_stride + place, mask=is_in, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(wide), 0), SCALE_LEAST) / LARGEST
    numbers = tl.clamp(wide / scale, -LARGEST, LARGEST)
    if WIDE:  # to a multiple of the last bit, which a number 1.5 * 2^23 times as large makes a sum round to
        power = (numbers.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        large = tl.maximum(power, 0.015625) / 8 * 12582912.0
        numbers = (numbers + large) - large
    tl.store(values + row * ROW_LEN + place, numbers.to(values.dtype.element_ty), mask=is_in)
    tl.store(scales + row, scale)
