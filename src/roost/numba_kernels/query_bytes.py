"""Queries in two planes of bytes, for scores of int8 keys in whole numbers.

A query's numbers are rounded to 15 bits, 128 * high + low, with one scale: finer than a key's byte. An instruction then
has four products, and a sum of whole numbers has no order: a score has the same bits wherever it is computed. A row has
its planes, what the sums of both begin with (the offset of the keys' bytes is taken off), and its scale. Called by the
kernel of attention.
"""

import numpy as np
from numba import njit

from roost.numba_kernels.simd import (
    BYTE_OFFSET,
    LANES,
    absolute,
    add_ints,
    div,
    largest_of,
    load_floats,
    maximum,
    mul,
    rounded,
    splat_float,
    store_float,
    store_int,
    store_int8s,
    sub,
    sum_of_ints,
    to_ints,
    zero_floats,
    zero_ints,
)

_PLANE = 128.0  # times the low one is the high one
_STEPS = 127.0 * _PLANE  # of a scale, on either side of zero
_SCALE_LEAST = 1e-30  # of a query of zeros


@njit(nogil=True)
def put_query(target, source, plane):
    """Round a query of floats, padded with zeros to `plane` numbers; a row takes 4 * plane bytes."""
    most = zero_floats()
    for at in range(0, plane, LANES):
        most = maximum(most, absolute(load_floats(source + 4 * at)))
    scale = max(largest_of(most) * np.float32(1 / _STEPS), np.float32(_SCALE_LEAST))
    sum_high, sum_low = zero_ints(), zero_ints()
    for at in range(0, plane, LANES):
        whole = rounded(div(load_floats(source + 4 * at), splat_float(scale)))
        high = rounded(mul(whole, splat_float(1 / _PLANE)))
        low = sub(whole, mul(high, splat_float(_PLANE)))
        store_int8s(target + at, high)
        store_int8s(target + plane + at, low)
        sum_high, sum_low = add_ints(sum_high, to_ints(high)), add_ints(sum_low, to_ints(low))
    store_int(target + 2 * plane, np.int32(-BYTE_OFFSET) * sum_of_ints(sum_high))
    store_int(target + 2 * plane + 4, np.int32(-BYTE_OFFSET) * sum_of_ints(sum_low))
    store_float(target + 2 * plane + 8, scale)
