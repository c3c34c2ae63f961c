"""Products by 4-bit and 8-bit weights in groups, which are read as they are kept and become floats in registers.

y[m, n] = sum over groups g of scale[g, n] * sum over k in g of (value[n, k] - zero[g, n]) * x[m, k], + bias[n], in
float32 and rounded once; with minimums, weights are rounded to bfloat16 first, as they are where a matrix is kept so.
x [num_tokens, in_len] is bfloat16. Moves bits / 8 bytes a weight for each tile of tokens. Inputs are split among
programs, so that every multiprocessor reads; the last program of a tile to arrive adds the parts up in their order, so
that a product has the same bits in every run. Many tokens are multiplied by weights that were made floats, a part of
the outputs at a time. The reference is `layers.grouped`. Called by linear layers.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from roost.layers.grouped import OUT_MULTIPLE, SLICE_LEN, PackedMatrix

_INTERPRETED = knobs.runtime.interpret
_DTYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_DENSE_FROM = 224  # tokens from which on weights are made floats first
_DENSE_WEIGHTS = 2**26  # of one part: 128 MiB as bfloat16
_TOKENS_LEAST = 8  # of a tile
_TOKENS_MAX = 128
_OUTS_LEAST = 64  # outputs of the smallest tile
_OUTS_MANY = 2**14  # from which on tiles are larger, unless tokens are very few
_WARPS_ENOUGH = 760  # of all programs: inputs are not split further
_WARPS_LEAST = 512  # nor where there are so many and
_BLOCKS_MANY = 16  # each reads fewer blocks than these
_BLOCKS_LEAST = 2  # of a split
_SPLITS_MAX = 8

# Two words at a time, a field of 4 bits of each: behind the bits of 128.0 in bfloat16 it is 128 + value, exactly.
_UNPACK = tl.constexpr(
    tuple(
        "{ .reg .b32 pair, one; mov.b32 one, 0x3f803f80; "
        f"shr.b32 pair, $1, {shift}; lop3.b32 pair, pair, 0x000f000f, 0x43004300, 0xea; "
        "fma.rn.bf16x2 $0, pair, one, $2; }"
        for shift in (0, 4, 8, 12)
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """How a product is cut into programs."""

    tokens: int
    outs: int
    splits: int = 1  # of the inputs
    num_warps: int = 4
    num_stages: int = 4


class GroupedLinear:
    """A projection by a packed matrix."""

    def __init__(self, matrix: PackedMatrix, bias: Tensor | None) -> None:
        self._matrix = matrix
        self._bias = None if bias is None else bias.to(torch.bfloat16)
        # programs of a tile that are done; zero between launches
        self._arrivals = torch.zeros(
            matrix.words.shape[1] // _OUTS_LEAST, dtype=torch.int32, device=matrix.words.device
        )

    def __call__(self, hidden: Tensor) -> Tensor:
        """[num_tokens, in_len] -> [num_tokens, out_len]."""
        if len(hidden) >= _DENSE_FROM:
            return dense_product(hidden, self._matrix, self._bias)
        return product(hidden, self._matrix, self._bias, self._arrivals, choose_tile(len(hidden), self._matrix))


def choose_tile(num_tokens: int, matrix: PackedMatrix) -> Tile:
    """The tile that was fastest on an H200 for matrices of this size, or nearly."""
    num_blocks, out_padded, _ = matrix.words.shape
    tokens = min(max(_TOKENS_LEAST, triton.next_power_of_2(num_tokens)), _TOKENS_MAX)
    if num_tokens > _TOKENS_MAX:
        return Tile(tokens=64, outs=128, num_stages=4)
    is_wide = tokens >= 64 or (tokens > _TOKENS_LEAST and out_padded >= _OUTS_MANY)
    outs, num_warps = (128, 8 if tokens == _TOKENS_MAX else 4) if is_wide else (64, 2)
    splits, num_tiles = 1, out_padded // outs
    while splits < _SPLITS_MAX and num_blocks // (2 * splits) >= _BLOCKS_LEAST:
        warps, share = num_tiles * splits * num_warps, num_blocks // splits
        if warps >= _WARPS_ENOUGH or (warps >= _WARPS_LEAST and share < _BLOCKS_MANY):
            break
        splits *= 2
    num_stages = {16: 5, _TOKENS_MAX: 3}.get(tokens, 4)
    return Tile(tokens=tokens, outs=outs, splits=splits, num_warps=num_warps, num_stages=num_stages)


def product(
    hidden: Tensor,
    matrix: PackedMatrix,
    bias: Tensor | None,
    arrivals: Tensor,
    tile: Tile,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The product in one launch; `arrivals` has a zero for each tile, and has them again afterwards."""
    assert hidden.ndim == 2 and hidden.shape[1] == matrix.in_len and hidden.stride(1) == 1, hidden.shape
    num_tokens, (num_blocks, out_padded, _) = len(hidden), matrix.words.shape
    if out is None:
        out = torch.empty((num_tokens, matrix.out_len), dtype=hidden.dtype, device=hidden.device)
    num_tiles, splits = triton.cdiv(num_tokens, tile.tokens), min(tile.splits, num_blocks)
    assert splits == 1 or num_tiles * (out_padded // tile.outs) <= len(arrivals), (tile, arrivals.shape)
    parts = out
    if splits > 1:
        parts = torch.empty((splits, num_tokens, out_padded), dtype=torch.float32, device=hidden.device)
    if num_tokens:
        _product[(out_padded // tile.outs, splits, num_tiles)](
            *(hidden, matrix.words, matrix.tables, bias, out, parts, arrivals),
            *(num_tokens, matrix.in_len, hidden.stride(0), matrix.out_len, num_blocks, out_padded),
            BITS=matrix.bits,
            GROUP_LEN=matrix.group_len,
            SLICE_LEN=SLICE_LEN,
            SPLITS=splits,
            SCALE_DTYPE=_DTYPES[matrix.scale_dtype],
            HAS_MINIMUMS=matrix.has_minimums,
            IS_EVEN=matrix.in_len % matrix.block_len == 0,
            WIDE=_INTERPRETED,
            BLOCK_M=tile.tokens,
            BLOCK_N=tile.outs,
            num_warps=tile.num_warps,
            num_stages=tile.num_stages,
        )
    return out


def dense_product(hidden: Tensor, matrix: PackedMatrix, bias: Tensor | None) -> Tensor:
    """The product by weights made bfloat16, a part of the outputs at a time."""
    out = torch.empty((len(hidden), matrix.out_len), dtype=hidden.dtype, device=hidden.device)
    num_parts = triton.cdiv(matrix.out_len * matrix.in_len, _DENSE_WEIGHTS)
    step = triton.cdiv(triton.cdiv(matrix.out_len, num_parts), OUT_MULTIPLE) * OUT_MULTIPLE
    floats = torch.empty((min(step, matrix.out_len), matrix.in_len), dtype=hidden.dtype, device=hidden.device)
    for start in range(0, matrix.out_len, step):
        end = min(start + step, matrix.out_len)
        weights = dequantise_rows(matrix, start, floats[: end - start]).t()
        if bias is None:
            torch.mm(hidden, weights, out=out[:, start:end])
        else:
            torch.addmm(bias[start:end], hidden, weights, out=out[:, start:end])
    return out


def dequantise_rows(matrix: PackedMatrix, start: int, out: Tensor) -> Tensor:
    """Rows of the matrix from `start` on as floats [num_rows, in_len]."""
    num_blocks, out_padded, _ = matrix.words.shape
    assert out.is_contiguous() and out.shape[1] == matrix.in_len and start + len(out) <= matrix.out_len
    _dequantise[(triton.cdiv(len(out), _DEQUANTISED_ROWS), num_blocks)](
        *(matrix.words, matrix.tables, out, start, len(out), matrix.in_len, out_padded),
        BITS=matrix.bits,
        GROUP_LEN=matrix.group_len,
        SLICE_LEN=SLICE_LEN,
        SCALE_DTYPE=_DTYPES[matrix.scale_dtype],
        HAS_MINIMUMS=matrix.has_minimums,
        BLOCK_N=_DEQUANTISED_ROWS,
    )
    return out


_DEQUANTISED_ROWS = 64  # of a program


@triton.jit
def _half(table, DTYPE: tl.constexpr):
    """The low half of each number, as float32."""
    return table.to(tl.int16).to(DTYPE, bitcast=True).to(tl.float32)


@triton.jit
def _fields(words, FIELD: tl.constexpr, BITS: tl.constexpr):
    """Field FIELD of each word, as float32."""
    return ((words.to(tl.int32) >> (BITS * FIELD)) & ((1 << BITS) - 1)).to(tl.float32)


@triton.jit
def _less_zero(words, FIELD: tl.constexpr, BITS: tl.constexpr, table, WIDE: tl.constexpr):
    """Field FIELD of each word less its zero, as bfloat16: exact, since both are small whole numbers."""
    if BITS == 4 and not WIDE:
        start = (table >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
        return tl.inline_asm_elementwise(
            _UNPACK[FIELD], "=r,r,r", [words, start], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    return (_fields(words, FIELD, BITS) + 128 + _half(table >> 16, tl.bfloat16)).to(tl.bfloat16)


@triton.jit(do_not_specialize=["num_tokens", "num_blocks"])
def _product(
    x,
    words,
    tables,
    bias,
    out,
    parts,
    arrivals,
    num_tokens,
    in_len,
    x_stride,
    out_len,
    num_blocks,
    out_padded,
    BITS: tl.constexpr,
    GROUP_LEN: tl.constexpr,
    SLICE_LEN: tl.constexpr,
    SPLITS: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    IS_EVEN: tl.constexpr,  # the inputs are whole blocks
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no product of bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    FIELDS: tl.constexpr = 16 // BITS
    BLOCK_LEN: tl.constexpr = FIELDS * SLICE_LEN
    GROUPS: tl.constexpr = BLOCK_LEN // GROUP_LEN if GROUP_LEN < BLOCK_LEN else 1  # of a block
    PER_GROUP: tl.constexpr = FIELDS // GROUPS
    tokens = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    outs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inner = tl.arange(0, SLICE_LEN)
    # Weights come first, y.T = w @ x.T: their floats are never written to shared memory, and tokens may be but 8.
    x_places = x + tokens[None, :].to(tl.int64) * x_stride + inner[:, None]
    word_places = words + outs[:, None] * SLICE_LEN + inner[None, :]
    is_token = (tokens < num_tokens)[None, :]
    total = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
    share = tl.cdiv(num_blocks, SPLITS)
    first = tl.program_id(1) * share
    for block in range(first, tl.minimum(first + share, num_blocks)):
        packed = tl.load(word_places + block * (out_padded * SLICE_LEN), eviction_policy="evict_first")
        for group in tl.static_range(GROUPS):
            # Since half of it feeds the product, the compiler loads it ahead, as it does words and x.
            table = tl.load(tables + (block * BLOCK_LEN // GROUP_LEN + group) * out_padded + outs)[:, None]
            scale = _half(table, SCALE_DTYPE)
            summed = tl.zeros_like(total)
            for field in tl.static_range(group * PER_GROUP, (group + 1) * PER_GROUP):
                start = block * BLOCK_LEN + field * SLICE_LEN
                seen = is_token if IS_EVEN else is_token & (start + inner < in_len)[:, None]
                x_slice = tl.load(x_places + start, mask=seen, other=0.0)
                if HAS_MINIMUMS:
                    weight = _fields(packed, field, BITS) * scale + _half(table >> 16, SCALE_DTYPE)
                    weight = weight.to(tl.bfloat16)
                else:
                    weight = _less_zero(packed, field, BITS, table, WIDE)
                if WIDE:
                    x_slice, weight = x_slice.to(tl.float32), weight.to(tl.float32)
                summed = tl.dot(weight, x_slice, summed, input_precision="ieee")
            total += summed if HAS_MINIMUMS else summed * scale
    _finish(
        *(tl.trans(total), bias, out, parts, arrivals, tokens, outs, num_tokens, out_len, out_padded),
        *(SPLITS, BLOCK_M, BLOCK_N),
    )


@triton.jit
def _finish(
    total,
    bias,
    out,
    parts,
    arrivals,
    tokens,
    outs,
    num_tokens,
    out_len,
    out_padded,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Write a tile, or this program's part of it; the last program adds the parts up."""
    is_in = (tokens < num_tokens)[:, None] & (outs < out_len)[None, :]
    places = out + tokens[:, None].to(tl.int64) * out_len + outs[None, :]
    if SPLITS == 1:
        if bias is not None:
            total += tl.load(bias + outs, mask=outs < out_len, other=0.0).to(tl.float32)[None, :]
        tl.store(places, total.to(out.dtype.element_ty), mask=is_in)
    else:
        cells = parts + tokens[:, None] * out_padded + outs[None, :]
        tl.store(cells + tl.program_id(1) * num_tokens * out_padded, total, mask=is_in)
        tl.debug_barrier()  # all threads have written before the program counts as done
        arrival = arrivals + tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
        if tl.atomic_add(arrival, 1, sem="acq_rel") == SPLITS - 1:
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for split in tl.static_range(SPLITS):
                total += tl.load(cells + split * num_tokens * out_padded, mask=is_in, other=0.0, cache_modifier=".cg")
            if bias is not None:
                total += tl.load(bias + outs, mask=outs < out_len, other=0.0).to(tl.float32)[None, :]
            tl.store(places, total.to(out.dtype.element_ty), mask=is_in)
            tl.store(arrival, 0)  # as the next launch expects it


@triton.jit(do_not_specialize=["start", "num_rows"])
def _dequantise(
    words,
    tables,
    out,
    start,
    num_rows,
    in_len,
    out_padded,
    BITS: tl.constexpr,
    GROUP_LEN: tl.constexpr,
    SLICE_LEN: tl.constexpr,
    SCALE_DTYPE: tl.constexpr,
    HAS_MINIMUMS: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    FIELDS: tl.constexpr = 16 // BITS
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block, inner = tl.program_id(1), tl.arange(0, SLICE_LEN)
    outs, is_row = start + rows, rows < num_rows
    packed = tl.load(words + (block * out_padded + outs[:, None]) * SLICE_LEN + inner[None, :], mask=is_row[:, None])
    for field in tl.static_range(FIELDS):
        first = (block * FIELDS + field) * SLICE_LEN
        cells = first // GROUP_LEN * out_padded + outs
        table = tl.load(tables + cells, mask=is_row, other=0)[:, None]
        value, scale = _fields(packed, field, BITS), _half(table, SCALE_DTYPE)
        if HAS_MINIMUMS:
            value = value * scale + _half(table >> 16, SCALE_DTYPE)
        else:
            value = (value + 128 + _half(table >> 16, tl.bfloat16)) * scale
        places = out + rows[:, None].to(tl.int64) * in_len + first + inner[None, :]
        tl.store(places, value.to(out.dtype.element_ty), mask=is_row[:, None] & (first + inner < in_len)[None, :])
