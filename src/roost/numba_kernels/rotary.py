"""Rotary positions and the write to slots: each head of each token is read once and goes where it belongs.

Queries are rotated into a buffer; keys, rotated, and values go to their tokens' slots, as floats, as float16, or as
int8 with a scale per slot and head (`layers.quantised_kv`: the same codes and scales). Dimension i of a head is rotated
together with dimension i + head_dim / 2. The team shares out heads of tokens. A kernel of the `numba` backend.
"""

import numpy as np
from numba import njit

from roost.numba_kernels.kv_blocks import HALFS, INT8S
from roost.numba_kernels.simd import (
    LANES,
    add,
    load_float,
    load_floats,
    load_long,
    load_nth_long,
    mul,
    store_float,
    store_floats,
    store_half,
    store_halfs,
    store_int8,
    sub,
)
from roost.numba_kernels.simd import load_nth_long as field

# Of a record, besides its kind. Addresses; strides are in bytes.
(
    QK,  # [num_tokens, num_heads + num_kv_heads, head_dim]
    QK_STRIDE,
    VALUE,  # [num_tokens, num_kv_heads, head_dim]
    VALUE_STRIDE,
    COS,  # [num_tokens, head_dim]
    SIN,  # [num_tokens, head_dim / 2]
    SLOTS,  # int64 [num_tokens]
    QUERY,  # [num_tokens, num_heads, head_dim]
    KEYS,  # [num_slots, num_kv_heads, head_dim]
    VALUES,
    SCALES,  # [num_kv_heads, 2, num_slots], of int8
    KIND,  # of the cache
    NUM_SLOTS,
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    NUM_TOKENS,  # the address of an int64
    SCRATCH,  # `scratch_bytes` for each member
) = range(1, 19)

_CODE_MAX = np.float32(127.0)
_CODE_STEP = np.float32(1 / 127.0)
_PIECE_LEN = 64  # heads of tokens that are worth another piece of work
_SCALE_LEAST = np.float32(2.0**-126)  # below it a scale has no reciprocal


def scratch_bytes(head_dim: int) -> int:
    """Scratch of a thread: one head."""
    return 4 * (-(-head_dim // LANES) * LANES)


@njit(nogil=True)
def _rotate(target, source, cos, sin, head_dim):
    """Rotate a head."""
    half = head_dim // 2
    whole, right = half // LANES * LANES, 4 * half
    for dim in range(0, 4 * whole, 4 * LANES):
        x, y, s = load_floats(source + dim), load_floats(source + right + dim), load_floats(sin + dim)
        store_floats(target + dim, sub(mul(x, load_floats(cos + dim)), mul(y, s)))
        store_floats(target + right + dim, add(mul(y, load_floats(cos + right + dim)), mul(x, s)))
    for dim in range(4 * whole, 4 * half, 4):
        x, y, s = load_float(source + dim), load_float(source + right + dim), load_float(sin + dim)
        store_float(target + dim, x * load_float(cos + dim) - y * s)
        store_float(target + right + dim, y * load_float(cos + right + dim) + x * s)


@njit(nogil=True)
def _put_codes(target, scale_place, source, head_dim):
    """Keep a head as int8 and a scale: what `quantise` makes of it."""
    size = np.float32(0.0)
    for dim in range(head_dim):
        each = abs(load_float(source + 4 * dim))
        size = max(size, each if each < np.inf else np.float32(np.inf))  # infinite for a NaN, too
    scale = size * _CODE_STEP
    is_coded = scale >= _SCALE_LEAST and size < np.inf
    factor = np.float32(1.0) / scale if is_coded else np.float32(0.0)
    for dim in range(head_dim):
        number = load_float(source + 4 * dim) * factor if is_coded else np.float32(0.0)
        store_int8(target + dim, np.int64(np.rint(min(max(number, -_CODE_MAX), _CODE_MAX))))
    nothing = np.float32(0.0) if size < np.inf else np.float32(np.nan)
    store_float(scale_place, scale if is_coded else nothing)


@njit(nogil=True)
def _keep(target, source, kind, head_dim):
    """Copy a head to its slot, as floats or as float16."""
    whole = head_dim // LANES * LANES
    for dim in range(0, whole, LANES):
        if kind == HALFS:
            store_halfs(target + 2 * dim, load_floats(source + 4 * dim))
        else:
            store_floats(target + 4 * dim, load_floats(source + 4 * dim))
    for dim in range(whole, head_dim):
        if kind == HALFS:
            store_half(target + 2 * dim, load_float(source + 4 * dim))
        else:
            store_float(target + 4 * dim, load_float(source + 4 * dim))


@njit(nogil=True)
def rotary_write(record, piece, num_pieces, member):
    """Rotate queries and keys, put keys and values into slots."""
    head_dim, kind = field(record, HEAD_DIM), field(record, KIND)
    num_heads, num_kv_heads = field(record, NUM_HEADS), field(record, NUM_KV_HEADS)
    num_all, num_slots = num_heads + 2 * num_kv_heads, field(record, NUM_SLOTS)
    scratch = field(record, SCRATCH) + member * 4 * ((head_dim + LANES - 1) // LANES * LANES)
    count = load_long(field(record, NUM_TOKENS)) * num_all
    for number in range(count * piece // num_pieces, count * (piece + 1) // num_pieces):
        token, head = number // num_all, number % num_all
        cos, sin = field(record, COS) + 4 * token * head_dim, field(record, SIN) + 2 * token * head_dim
        source = field(record, QK) + token * field(record, QK_STRIDE) + 4 * head * head_dim
        if head < num_heads:
            _rotate(field(record, QUERY) + 4 * (token * num_heads + head) * head_dim, source, cos, sin, head_dim)
            continue
        kv_head, is_value = (head - num_heads) % num_kv_heads, head >= num_heads + num_kv_heads
        if is_value:
            source = field(record, VALUE) + token * field(record, VALUE_STRIDE) + 4 * kv_head * head_dim
        else:
            _rotate(scratch, source, cos, sin, head_dim)
            source = scratch
        slot = load_nth_long(field(record, SLOTS), token)
        place = (slot * num_kv_heads + kv_head) * head_dim * (4 >> kind)
        target = place + (field(record, VALUES) if is_value else field(record, KEYS))
        if kind == INT8S:
            line = 2 * kv_head + 1 if is_value else 2 * kv_head
            _put_codes(target, field(record, SCALES) + 4 * (line * num_slots + slot), source, head_dim)
        else:
            _keep(target, source, kind, head_dim)


@njit(nogil=True)
def rotary_pieces(record, size):
    """Into how many pieces `rotary_write` is cut."""
    count = load_long(field(record, NUM_TOKENS)) * (field(record, NUM_HEADS) + 2 * field(record, NUM_KV_HEADS))
    return min((count + _PIECE_LEN - 1) // _PIECE_LEN, 4 * size)
