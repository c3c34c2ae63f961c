"""The largest output of a product for each token, found while the product is made: its outputs are never written.

best[t] = the lowest o with y[t, o] the largest, or the first that is not a number: what an arg-max over all outputs
says. Each piece of the product keeps the best of its own outputs in a line (value, output), and `pick_best` takes the
best of all pieces, in their order. Bytes moved: a line for each piece and token. Called by `numba_kernels.linear` and
by programs.
"""

import math

import numpy as np
from numba import njit

from roost.numba_kernels.records import field, share
from roost.numba_kernels.simd import (
    LANES,
    add,
    any_above,
    load_float,
    load_floats,
    load_long,
    store_float,
    store_long,
)

# Of a record, besides its kind. Addresses.
NUM_TOKENS, FOUND, BEST = range(1, 4)  # FOUND: the number of pieces, then lines [num_pieces, num_tokens]; BEST: int64
HEAD_BYTES, LINE_BYTES = 64, 16


@njit(nogil=True, inline="always")
def _line(found, piece, count, token):
    return found + HEAD_BYTES + LINE_BYTES * (piece * count + token)


@njit(nogil=True, inline="always")
def _is_better(value, best):
    return value > best or (math.isnan(value) and not math.isnan(best))


@njit(nogil=True)
def note_best(line, products, bias, first, num_lanes, is_first):
    """Take outputs [first, first + num_lanes) into account: their products, and where their bias is, or 0.

    `is_first`: they are the first of their piece, and the line holds anything.
    """
    best, output = load_float(line), load_long(line + 8)
    if is_first:
        best, output = np.float32(-np.inf), first
    elif num_lanes == LANES:
        total = load_floats(products)
        if bias != 0:
            total = add(total, load_floats(bias))
        if not any_above(total, best):
            return
    for lane in range(num_lanes):
        value = load_float(products + 4 * lane)
        if bias != 0:
            value += load_float(bias + 4 * lane)
        if _is_better(value, best):
            best, output = value, first + lane
    store_float(line, best)
    store_long(line + 8, output)


@njit(nogil=True)
def pick_best(record, piece, num_pieces):
    """The best output of each token, from the lines of all pieces of the product."""
    count, found = load_long(field(record, NUM_TOKENS)), field(record, FOUND)
    first, last = share(count, piece, num_pieces)
    for token in range(first, last):
        line = _line(found, 0, count, token)
        best, output = load_float(line), load_long(line + 8)
        for other in range(1, load_long(found)):
            line = _line(found, other, count, token)
            if _is_better(load_float(line), best):
                best, output = load_float(line), load_long(line + 8)
        store_long(field(record, BEST) + 8 * token, output)
