"""A projection of few tokens with tensor cores, with half of the norm in front of it and the gate or the sum behind it.

out = epilogue(x @ weight^T), x [num_tokens, in], weight [out, in]; sums in float32, rounded once. The epilogue adds a
residual, or makes activation(gate) * up of both halves of the weight. A norm is shared out between two products: the
one in front writes its sum times the norm's weight, and the sums of its squares tile by tile; the one behind takes the
products of those rows and scales each token's by 1 / sqrt(mean of squares + eps). Every weight is read once for each
BLOCK_M tokens. The reference is in `layers.ops`. Called by `kernels.ops`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from roost.kernels.capability import can_overlap, launch_options
from roost.kernels.gated_activation import ACTIVATION_CODES, activated
from roost.kernels.linear_tilings import BlockTiling
from roost.layers.ops import Scaled

_INTERPRETED = knobs.runtime.interpret


def few_token_linear(
    x: Tensor,
    weight: Tensor,
    tiling: BlockTiling,
    *,
    squares: Tensor | None = None,
    eps: float = 0.0,
    residual: Tensor | None = None,
    activation: str | None = None,
    scaled: Scaled | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The projection [num_tokens, out]; with an activation half as wide.

    With `squares` [num_tokens, num_parts] x is what a product in front left in the rows of its `scaled`.
    """
    num_tokens, in_len = x.shape
    assert weight.shape[1] == in_len and weight.is_contiguous() and x.stride(1) == 1, (x.shape, weight.shape)
    assert residual is None or (activation is None and residual.stride(1) == 1)
    assert squares is None or squares.is_contiguous()
    out_len = weight.shape[0] if activation is None else weight.shape[0] // 2
    output = x.new_empty((num_tokens, out_len)) if out is None else out
    assert output.is_contiguous()
    tiles_m, tiles_n = -(-num_tokens // tiling.block_m), -(-out_len // tiling.block_n)
    written = (None, None, None) if scaled is None else (scaled.weight, scaled.rows, scaled.squares)
    assert scaled is None or scaled.squares.shape == (num_tokens, tiles_n), (scaled.squares.shape, tiles_n)
    num_squares, overlap = 0 if squares is None else squares.shape[1], can_overlap(x.device)
    if num_tokens:
        _blocks[(tiles_n, tiles_m)](
            *_operands(x, weight, tiling),
            *(squares, residual, output, *written, eps),
            *(num_tokens, x.stride(0), 0 if residual is None else residual.stride(0)),
            OUT_LEN=out_len,
            IN_LEN=in_len,
            NUM_SQUARES=num_squares,
            ACTIVATION=ACTIVATION_CODES[activation],
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            BLOCK_S=triton.next_power_of_2(max(1, num_squares)),
            STAGES=tiling.num_stages,
            USES_TMA=tiling.uses_tma,
            PREFETCH=tiling.prefetch_lines if overlap else 0,
            OVERLAP=overlap,
            WIDE=_INTERPRETED,
            num_warps=tiling.num_warps,
            **launch_options(overlap),
        )
    return output


def new_scaled(num_tokens: int, weight: Tensor, tiling: BlockTiling, norm_weight: Tensor) -> Scaled:
    """Memory for what a product by `weight` [out, in] leaves to the norm behind it."""
    out_len, device = weight.shape[0], weight.device
    rows = torch.empty((num_tokens, out_len), dtype=weight.dtype, device=device)
    squares = torch.empty((num_tokens, -(-out_len // tiling.block_n)), dtype=torch.float32, device=device)
    return Scaled(weight=norm_weight, rows=rows, squares=squares)


def _operands(x: Tensor, weight: Tensor, tiling: BlockTiling) -> tuple[Tensor | TensorDescriptor, ...]:
    """Tokens and weights as the kernel takes them."""
    if not tiling.uses_tma:
        return x, weight
    return (
        TensorDescriptor(x, list(x.shape), [x.stride(0), 1], [tiling.block_m, tiling.block_k]),
        TensorDescriptor(weight, list(weight.shape), [weight.stride(0), 1], [tiling.block_n, tiling.block_k]),
    )


@triton.jit(do_not_specialize=["num_tokens"])
def _blocks(
    x,  # [num_tokens, IN_LEN]
    weight,  # [OUT_LEN, IN_LEN]; [2 * OUT_LEN, IN_LEN] with an activation
    squares,  # [num_tokens, NUM_SQUARES] or None
    residual,  # [num_tokens, OUT_LEN] or None
    output,  # [num_tokens, OUT_LEN]
    next_weight,  # [OUT_LEN] or None
    next_rows,  # [num_tokens, OUT_LEN] or None
    next_squares,  # [num_tokens, number of tiles] or None
    eps,
    num_tokens,
    x_stride,
    residual_stride,
    OUT_LEN: tl.constexpr,
    IN_LEN: tl.constexpr,
    NUM_SQUARES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_S: tl.constexpr,
    STAGES: tl.constexpr,
    USES_TMA: tl.constexpr,
    PREFETCH: tl.constexpr,
    OVERLAP: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no product of bfloat16
):
    first, first_token = tl.program_id(0) * BLOCK_N, tl.program_id(1) * BLOCK_M
    token, column = first_token + tl.arange(0, BLOCK_M), first + tl.arange(0, BLOCK_N)
    if PREFETCH > 0:
        _prefetch(weight, column, OUT_LEN, IN_LEN, PREFETCH)
        if ACTIVATION != 0:
            _prefetch(weight + OUT_LEN * IN_LEN, column, OUT_LEN, IN_LEN, PREFETCH)
    if OVERLAP:
        gdc_wait()
        gdc_launch_dependents()
    is_token = (token < num_tokens)[:, None]
    square = tl.zeros((BLOCK_M, BLOCK_S), dtype=tl.float32)
    if squares is not None:
        part = tl.arange(0, BLOCK_S)[None, :]
        square = tl.load(squares + token[:, None] * NUM_SQUARES + part, mask=is_token & (part < NUM_SQUARES), other=0.0)
    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    ups = sums
    for start in tl.range(0, IN_LEN, BLOCK_K, num_stages=STAGES):
        taken = _tokens(x, first_token, start, num_tokens, x_stride, IN_LEN, BLOCK_M, BLOCK_K, USES_TMA)
        w = _weights(weight, first, 0, start, OUT_LEN, IN_LEN, BLOCK_N, BLOCK_K, USES_TMA)
        if WIDE:
            taken, w = taken.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(taken, w.T, sums)
        if ACTIVATION != 0:
            w_up = _weights(weight, first, OUT_LEN, start, OUT_LEN, IN_LEN, BLOCK_N, BLOCK_K, USES_TMA)
            ups = tl.dot(taken, w_up.to(taken.dtype).T, ups)
    if squares is not None:
        scale = tl.rsqrt(tl.sum(square, 1) / IN_LEN + eps)[:, None]
        sums, ups = sums * scale, ups * scale
    if ACTIVATION != 0:
        sums = activated(sums, ACTIVATION) * ups
    is_cell, row = is_token & (column < OUT_LEN)[None, :], token.to(tl.int64)[:, None]
    if residual is not None:
        sums += tl.load(residual + row * residual_stride + column[None, :], mask=is_cell, other=0.0).to(tl.float32)
    rounded = sums.to(output.dtype.element_ty)
    tl.store(output + row * OUT_LEN + column[None, :], rounded, mask=is_cell)
    if next_weight is not None:
        wide = tl.where(is_cell, rounded.to(tl.float32), 0.0)
        factor = tl.load(next_weight + column, mask=column < OUT_LEN, other=0.0)[None, :]
        tl.store(next_rows + row * OUT_LEN + column[None, :], (wide * factor).to(rounded.dtype), mask=is_cell)
        cells = next_squares + token * tl.num_programs(0) + tl.program_id(0)
        tl.store(cells, tl.sum(wide * wide, 1), mask=token < num_tokens)


@triton.jit
def _tokens(
    x,
    first,
    start,
    num_tokens,
    x_stride,
    IN_LEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USES_TMA: tl.constexpr,
):
    """A block of the tokens [BLOCK_M, BLOCK_K]; past the end zero."""
    if USES_TMA:
        taken = x.load([first, start])
    else:
        token, k = first + tl.arange(0, BLOCK_M), (start + tl.arange(0, BLOCK_K))[None, :]
        is_in = (token < num_tokens)[:, None] & (k < IN_LEN)
        taken = tl.load(x + token.to(tl.int64)[:, None] * x_stride + k, mask=is_in, other=0.0)
    return taken


@triton.jit
def _weights(
    weight,
    first,
    skipped,
    start,
    OUT_LEN: tl.constexpr,
    IN_LEN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    USES_TMA: tl.constexpr,
):
    """A block of the weights [BLOCK_N, BLOCK_K] behind `skipped` rows; read once, they need no place in a cache."""
    if USES_TMA:
        w = weight.load([skipped + first, start])
    else:
        column, k = tl.arange(0, BLOCK_N), (start + tl.arange(0, BLOCK_K))[None, :]
        cells = weight + (skipped + first).to(tl.int64) * IN_LEN + column[:, None] * IN_LEN + k
        if OUT_LEN % BLOCK_N == 0 and IN_LEN % BLOCK_K == 0:
            w = tl.load(cells, eviction_policy="evict_first")
        else:
            is_in = (first + column < OUT_LEN)[:, None] & (k < IN_LEN)
            w = tl.load(cells, mask=is_in, other=0.0, eviction_policy="evict_first")
    return w


@triton.jit
def _prefetch(weight, column, OUT_LEN: tl.constexpr, IN_LEN: tl.constexpr, LINES: tl.constexpr):
    """Ask for the first lines of each row to be brought to L2."""
    row, line = tl.minimum(column, OUT_LEN - 1).to(tl.int64)[:, None], tl.arange(0, LINES)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight + row * IN_LEN + tl.minimum(line * 64, IN_LEN - 1)],  # 64 numbers are a line
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
