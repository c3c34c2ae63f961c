"""Products of tokens and quantised weights, with what stands around them in a layer: norm, bias, residual, gate.

y[t, o] = sum over blocks b of scale[o, b] * scale[t, b] * (whole-number product of block b) + minimum[o, b] * (sum of
the token's block b), added block by block from the first: a token's result has the same bits whatever else is in the
batch, and with any number of threads. 16 outputs are a group: the lanes of a vector. A group lies as `packing` puts it;
each of its bytes is read once for up to 5 tokens. Bytes read: those of the weights (0.625 a weight of Q4_1), and of the
tokens from the cache. Called by `numba_kernels.program`.
"""

import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.cpython.unsafe.tuple import tuple_setitem
from numba.extending import intrinsic

from roost.numba_kernels.activation import activated, capped
from roost.numba_kernels.best_output import HEAD_BYTES, LINE_BYTES, note_best
from roost.numba_kernels.records import field, float_field, share
from roost.numba_kernels.simd import (
    BYTE_OFFSET,
    LANES,
    Floats,
    Ints,
    add,
    add_ints,
    dot4_bytes,
    dot4_nibbles,
    fma,
    high_nibbles,
    load_bytes,
    load_float,
    load_floats,
    load_halfs,
    load_int,
    load_long,
    low_nibbles,
    mul,
    prefetch,
    splat_float,
    splat_four_bytes,
    splat_int,
    store_float,
    store_floats,
    store_long,
    to_floats,
    zero_ints,
)
from roost.numba_kernels.tokens import BLOCK, copy_token, padded_len, round_blocks, round_token, token_bytes

# Of a record, besides its kind. Addresses; strides are in floats.
(
    NUM_TOKENS,  # the address of an int64
    TOKENS,  # [num_tokens, in_len]
    TOKENS_STRIDE,
    NORM,  # the weight of the norm through which they are read, or 0
    EPS,  # its epsilon, as the bits of a float64
    KIND,  # of the weights
    WEIGHTS,
    IN_LEN,
    OUT_LEN,  # of gate and up: of each
    BIAS,  # or 0
    OUTPUT,  # of BEST: what `best_output` calls FOUND
    OUTPUT_STRIDE,
    MODE,
    RESIDUAL,  # what is added
    RESIDUAL_STRIDE,
    SCRATCH,  # `scratch_bytes`
    ACTIVATION,  # of a gate
    CAP,  # of products that have no bias, as the bits of a float64; 0: none
) = range(1, 19)

Q4_0, Q4_1, Q8_0, INT8, FLOAT32 = range(5)  # kinds of weights; the last can only be looked up
STORE, ADD, GATE, BEST = range(4)  # modes: the product, plus a residual, activation(gate) * up, or its largest output
NARROW = 8  # up to so many tokens every member rounds all of them for itself, which is cheaper than waiting
TILE = 5  # tokens that share what is read of a group, at most
_PIECES, _PIECES_ROUNDED = 3, 4  # of a record, for each member of the team
_AHEAD = 4096  # bytes between the weights that are read and those that are brought near
_NIBBLE_OFFSET = 8  # of Q4_0: a weight is (value - 8) * scale


@njit(nogil=True, inline="always")
def group_bytes(kind, in_len):
    """Bytes of a group of outputs."""
    num_blocks = padded_len(in_len) // BLOCK
    if kind == Q4_1:
        return num_blocks * 320
    if kind == Q4_0:
        return num_blocks * 288
    return num_blocks * 544 if kind == Q8_0 else num_blocks * 512 + 64


@njit(nogil=True, inline="always")
def member_bytes(in_len):
    """Scratch of a member: a token of floats, a tile's sums of gate and up, and few rounded tokens."""
    return 4 * padded_len(in_len) + 2 * 64 * TILE + NARROW * token_bytes(in_len)


def scratch_bytes(in_len: int, num_tokens: int, size: int) -> int:
    """Scratch that a record needs: every member's, and rounded tokens for all."""
    padded = -(-in_len // BLOCK) * BLOCK  # as compiled code counts, without compiling it for the host
    token = -(-(padded + padded // BLOCK * 12) // 64) * 64
    return size * (4 * padded + 2 * 64 * TILE + NARROW * token) + num_tokens * token


@njit(nogil=True, inline="always")
def round_pieces(record, size):
    """Into how many pieces the rounding of many tokens is cut: of few there is none."""
    count = load_long(field(record, NUM_TOKENS))
    return 0 if count <= NARROW else min(count, _PIECES_ROUNDED * size)


@njit(nogil=True, inline="always")
def round_tokens(record, piece, num_pieces, member, size):
    """The first half of a product with many tokens: each is rounded once."""
    in_len = field(record, IN_LEN)
    private = field(record, SCRATCH) + member * member_bytes(in_len)
    shared = field(record, SCRATCH) + size * member_bytes(in_len)
    first, last = share(load_long(field(record, NUM_TOKENS)), piece, num_pieces)
    _round(record, first, last, private, shared)


@njit(nogil=True, inline="always")
def _num_groups(record):
    return (field(record, OUT_LEN) + LANES - 1) // LANES


@njit(nogil=True, inline="always")
def linear_pieces(record, size):
    """Into how many pieces a product is cut, along its outputs."""
    return min(_num_groups(record), _PIECES * size)


@njit(nogil=True, inline="always")
def linear(record, piece, num_pieces, member, size, is_first):
    """The second half, or all of it where tokens are few: some outputs, for every token.

    `is_first`: the member has done no other piece of the record, so that it has not rounded the few tokens yet.
    """
    count, in_len, mode = load_long(field(record, NUM_TOKENS)), field(record, IN_LEN), field(record, MODE)
    private = field(record, SCRATCH) + member * member_bytes(in_len)
    sums = private + 4 * padded_len(in_len)
    rounded = sums + 2 * 64 * TILE
    if count > NARROW:
        rounded = field(record, SCRATCH) + size * member_bytes(in_len)
    elif is_first:
        _round(record, np.int64(0), count, private, rounded)
    kind = field(record, KIND)
    bytes_of_group, bytes_of_token = group_bytes(kind, in_len), token_bytes(in_len)
    first, last = share(_num_groups(record), piece, num_pieces)
    parts = 2 if mode == GATE else 1  # groups of gate and up lie next to each other
    for group in range(first, last):
        at = np.int64(0)
        while at < count:
            width = min(count - at, TILE)
            tokens = rounded + at * bytes_of_token
            for part in range(parts):  # one call: what it calls is compiled into it
                weights = field(record, WEIGHTS) + (parts * group + part) * bytes_of_group
                multiply(kind, weights, tokens, in_len, width, sums + part * 64 * TILE)
            if field(record, CAP) != 0:
                for number in range(width):
                    own = sums + 64 * number
                    store_floats(own, capped(load_floats(own), np.float32(float_field(record, CAP))))
            if mode == BEST:
                _note_best(record, piece, num_pieces, sums, group, at, width, group == first)
            else:
                _finish(record, mode, sums, group, at, width)
            at += width


@njit(nogil=True)
def _round(record, first, last, private, target):
    """Tokens [first, last) of a record, rounded as its kind of weights wants them."""
    in_len, kind = field(record, IN_LEN), field(record, KIND)
    for token in range(first, last):
        source = field(record, TOKENS) + 4 * token * field(record, TOKENS_STRIDE)
        copy_token(source, private, in_len, field(record, NORM), float_field(record, EPS))
        if kind == INT8:
            round_token(private, target + token * token_bytes(in_len), in_len)
        else:
            round_blocks(private, target + token * token_bytes(in_len), in_len)


def _zeros(vector, width):
    """An operation that makes `width` vectors of zeros, which loops of constant length keep in registers."""
    many = types.UniTuple(vector, width)

    @intrinsic
    def zeros(typing_context):
        return many(), lambda context, builder, signature, a: ir.Constant(context.get_value_type(many), None)

    return zeros


@njit(nogil=True, inline="always")
def _bring_near(weights, width, num_lines):
    """Have weights that come later brought near: with one token the CPU does as well by itself, with several it waits.

    Past the end nothing is brought, and nothing goes wrong.
    """
    if width > 1:
        for line in range(num_lines):
            prefetch(weights + _AHEAD + 64 * line)


def _nibble_tile(width, has_minimum):
    """Products of a group of Q4_0 or Q4_1 with `width` tokens."""
    zeros, offset = _zeros(Floats, width), 0 if has_minimum else _NIBBLE_OFFSET

    @njit(nogil=True)
    def tile(weights, tokens, in_len, sums):
        num_blocks, stride = padded_len(in_len) // BLOCK, token_bytes(in_len)
        scales, totals = weights + 256 * num_blocks, zeros()
        for block in range(num_blocks):
            at = weights + 256 * block
            _bring_near(at, width, 4)
            _bring_near(scales + 64 * block, width, 1)
            pair0, pair1, pair2, pair3 = load_bytes(at), load_bytes(at + 64), load_bytes(at + 128), load_bytes(at + 192)
            low0, low1, low2, low3 = low_nibbles(pair0), low_nibbles(pair1), low_nibbles(pair2), low_nibbles(pair3)
            high0, high1, high2, high3 = (
                high_nibbles(pair0),
                high_nibbles(pair1),
                high_nibbles(pair2),
                high_nibbles(pair3),
            )
            if has_minimum:
                scale, least = load_halfs(scales + 64 * block), load_halfs(scales + 64 * block + 32)
            else:
                scale = load_halfs(scales + 32 * block)
            for token in range(width):
                own = tokens + token * stride
                at, own_scales = own + BLOCK * block, own + BLOCK * num_blocks + 4 * block
                even = zero_ints() if has_minimum else splat_int(-offset * load_int(own_scales + 8 * num_blocks))
                even = dot4_nibbles(even, low0, splat_four_bytes(at))
                odd = dot4_nibbles(zero_ints(), high0, splat_four_bytes(at + 4))
                even = dot4_nibbles(even, low1, splat_four_bytes(at + 8))
                odd = dot4_nibbles(odd, high1, splat_four_bytes(at + 12))
                even = dot4_nibbles(even, low2, splat_four_bytes(at + 16))
                odd = dot4_nibbles(odd, high2, splat_four_bytes(at + 20))
                even = dot4_nibbles(even, low3, splat_four_bytes(at + 24))
                odd = dot4_nibbles(odd, high3, splat_four_bytes(at + 28))
                product = mul(to_floats(add_ints(even, odd)), scale)
                total = fma(product, splat_float(load_float(own_scales)), totals[token])
                if has_minimum:
                    total = fma(least, splat_float(load_float(own_scales + 4 * num_blocks)), total)
                totals = tuple_setitem(totals, token, total)
        for token in range(width):
            store_floats(sums + 64 * token, totals[token])

    return tile


def _byte_tile(width):
    """Products of a group of Q8_0 with `width` tokens."""
    zeros = _zeros(Floats, width)

    @njit(nogil=True)
    def tile(weights, tokens, in_len, sums):
        num_blocks, stride = padded_len(in_len) // BLOCK, token_bytes(in_len)
        scales, totals = weights + 512 * num_blocks, zeros()
        for block in range(num_blocks):
            at = weights + 512 * block
            _bring_near(at, width, 8)
            four0, four1, four2, four3 = load_bytes(at), load_bytes(at + 64), load_bytes(at + 128), load_bytes(at + 192)
            four4, four5 = load_bytes(at + 256), load_bytes(at + 320)
            four6, four7 = load_bytes(at + 384), load_bytes(at + 448)
            scale = load_halfs(scales + 32 * block)
            for token in range(width):
                own = tokens + token * stride
                at, own_scales = own + BLOCK * block, own + BLOCK * num_blocks + 4 * block
                even = splat_int(-BYTE_OFFSET * load_int(own_scales + 8 * num_blocks))
                even = dot4_bytes(even, four0, splat_four_bytes(at))
                odd = dot4_bytes(zero_ints(), four1, splat_four_bytes(at + 4))
                even = dot4_bytes(even, four2, splat_four_bytes(at + 8))
                odd = dot4_bytes(odd, four3, splat_four_bytes(at + 12))
                even = dot4_bytes(even, four4, splat_four_bytes(at + 16))
                odd = dot4_bytes(odd, four5, splat_four_bytes(at + 20))
                even = dot4_bytes(even, four6, splat_four_bytes(at + 24))
                odd = dot4_bytes(odd, four7, splat_four_bytes(at + 28))
                product = mul(to_floats(add_ints(even, odd)), scale)
                total = fma(product, splat_float(load_float(own_scales)), totals[token])
                totals = tuple_setitem(totals, token, total)
        for token in range(width):
            store_floats(sums + 64 * token, totals[token])

    return tile


def _int8_tile(width):
    """Products of a group with one scale for each output, with `width` tokens: whole numbers to the end."""
    zeros = _zeros(Ints, width)

    @njit(nogil=True)
    def tile(weights, tokens, in_len, sums):
        padded, stride = padded_len(in_len), token_bytes(in_len)
        totals = zeros()
        for four in range(0, padded, 4):
            _bring_near(weights + 16 * four, width, 1)
            values = load_bytes(weights + 16 * four)
            for token in range(width):
                total = dot4_bytes(totals[token], values, splat_four_bytes(tokens + token * stride + four))
                totals = tuple_setitem(totals, token, total)
        scale = load_floats(weights + 16 * padded)
        for token in range(width):
            own_scales = tokens + token * stride + padded
            offset = splat_int(-BYTE_OFFSET * load_int(own_scales + 8 * (padded // BLOCK)))
            product = to_floats(add_ints(totals[token], offset))
            store_floats(sums + 64 * token, mul(product, mul(splat_float(load_float(own_scales)), scale)))

    return tile


def _tiles(make):
    """A kind's products with 1 to TILE tokens."""
    one, two, three, four, five = (make(width) for width in range(1, TILE + 1))

    @njit(nogil=True, inline="always")
    def multiply(weights, tokens, in_len, width, sums):
        if width == 1:
            one(weights, tokens, in_len, sums)
        elif width == 2:
            two(weights, tokens, in_len, sums)
        elif width == 3:
            three(weights, tokens, in_len, sums)
        elif width == 4:
            four(weights, tokens, in_len, sums)
        else:
            five(weights, tokens, in_len, sums)

    return multiply


_q4_0 = _tiles(lambda width: _nibble_tile(width, has_minimum=False))
_q4_1 = _tiles(lambda width: _nibble_tile(width, has_minimum=True))
_q8_0 = _tiles(_byte_tile)
_int8 = _tiles(_int8_tile)


@njit(nogil=True, inline="always")
def multiply(kind, weights, tokens, in_len, width, sums):
    """The products of a group with up to TILE tokens: [width, LANES] floats."""
    if kind == Q4_1:
        _q4_1(weights, tokens, in_len, width, sums)
    elif kind == Q8_0:
        _q8_0(weights, tokens, in_len, width, sums)
    elif kind == INT8:
        _int8(weights, tokens, in_len, width, sums)
    else:
        _q4_0(weights, tokens, in_len, width, sums)


@njit(nogil=True)
def _finish(record, mode, sums, group, first, width):
    """What becomes of a tile's products."""
    out_len, bias, at = field(record, OUT_LEN), field(record, BIAS), LANES * group
    output, stride = field(record, OUTPUT) + 4 * at, 4 * field(record, OUTPUT_STRIDE)
    residual, residual_stride = field(record, RESIDUAL) + 4 * at, 4 * field(record, RESIDUAL_STRIDE)
    is_whole = at + LANES <= out_len
    for number in range(width):
        token, own = first + number, sums + 64 * number
        if mode == GATE:
            _activate(own, own + 64 * TILE, field(record, ACTIVATION))
        if is_whole:
            total = load_floats(own)
            if bias != 0:
                total = add(total, load_floats(bias + 4 * at))
            if mode == ADD:
                total = add(load_floats(residual + token * residual_stride), total)
            store_floats(output + token * stride, total)
        else:
            for lane in range(out_len - at):
                one = load_float(own + 4 * lane)
                if bias != 0:
                    one += load_float(bias + 4 * (at + lane))
                if mode == ADD:
                    one = load_float(residual + token * residual_stride + 4 * lane) + one
                store_float(output + token * stride + 4 * lane, one)


@njit(nogil=True)
def _note_best(record, piece, num_pieces, sums, group, first, width, is_first):
    """Have the largest of a tile's products noted."""
    found, count, bias = field(record, OUTPUT), load_long(field(record, NUM_TOKENS)), field(record, BIAS)
    at = LANES * group
    store_long(found, num_pieces)
    for number in range(width):
        line = found + HEAD_BYTES + LINE_BYTES * (piece * count + first + number)
        own_bias = 0 if bias == 0 else bias + 4 * at
        note_best(line, sums + 64 * number, own_bias, at, min(field(record, OUT_LEN) - at, LANES), is_first)


@njit(nogil=True)
def _activate(gate, up, activation):
    """activation(gate) * up, in the place of the gate."""
    store_floats(gate, mul(activated(load_floats(gate), activation), load_floats(up)))
