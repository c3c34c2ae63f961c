"""Small operations on the rows of a batch: norms, sums, copies, gates, caps, and the angles of rotary positions.

A row is the numbers of a token, or one of several equal parts of it (the heads of queries and keys). Bytes moved: what
is read and written. Called by `numba_kernels.program`.
"""

import math

import numpy as np
from numba import njit

from roost.numba_kernels.activation import activated, capped
from roost.numba_kernels.records import field, float_field, share
from roost.numba_kernels.simd import (
    add,
    first_of,
    fma,
    load_float,
    load_floats,
    load_long,
    mul,
    splat_float,
    store_float,
    store_floats,
    sum_of,
    zero_floats,
)

# Of a record, besides its kind. Addresses; strides are in floats.
(
    NUM_TOKENS,  # the address of an int64
    PARTS,  # rows of a token, next to each other
    LENGTH,  # numbers of a row; of angles, half a head
    SOURCE,  # of angles, int64 positions
    SOURCE_STRIDE,
    TARGET,
    TARGET_STRIDE,
    OTHER,  # the weight of a norm, what is gated, or what is added; 0: nothing is
    OTHER_STRIDE,  # of a norm's weight, between two parts
    EPS,  # as the bits of a float64
    FREQUENCY,  # of angles
    COSINES,
    SINES,
    FACTOR,  # of a sum, as the bits of a float64, 0: none; or the cap
    ACTIVATION,  # of a gate
) = range(1, 16)


@njit(nogil=True)
def row_pieces(record, size):
    """Into how many pieces the tokens are cut."""
    return min(load_long(field(record, NUM_TOKENS)), size)


@njit(nogil=True)
def norm(record, piece, num_pieces):
    """Root-mean-square norms: weight * x / sqrt(mean(x^2) + eps)."""
    parts, length, eps = field(record, PARTS), field(record, LENGTH), float_field(record, EPS)
    first, last = share(load_long(field(record, NUM_TOKENS)), piece, num_pieces)
    for token in range(first, last):
        for part in range(parts):
            source = field(record, SOURCE) + 4 * (token * field(record, SOURCE_STRIDE) + part * length)
            target = field(record, TARGET) + 4 * (token * field(record, TARGET_STRIDE) + part * length)
            norm_row(source, target, field(record, OTHER) + 4 * part * field(record, OTHER_STRIDE), length, eps)


@njit(nogil=True, inline="always")
def root_factor(squares, count, eps):
    """What a root-mean-square norm multiplies with: 1 / sqrt(mean + eps)."""
    return np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(count) + np.float32(eps)))


@njit(nogil=True)
def squares_of(source, length):
    """The squares of a row, added lane by lane, then the lanes, then what is behind the last whole vector."""
    whole, squares = length // 16 * 16, zero_floats()
    for at in range(0, whole, 16):
        each = load_floats(source + 4 * at)
        squares = fma(each, each, squares)
    total = sum_of(squares)
    for at in range(whole, length):
        each = load_float(source + 4 * at)
        total += each * each
    return total


@njit(nogil=True)
def norm_row(source, target, weight, length, eps):
    """One row's norm."""
    whole = length // 16 * 16
    factor = root_factor(squares_of(source, length), length, eps)
    for at in range(0, whole, 16):
        scaled = mul(load_floats(source + 4 * at), splat_float(factor))
        store_floats(target + 4 * at, mul(scaled, load_floats(weight + 4 * at)))
    for at in range(whole, length):
        store_float(target + 4 * at, load_float(source + 4 * at) * factor * load_float(weight + 4 * at))


@njit(nogil=True)
def copy_row(source, target, length):
    """One row as it is."""
    whole = length // 16 * 16
    for at in range(0, whole, 16):
        store_floats(target + 4 * at, load_floats(source + 4 * at))
    for at in range(whole, length):
        store_float(target + 4 * at, load_float(source + 4 * at))


@njit(nogil=True)
def add_rows(record, piece, num_pieces):
    """Sums of two rows; of one, where there is no other: a copy."""
    length, other = field(record, LENGTH), field(record, OTHER)
    first, last = share(load_long(field(record, NUM_TOKENS)), piece, num_pieces)
    for token in range(first, last):
        source = field(record, SOURCE) + 4 * token * field(record, SOURCE_STRIDE)
        target = field(record, TARGET) + 4 * token * field(record, TARGET_STRIDE)
        if other == 0:
            copy_row(source, target, length)
        else:
            add_row(source, other + 4 * token * field(record, OTHER_STRIDE), target, length)
        if field(record, FACTOR) != 0:
            scale_row(target, np.float32(float_field(record, FACTOR)), length)


@njit(nogil=True)
def scale_row(target, factor, length):
    """A row times a factor, in its place."""
    whole = length // 16 * 16
    for at in range(0, whole, 16):
        store_floats(target + 4 * at, mul(load_floats(target + 4 * at), splat_float(factor)))
    for at in range(whole, length):
        store_float(target + 4 * at, load_float(target + 4 * at) * factor)


@njit(nogil=True)
def gate_rows(record, piece, num_pieces):
    """activation(gate) * up, of two that lie apart."""
    length, activation = field(record, LENGTH), field(record, ACTIVATION)
    whole = length // 16 * 16
    first, last = share(load_long(field(record, NUM_TOKENS)), piece, num_pieces)
    for token in range(first, last):
        gate = field(record, SOURCE) + 4 * token * field(record, SOURCE_STRIDE)
        up = field(record, OTHER) + 4 * token * field(record, OTHER_STRIDE)
        target = field(record, TARGET) + 4 * token * field(record, TARGET_STRIDE)
        for at in range(0, whole, 16):
            gated = activated(load_floats(gate + 4 * at), activation)
            store_floats(target + 4 * at, mul(gated, load_floats(up + 4 * at)))
        for at in range(whole, length):
            gated = first_of(activated(splat_float(load_float(gate + 4 * at)), activation))
            store_float(target + 4 * at, gated * load_float(up + 4 * at))


@njit(nogil=True)
def add_row(source, added, target, length):
    """The sum of two rows."""
    whole = length // 16 * 16
    for at in range(0, whole, 16):
        store_floats(target + 4 * at, add(load_floats(source + 4 * at), load_floats(added + 4 * at)))
    for at in range(whole, length):
        store_float(target + 4 * at, load_float(source + 4 * at) + load_float(added + 4 * at))


@njit(nogil=True)
def cap_rows(record, piece, num_pieces):
    """Soft caps, in place."""
    length, cap = field(record, LENGTH), np.float32(float_field(record, FACTOR))
    whole = length // 16 * 16
    first, last = share(load_long(field(record, NUM_TOKENS)), piece, num_pieces)
    for token in range(first, last):
        row = field(record, SOURCE) + 4 * token * field(record, SOURCE_STRIDE)
        for at in range(0, whole, 16):
            store_floats(row + 4 * at, capped(load_floats(row + 4 * at), cap))
        for at in range(whole, length):
            store_float(row + 4 * at, first_of(capped(splat_float(load_float(row + 4 * at)), cap)))


@njit(nogil=True)
def cos_sin(record, piece, num_pieces):
    """Cosines, twice side by side, and sines of each token's angles: position times frequency, in float32."""
    half = field(record, LENGTH)
    first, last = share(load_long(field(record, NUM_TOKENS)), piece, num_pieces)
    for token in range(first, last):
        position = np.float32(load_long(field(record, SOURCE) + 8 * token))
        cosines, sines = field(record, COSINES) + 8 * token * half, field(record, SINES) + 4 * token * half
        for at in range(half):
            angle = position * load_float(field(record, FREQUENCY) + 4 * at)
            cosine = np.float32(math.cos(angle))
            store_float(cosines + 4 * at, cosine)
            store_float(cosines + 4 * (half + at), cosine)
            store_float(sines + 4 * at, np.float32(math.sin(angle)))
