"""A projection of one token, with the norm in front of it and the gate or the sum behind it.

out = epilogue(norm(x) @ weight^T), x [1, in], weight [out, in]: multiplied and summed in float32 without tensor cores,
rounded once. The epilogue adds a residual, or makes activation(gate) * up of both halves of the weight. Every weight is
read once, one tile ahead of its use, and the first tile before the kernel in front has ended. Where rows are read whole
the token stays in registers, and its norm is taken once. The reference is in `layers.ops`. Called by `kernels.ops`.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from roost.kernels.capability import can_overlap, launch_options
from roost.kernels.gated_activation import ACTIVATION_CODES, activated
from roost.kernels.linear_tilings import RowTiling


def one_token_linear(
    x: Tensor,
    weight: Tensor,
    tiling: RowTiling,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The projection [1, out]; with an activation half as wide.

    Where rows are not read whole there can be neither an activation nor a norm.
    """
    in_len = x.shape[1]
    assert len(x) == 1 and weight.shape[1] == in_len and weight.is_contiguous(), (x.shape, weight.shape)
    assert x.stride(1) == 1 and (residual is None or residual.stride(1) == 1)
    out_len = weight.shape[0] if activation is None else weight.shape[0] // 2
    output = x.new_empty((1, out_len)) if out is None else out
    num_tiles, overlap = -(-out_len // tiling.block_n), can_overlap(x.device)
    sizes = {
        "OUT_LEN": out_len,
        "IN_LEN": in_len,
        "BLOCK_N": tiling.block_n,
        "BLOCK_K": tiling.block_k,
        "OVERLAP": overlap,
        "num_warps": tiling.num_warps,
        **launch_options(overlap),
    }
    if tiling.block_k >= in_len:
        num_programs = min(num_tiles, tiling.num_programs or num_tiles)
        _whole_rows[(num_programs,)](
            *(x, weight, norm_weight, residual, output, eps),
            **sizes,
            ACTIVATION=ACTIVATION_CODES[activation],
            NUM_PROGRAMS=num_programs,
        )
    else:
        assert norm_weight is None and activation is None
        _long_rows[(num_tiles,)](x, weight, residual, output, **sizes)
    return output


@triton.jit
def _whole_rows(
    x,  # [IN_LEN]
    weight,  # [OUT_LEN, IN_LEN]; [2 * OUT_LEN, IN_LEN] with an activation
    norm_weight,  # [IN_LEN] or None
    residual,  # [OUT_LEN] or None
    output,  # [OUT_LEN]
    eps,
    OUT_LEN: tl.constexpr,
    IN_LEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    NUM_TILES: tl.constexpr = (OUT_LEN + BLOCK_N - 1) // BLOCK_N
    program, column = tl.program_id(0), tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    w = _rows(weight, program * BLOCK_N + column, k, OUT_LEN, IN_LEN)
    w_up = w
    if ACTIVATION != 0:
        w_up = _rows(weight + OUT_LEN * IN_LEN, program * BLOCK_N + column, k, OUT_LEN, IN_LEN)
    factor = tl.zeros((1, BLOCK_K), dtype=tl.float32)
    if norm_weight is not None:
        factor = tl.load(norm_weight + k, mask=k < IN_LEN, other=0.0)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    token = tl.load(x + k, mask=k < IN_LEN, other=0.0).to(tl.float32)
    if norm_weight is not None:
        token = token * factor * tl.rsqrt(tl.sum(token * token, 1) / IN_LEN + eps)[:, None]
    for tile in tl.range(program, NUM_TILES, NUM_PROGRAMS, num_stages=1):
        row, next_row = tile * BLOCK_N + column, (tile + NUM_PROGRAMS) * BLOCK_N + column
        w_next = _rows(weight, next_row, k, OUT_LEN, IN_LEN)
        w_up_next = w_next
        if ACTIVATION != 0:
            w_up_next = _rows(weight + OUT_LEN * IN_LEN, next_row, k, OUT_LEN, IN_LEN)
        sums = tl.sum(w.to(tl.float32) * token, 1)
        if ACTIVATION != 0:
            sums = activated(sums, ACTIVATION) * tl.sum(w_up.to(tl.float32) * token, 1)
        if residual is not None:
            sums += tl.load(residual + row, mask=row < OUT_LEN, other=0.0).to(tl.float32)
        tl.store(output + row, sums.to(output.dtype.element_ty), mask=row < OUT_LEN)
        w, w_up = w_next, w_up_next


@triton.jit
def _long_rows(
    x,  # [IN_LEN]
    weight,  # [OUT_LEN, IN_LEN]
    residual,  # [OUT_LEN] or None
    output,  # [OUT_LEN]
    OUT_LEN: tl.constexpr,
    IN_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)[None, :]
    w = _rows(weight, row, k, OUT_LEN, IN_LEN)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, IN_LEN, BLOCK_K, num_stages=1):
        token = tl.load(x + start + k, mask=start + k < IN_LEN, other=0.0).to(tl.float32)
        w_now = w.to(tl.float32)
        w = _rows(weight, row, start + BLOCK_K + k, OUT_LEN, IN_LEN)
        sums += w_now * token
    total = tl.sum(sums, 1)
    if residual is not None:
        total += tl.load(residual + row, mask=row < OUT_LEN, other=0.0).to(tl.float32)
    tl.store(output + row, total.to(output.dtype.element_ty), mask=row < OUT_LEN)


@triton.jit
def _rows(weight, row, k, OUT_LEN: tl.constexpr, IN_LEN: tl.constexpr):
    """Weights, which are read once and need no place in a cache; past the end zero, unread."""
    cells = weight + row.to(tl.int64)[:, None] * IN_LEN + k
    return tl.load(cells, mask=(row < OUT_LEN)[:, None] & (k < IN_LEN), other=0.0, eviction_policy="evict_first")
