"""The sum of the residual stream times a factor.

y = factor * (hidden + added); the sum is rounded to its type before it is scaled, as the residual stream is. Reads
every number once and writes half as many, or as many where nothing is added. The reference is in `layers.ops`. Called
by models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def scaled_sum(hidden: Tensor, added: Tensor | None, factor: float, *, out: Tensor | None = None) -> Tensor:
    """Of [num_tokens, width]."""
    rows, more = hidden.flatten(0, -2), None if added is None else added.flatten(0, -2)
    assert rows.stride(1) == 1 and (more is None or (more.shape == rows.shape and more.stride(1) == 1))
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device) if out is None else out
    assert output.is_contiguous()
    if output.numel():
        _scaled_sum[(rows.shape[0], triton.cdiv(rows.shape[1], _BLOCK))](
            *(rows, more, output, factor, rows.stride(0), 0 if more is None else more.stride(0)),
            WIDTH=rows.shape[1],
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return output


@triton.jit
def _scaled_sum(hidden, added, output, factor, token_stride, added_stride, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_in = column < WIDTH
    total = tl.load(hidden + token * token_stride + column, mask=is_in, other=0.0).to(tl.float32)
    if added is not None:
        total += tl.load(added + token * added_stride + column, mask=is_in, other=0.0).to(tl.float32)
        total = total.to(output.dtype.element_ty).to(tl.float32)
    tl.store(output + token * WIDTH + column, (total * factor).to(output.dtype.element_ty), mask=is_in)
