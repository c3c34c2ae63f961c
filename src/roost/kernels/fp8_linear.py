"""Products by FP8 weights: read as they are kept and converted in registers (W8A16), or with FP8 tokens (W8A8).

y[m, n] = sum over blocks b of scale[n, b] * sum over k in b of value[n, k] * x[m, k], + bias[n]; x [num_tokens, in],
sums in float32, rounded once. Reads the values once for each tile of tokens: one byte a weight. The inputs may be split
among programs, so that all multiprocessors read; the last of a tile to arrive adds the parts up in order, so that the
same input gives the same bits. More than a few tokens are rounded; of many, `torch._scaled_mm` makes the product. The
reference is `layers.fp8`. Called by linear layers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import linear
from triton import knobs
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from roost.kernels.capability import can_overlap, launch_options, shared_bytes
from roost.kernels.fp8_tilings import ROUNDED_FROM, SCALED_MM_FROM, Fp8Tiling, fp8_tiling
from roost.kernels.fp8_tokens import round_tokens
from roost.layers.fp8 import Fp8Weight

_ALIGNED = 16  # what torch._scaled_mm needs outputs and inputs to be multiples of, and tensor cores a block's inputs
_PREFETCHED = 4  # lines of 128 weights of each row, asked for while the kernel in front still runs
_INTERPRETED = knobs.runtime.interpret


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Linear:
    """A projection by FP8 weights; kernels that fuse it with what stands around it may read its fields."""

    weight: Fp8Weight
    bias: Tensor | None
    arrivals: Tensor  # of splits, by tile: all zero between launches

    def __call__(self, hidden: Tensor) -> Tensor:
        """[num_tokens, in_len] -> [num_tokens, out_len]."""
        weight, (out_len, in_len) = self.weight, self.weight.shape
        is_rounded = weight.rounds_tokens and weight.is_per_channel and len(hidden) >= ROUNDED_FROM
        token_scales = None
        if is_rounded:
            hidden, token_scales = round_tokens(hidden)
            if len(hidden) >= SCALED_MM_FROM and out_len % _ALIGNED == in_len % _ALIGNED == 0:
                return self._scaled_mm(hidden, token_scales)
        tiling = fp8_tiling(len(hidden), out_len, in_len, columns=weight.block[1], is_rounded=is_rounded)
        return fp8_linear(hidden, weight, tiling, token_scales=token_scales, bias=self.bias, arrivals=self.arrivals)

    def _scaled_mm(self, tokens: Tensor, token_scales: Tensor) -> Tensor:
        # sums in fewer bits ("fast") are no further from the floats than rounded tokens are: 2.66% of the norm
        product = torch._scaled_mm(
            tokens,
            self.weight.values.t(),
            scale_a=token_scales,
            scale_b=self.weight.scales.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        return product if self.bias is None else product.add_(self.bias)


def make_projection(weight: Fp8Weight, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """The projection by a weight, in bfloat16."""
    if not weight.is_per_channel and weight.block[1] % _ALIGNED:
        return partial(linear, weight=weight.dequantise().to(torch.bfloat16), bias=bias)
    return Fp8Linear(weight, bias, torch.zeros(weight.shape[0], dtype=torch.int32, device=weight.values.device))


def fp8_linear(
    x: Tensor,
    weight: Fp8Weight,
    tiling: Fp8Tiling,
    *,
    token_scales: Tensor | None = None,
    bias: Tensor | None = None,
    arrivals: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product [num_tokens, out_len] in bfloat16; x is bfloat16, or e4m3 with `token_scales` [num_tokens, 1].

    `arrivals` (int32, all zero, and so again afterwards) counts the splits of each tile that are done.
    """
    (num_tokens, in_len), (out_len, _) = x.shape, weight.shape
    assert weight.shape[1] == in_len and weight.values.is_contiguous() and weight.scales.is_contiguous()
    assert x.stride(1) == 1 and (weight.is_per_channel or weight.block[1] % tiling.block_k == 0), (weight.block, tiling)
    output = torch.empty((num_tokens, out_len), dtype=torch.bfloat16, device=x.device) if out is None else out
    tiles_m, tiles_n = triton.cdiv(num_tokens, tiling.block_m), triton.cdiv(out_len, tiling.block_n)
    iterations = triton.cdiv(in_len, tiling.block_k * tiling.num_splits)
    overlap, partials = can_overlap(x.device), None
    if tiling.num_splits > 1:
        assert arrivals is not None and arrivals.numel() >= tiles_m * tiles_n, (tiles_m, tiles_n)
        cells = tiles_m * tiles_n * tiling.num_splits * tiling.block_m * tiling.block_n
        partials = torch.empty(cells, dtype=torch.float32, device=x.device)
    if num_tokens:
        _fp8_linear[(tiles_n, tiling.num_splits, tiles_m)](
            *(
                x,
                weight.values,
                weight.scales,
                token_scales,
                bias,
                output,
                partials,
                arrivals if partials is not None else None,
            ),
            *(num_tokens, x.stride(0)),
            OUT_LEN=out_len,
            IN_LEN=in_len,
            SCALE_ROWS=weight.block[0],
            SCALE_COLUMNS=weight.block[1],
            SPLIT_LEN=iterations * tiling.block_k,
            NUM_SPLITS=tiling.num_splits,
            BLOCK_M=tiling.block_m,
            BLOCK_N=tiling.block_n,
            BLOCK_K=tiling.block_k,
            STAGES=min(tiling.num_stages, shared_bytes(x.device) // tiling.stage_bytes(x.element_size())),
            PREFETCHED=_PREFETCHED,
            OVERLAP=overlap,
            SWAPPED=tiling.swapped,
            WIDE=_INTERPRETED,
            num_warps=tiling.num_warps,
            **launch_options(overlap),
        )
    return output


# e4m3 to bfloat16, four at a time: exponent and mantissa move to bfloat16's places, where the number is smaller by
# 2^120, which one product mends, subnormal numbers included.
_CONVERT = tl.constexpr(
    "{ .reg .b32 a, b, s, t, up; mov.b32 up, 0x7b807b80; "
    "prmt.b32 a, 0, $2, 0x5140; prmt.b32 b, 0, $2, 0x7362; "
    "and.b32 s, a, 0x80008000; and.b32 a, a, 0x7f007f00; shr.b32 a, a, 4; or.b32 a, a, s; mul.rn.bf16x2 $0, a, up; "
    "and.b32 t, b, 0x80008000; and.b32 b, b, 0x7f007f00; shr.b32 b, b, 4; or.b32 b, b, t; mul.rn.bf16x2 $1, b, up; }"
)


@triton.jit
def _converted(values, WIDE: tl.constexpr):
    """e4m3 numbers as bfloat16, exactly; Triton's own conversion goes through float32, at a quarter of the rate."""
    if WIDE:
        numbers = values.to(tl.float32)
    else:
        numbers = tl.inline_asm_elementwise(_CONVERT, "=r,=r,r", [values], dtype=tl.bfloat16, is_pure=True, pack=4)
    return numbers


@triton.jit(do_not_specialize=["num_tokens"])
def _fp8_linear(
    x,  # [num_tokens, IN_LEN]
    values,  # [OUT_LEN, IN_LEN]
    scales,  # [OUT_LEN / SCALE_ROWS, IN_LEN / SCALE_COLUMNS], both rounded up
    token_scales,  # [num_tokens] where x is e4m3, or None
    bias,  # [OUT_LEN] or None
    output,  # [num_tokens, OUT_LEN]
    partials,  # [tiles, NUM_SPLITS, BLOCK_M, BLOCK_N] or None
    arrivals,  # [tiles] or None
    num_tokens,
    x_stride,
    OUT_LEN: tl.constexpr,
    IN_LEN: tl.constexpr,
    SCALE_ROWS: tl.constexpr,
    SCALE_COLUMNS: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCHED: tl.constexpr,
    OVERLAP: tl.constexpr,
    SWAPPED: tl.constexpr,
    WIDE: tl.constexpr,  # the interpreter has no products of bfloat16
):
    EVEN: tl.constexpr = OUT_LEN % BLOCK_N == 0 and SPLIT_LEN * NUM_SPLITS == IN_LEN
    NUM_COLUMNS: tl.constexpr = (IN_LEN + SCALE_COLUMNS - 1) // SCALE_COLUMNS
    split = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    is_token, is_column = token < num_tokens, column < OUT_LEN
    rows = x + token.to(tl.int64)[:, None] * x_stride
    cells = values + column.to(tl.int64)[:, None] * IN_LEN
    scale_cells = scales + (column // SCALE_ROWS) * NUM_COLUMNS
    # outputs come first where the weights are the left factor, or where sums stay apart until the end
    LEFT: tl.constexpr = SWAPPED or BLOCK_M == 1
    WIDTH: tl.constexpr = BLOCK_K if BLOCK_M == 1 else BLOCK_M
    sums = tl.zeros((BLOCK_N, WIDTH) if LEFT else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    if OVERLAP:
        if PREFETCHED > 0:
            _prefetch(values, column, split * SPLIT_LEN, OUT_LEN, IN_LEN, PREFETCHED)
        gdc_wait()
        gdc_launch_dependents()
    for start in tl.range(0, SPLIT_LEN, BLOCK_K, num_stages=STAGES):
        k = split * SPLIT_LEN + start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(cells + k[None, :], eviction_policy="evict_first")
            taken = tl.load(rows + k[None, :], mask=is_token[:, None], other=0.0)
        else:
            is_k = (k < IN_LEN)[None, :]
            w = tl.load(cells + k[None, :], mask=is_column[:, None] & is_k, other=0.0, eviction_policy="evict_first")
            taken = tl.load(rows + k[None, :], mask=is_token[:, None] & is_k, other=0.0)
        if NUM_COLUMNS == 1:
            sums = _added(sums, w, taken, BLOCK_M == 1, SWAPPED, WIDE)
        else:
            at = tl.minimum((split * SPLIT_LEN + start) // SCALE_COLUMNS, NUM_COLUMNS - 1)  # what lies behind is zero
            scale = tl.load(scale_cells + at, mask=is_column, other=0.0)
            part = _added(tl.zeros_like(sums), w, taken, BLOCK_M == 1, SWAPPED, WIDE)
            sums += part * (scale[:, None] if LEFT else scale[None, :])
    if BLOCK_M == 1:
        sums = tl.sum(sums, 1)[None, :]
    elif SWAPPED:
        sums = sums.T
    if NUM_COLUMNS == 1:
        sums *= tl.load(scale_cells, mask=is_column, other=0.0)[None, :]
    if token_scales is not None:
        sums *= tl.load(token_scales + token, mask=is_token, other=0.0)[:, None]
    _finish(sums, bias, output, partials, arrivals, token, column, num_tokens, OUT_LEN, NUM_SPLITS, BLOCK_M, BLOCK_N)


@triton.jit
def _prefetch(values, column, begin, OUT_LEN: tl.constexpr, IN_LEN: tl.constexpr, LINES: tl.constexpr):
    """Ask for the first lines of each row to be brought to L2."""
    row, line = tl.minimum(column, OUT_LEN - 1).to(tl.int64)[:, None], tl.arange(0, LINES)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [values + row * IN_LEN + tl.minimum(begin + line * 128, IN_LEN - 1)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _added(sums, w, x, APART: tl.constexpr, SWAPPED: tl.constexpr, WIDE: tl.constexpr):
    """Sums and the products of a tile of weights [BLOCK_N, BLOCK_K] and one of tokens [BLOCK_M, BLOCK_K]."""
    if APART:
        sums += w.to(tl.float32) * x.to(tl.float32)
    else:
        if x.dtype != w.dtype or WIDE:
            w = _converted(w, WIDE)
        sums = tl.dot(w, x.to(w.dtype).T, sums) if SWAPPED else tl.dot(x.to(w.dtype), w.T, sums)
    return sums


@triton.jit
def _finish(
    sums,  # [BLOCK_M, BLOCK_N]
    bias,
    output,
    partials,
    arrivals,
    token,
    column,
    num_tokens,
    OUT_LEN: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write a tile; of several splits, the last to arrive adds up all of them."""
    is_last = True
    if NUM_SPLITS > 1:
        tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        place = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        held = partials + tile * (NUM_SPLITS * BLOCK_M * BLOCK_N) + place
        tl.store(held + tl.program_id(1) * (BLOCK_M * BLOCK_N), sums)
        tl.debug_barrier()  # all threads have written before one of them says so
        is_last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == NUM_SPLITS - 1
        if is_last:
            tl.store(arrivals + tile, 0)  # as the next launch expects it
            sums = tl.zeros_like(sums)
            for number in range(NUM_SPLITS):
                sums += tl.load(held + number * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
    if is_last:
        if bias is not None:
            sums += tl.load(bias + column, mask=column < OUT_LEN, other=0.0).to(tl.float32)[None, :]
        is_cell = (token < num_tokens)[:, None] & (column < OUT_LEN)[None, :]
        places = output + token.to(tl.int64)[:, None] * OUT_LEN + column[None, :]
        tl.store(places, sums.to(output.dtype.element_ty), mask=is_cell)
