"""Blocks of keys or values for attention in Triton: as they are kept, or from codes, and their scales.

Codes are loaded in pairs, as int16: shared memory can be read across its rows, as products with values need it, only in
units of 16 bits. A pair becomes two numbers of bfloat16, which has every code. So the columns of a block
are the even dimensions of a head, then the odd ones; queries and output follow that order. Scales are not applied to
blocks but to scores and weights, which are fewer. Called by the attention kernel.
"""

import triton
import triton.language as tl

# Two pairs of codes, (a, b) and (c, d), a and c in the low bytes, as bfloat16 (a, c) and (b, d). An int8 is 128 + its
# low 7 bits, less 128 or, if it is negative, 256. An e4m3, its bits moved to where bfloat16 has sign, exponent and
# mantissa, is 2^120 too small. Both are exact.
_INT8_PAIRS = tl.constexpr(
    """{
    .reg .b32 odd, bits, less, one;
    mov.b32 one, 0x3f803f80;
    lop3.b32 bits, $2, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 less, $2, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $0, bits, one, less;
    shr.u32 odd, $2, 8;
    lop3.b32 bits, odd, 0x007f007f, 0x43004300, 0xea;
    lop3.b32 less, odd, 0x00800080, 0xc300c300, 0xea;
    fma.rn.bf16x2 $1, bits, one, less;
    }"""
)
_FP8_PAIRS = tl.constexpr(
    """{
    .reg .b32 sign, bits, large, zero;
    mov.b32 large, 0x7b807b80;
    mov.b32 zero, 0x80008000;
    shl.b32 sign, $2, 8;
    shl.b32 bits, $2, 4;
    and.b32 bits, bits, 0x07f007f0;
    lop3.b32 bits, sign, 0x80008000, bits, 0xea;
    fma.rn.bf16x2 $0, bits, large, zero;
    shr.u32 bits, $2, 4;
    and.b32 bits, bits, 0x07f007f0;
    lop3.b32 bits, $2, 0x80008000, bits, 0xea;
    fma.rn.bf16x2 $1, bits, large, zero;
    }"""
)


@triton.jit
def column_dims(BLOCK_D: tl.constexpr, CODE_MAX: tl.constexpr):
    """Dimensions of a head in the order of a tile's columns: of quantised heads first the even ones, then the odd."""
    column = tl.arange(0, BLOCK_D)
    return column if CODE_MAX == 0.0 else 2 * (column % (BLOCK_D // 2)) + column // (BLOCK_D // 2)


@triton.jit
def _unpacked(pairs, CODE_MAX: tl.constexpr, WIDE: tl.constexpr):
    """The codes in the low and in the high bytes of int16."""
    if not WIDE:
        asm: tl.constexpr = _INT8_PAIRS if CODE_MAX == 127.0 else _FP8_PAIRS
        kinds: tl.constexpr = (tl.bfloat16, tl.bfloat16)
        low, high = tl.inline_asm_elementwise(asm, "=r,=r,r", [pairs], dtype=kinds, is_pure=True, pack=2)
    else:
        kind: tl.constexpr = tl.int8 if CODE_MAX == 127.0 else tl.float8e4nv
        low = (pairs & 0xFF).to(tl.uint8).to(kind, bitcast=True).to(tl.float32)
        high = ((pairs >> 8) & 0xFF).to(tl.uint8).to(kind, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _cells(cache, start, is_live, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
    """Lines [BLOCK_N, BLOCK] of `LENGTH` cells; zeros past them, and where a line is not live (None: all are)."""
    column = tl.arange(0, BLOCK)
    cells = cache + start[:, None] + column[None, :]
    if is_live is not None:
        lines = tl.load(cells, mask=is_live[:, None] & (column < LENGTH)[None, :], other=0)
    elif LENGTH < BLOCK:
        lines = tl.load(cells, mask=(column < LENGTH)[None, :], other=0)
    else:
        lines = tl.load(cells)
    return lines


@triton.jit
def kv_block(
    cache,
    start,
    is_live,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CODE_MAX: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Keys or values of live slots that begin at `start`, [BLOCK_N, BLOCK_D], columns in the order of `column_dims`."""
    if CODE_MAX == 0.0:
        block = _cells(cache, start, is_live, HEAD_DIM, BLOCK_D)
    else:
        pairs = _cells(cache, start, is_live, HEAD_DIM // 2, BLOCK_D // 2)
        low, high = _unpacked(pairs, CODE_MAX, WIDE)
        block = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (start.shape[0], BLOCK_D))
    return block.to(dtype)


@triton.jit
def scaled(lines, scales, slot, is_live):
    """What [BLOCK_M, BLOCK_N] has of each live key, times the scale of its slot; as it is where KV is not quantised."""
    if scales is not None:
        scale = tl.load(scales + slot) if is_live is None else tl.load(scales + slot, mask=is_live, other=0.0)
        lines *= scale[None, :]
    return lines
