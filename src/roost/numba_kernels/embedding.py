"""Rows of a matrix as floats: the embedding of tokens, packed where the head is the embedding.

Bytes moved: a row's values and scales, spread over its group, and the floats written. Called by
`numba_kernels.program`.
"""

import numpy as np
from numba import njit

from roost.numba_kernels.linear import FLOAT32, Q4_0, Q4_1, Q8_0, group_bytes
from roost.numba_kernels.records import field, share
from roost.numba_kernels.rows import copy_row
from roost.numba_kernels.simd import (
    BYTE_OFFSET,
    LANES,
    load_byte,
    load_float,
    load_half,
    load_long,
    store_float,
)
from roost.numba_kernels.tokens import BLOCK, padded_len

# Of a record, besides its kind. Addresses.
NUM_TOKENS, IDS, KIND, WEIGHTS, IN_LEN, OUTPUT = range(1, 7)  # IDS: int64; OUTPUT: floats [num_tokens, in_len]


@njit(nogil=True)
def embed(record, piece, num_pieces):
    """The rows of some tokens."""
    in_len = field(record, IN_LEN)
    first, last = share(load_long(field(record, NUM_TOKENS)), piece, num_pieces)
    for token in range(first, last):
        _row(record, load_long(field(record, IDS) + 8 * token), field(record, OUTPUT) + 4 * token * in_len)


@njit(nogil=True)
def _row(record, number, output):
    kind, in_len = field(record, KIND), field(record, IN_LEN)
    if kind == FLOAT32:
        copy_row(field(record, WEIGHTS) + 4 * number * in_len, output, in_len)
        return
    group, lane = field(record, WEIGHTS) + number // LANES * group_bytes(kind, in_len), number % LANES
    num_blocks = padded_len(in_len) // BLOCK
    is_small = kind in (Q4_0, Q4_1)
    scales = group + (256 if is_small else 512) * num_blocks
    for at in range(in_len):
        block, four, within = at // BLOCK, at // 4, at % 4
        if is_small:
            both = load_byte(group + 64 * (four // 2) + 4 * lane + within)
            value = np.float32(both & 15 if four % 2 == 0 else both >> 4)
        else:
            value = np.float32(np.int8((load_byte(group + 64 * four + 4 * lane + within) - BYTE_OFFSET) & 255))
        if kind == Q4_1:
            value = value * load_half(scales + 64 * block + 2 * lane) + load_half(scales + 64 * block + 32 + 2 * lane)
        elif kind == Q4_0:
            value = (value - np.float32(8)) * load_half(scales + 32 * block + 2 * lane)
        elif kind == Q8_0:
            value = value * load_half(scales + 32 * block + 2 * lane)
        else:
            value = value * load_float(scales + 4 * lane)
        store_float(output + 4 * at, value)
