"""Blocks of keys and values: slots of positions, and what they hold as floats, whatever the cache keeps.

A block is `BLOCK_LEN` positions of a row, one for each of as many lanes. Its keys are laid out by dimensions, int8 ones
by words of four, so that the lanes of a vector are keys; its values stay rows, in place where they can be read there.
Only slots of positions that are asked for are read. Called by the kernel of attention.
"""

import numpy as np
from numba import njit

from roost.numba_kernels.attention_plan import BLOCK_LEN
from roost.numba_kernels.simd import (
    LANES,
    load_float,
    load_floats,
    load_halfs,
    load_int8,
    load_int8s,
    load_nth_int,
    load_nth_long,
    store_float,
    store_floats,
    store_int8,
    store_long,
    transpose_bytes_from,
    transpose_floats_from,
    transpose_halfs_from,
)

FLOATS, HALFS, INT8S = 0, 1, 2  # kinds of numbers that a cache keeps; one has 4 >> kind bytes
SPARE_BYTES = (8 + 4 * LANES) * LANES
_KEYS_BYTES = 4 * BLOCK_LEN  # of one dimension of a block's keys


@njit(nogil=True)
def put_slots(slots, pages, page_size, first, count, base, shift):
    """Write the slots of positions [first, first + count) of a row, whose pages are given.

    From `base` on, a position is kept at that position plus `shift`: the row is a draft branch.
    """
    page = offset = place = np.int64(0)
    for number in range(count):
        position = first + number
        if number == 0 or position == base:
            place = position + shift if position >= base else position
            page, offset = place // page_size, place % page_size
            place = load_nth_int(pages, page) * page_size
        elif offset == page_size:
            page, offset = page + 1, np.int64(0)
            place = load_nth_int(pages, page) * page_size
        store_long(slots + 8 * number, place + offset)
        offset += 1


@njit(nogil=True)
def put_addresses(addresses, slots, first, last, base, slot_bytes):
    """Write the addresses of lanes [first, last); other lanes of their vectors repeat one of these."""
    for lane in range(first // LANES * LANES, (last + LANES - 1) // LANES * LANES):
        store_long(addresses + 8 * lane, base + slot_bytes * load_nth_long(slots, min(max(lane, first), last - 1)))


@njit(nogil=True)
def put_scales(target, slots, first, last, base):
    """Write the scales of the slots of lanes [first, last)."""
    for lane in range(first, last):
        store_float(target + 4 * lane, load_float(base + 4 * load_nth_long(slots, lane)))


@njit(nogil=True)
def _put_tails(spare, addresses, count, offset, num_bytes):
    """Copy the last numbers of some heads, fewer than a vector has, to where whole vectors may be read.

    `spare` then holds their addresses, and behind them the numbers.
    """
    for number in range(count):
        store_long(spare + 8 * number, spare + 8 * LANES + 4 * LANES * number)
    for place in range(count * num_bytes):
        number, at = place // num_bytes, place % num_bytes
        byte = load_int8(load_nth_long(addresses, number) + offset + at)
        store_int8(load_nth_long(spare, number) + at, byte)


@njit(nogil=True)
def put_keys(target, addresses, first, last, kind, head_dim, spare):
    """Lay out keys by dimensions, [head_dim, BLOCK_LEN]: those of lanes [first, last), and of lanes beside them.

    int8 keys: [words of four dimensions, BLOCK_LEN]; what a word has past the last dimension is not said. `spare` is
    room for SPARE_BYTES.
    """
    step = 4 * LANES if kind == INT8S else LANES  # dimensions of 16 columns
    for lane in range(first // LANES * LANES, last, LANES):
        for dim in range(0, head_dim, step):
            place, rows = target + dim // (step // LANES) * _KEYS_BYTES + 4 * lane, addresses + 8 * lane
            offset = dim * (4 >> kind)
            if dim + step > head_dim:
                _put_tails(spare, rows, np.int64(LANES), offset, (head_dim - dim) * (4 >> kind))
                rows, offset = spare, 0
            if kind == FLOATS:
                transpose_floats_from(place, _KEYS_BYTES, rows, offset)
            elif kind == HALFS:
                transpose_halfs_from(place, _KEYS_BYTES, rows, offset)
            else:
                transpose_bytes_from(place, _KEYS_BYTES, rows, offset)


@njit(nogil=True)
def put_values(target, addresses, first, last, kind, head_dim, spare):
    """Make rows of floats of the values of lanes [first, last), and have the addresses lead to them.

    Rows are padded to whole vectors. Floats that need no padding stay where they are.
    """
    if kind == FLOATS and head_dim % LANES == 0:
        return
    row = target
    for lane in range(first, last):
        address, target = load_nth_long(addresses, lane), row
        for dim in range(0, head_dim, LANES):
            source = address + dim * (4 >> kind)
            if dim + LANES > head_dim:
                _put_tails(spare, addresses + 8 * lane, np.int64(1), dim * (4 >> kind), (head_dim - dim) * (4 >> kind))
                source = spare + 8 * LANES
            if kind == FLOATS:
                numbers = load_floats(source)
            elif kind == HALFS:
                numbers = load_halfs(source)
            else:
                numbers = load_int8s(source)
            store_floats(row, numbers)
            row += 4 * LANES
        store_long(addresses + 8 * lane, target)
