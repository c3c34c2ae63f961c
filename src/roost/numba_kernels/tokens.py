"""Tokens rounded to bytes, as the products take them: int8 with a scale for each block of 32 numbers, or one for all.

A token is first copied to floats that are padded with zeros to whole blocks, through the norm where the operation has
one. The scale of a block is its largest magnitude / 127; beside the bytes lie, for each block, that scale, the scale
times the sum of the bytes (what a minimum is multiplied by), and the sum of the bytes (for weights kept with an
offset). A token depends on nothing but itself. Bytes moved: 4 read and about 1.4 written for each number. Called by
`numba_kernels.linear`.
"""

import numpy as np
from numba import njit

from roost.numba_kernels.rows import copy_row, norm_row
from roost.numba_kernels.simd import (
    absolute,
    add_ints,
    div,
    largest_of,
    load_floats,
    maximum,
    rounded,
    splat_float,
    store_float,
    store_int,
    store_int8s,
    sum_of_ints,
    to_ints,
    zero_floats,
)

BLOCK = 32  # numbers that share a scale
STEPS = 127.0  # of a scale, on either side of zero
SCALE_LEAST = 1e-30  # of a token of zeros


@njit(nogil=True, inline="always")
def padded_len(in_len):
    """Numbers of a token with its padding."""
    return (in_len + BLOCK - 1) // BLOCK * BLOCK


@njit(nogil=True, inline="always")
def token_bytes(in_len):
    """Bytes that a rounded token takes: int8 numbers, then scales, scaled sums and sums of its blocks."""
    padded = padded_len(in_len)
    return (padded + padded // BLOCK * 12 + 63) // 64 * 64


@njit(nogil=True)
def copy_token(source, target, in_len, norm, eps):
    """A token as floats, padded; `norm` is the address of a root-mean-square norm's weight, or 0."""
    for at in range(in_len, padded_len(in_len)):
        store_float(target + 4 * at, np.float32(0))
    if norm == 0:
        copy_row(source, target, in_len)
    else:
        norm_row(source, target, norm, in_len, eps)


@njit(nogil=True)
def round_blocks(source, target, in_len):
    """A padded token of floats, rounded with a scale for each block."""
    num_blocks = padded_len(in_len) // BLOCK
    scales = target + num_blocks * BLOCK
    for block in range(num_blocks):
        at = source + 4 * BLOCK * block
        low, high = load_floats(at), load_floats(at + 64)
        scale = scale_of(largest_of(maximum(absolute(low), absolute(high))))
        sums = round_32(low, high, scale, target + BLOCK * block)
        store_float(scales + 4 * block, scale)
        store_float(scales + 4 * (num_blocks + block), scale * np.float32(sums))
        store_int(scales + 4 * (2 * num_blocks + block), sums)


@njit(nogil=True)
def round_token(source, target, in_len):
    """The same with one scale for the whole token, and one sum."""
    num_blocks = padded_len(in_len) // BLOCK
    most = zero_floats()
    for at in range(0, num_blocks * BLOCK, 16):
        most = maximum(most, absolute(load_floats(source + 4 * at)))
    scale = scale_of(largest_of(most))
    total = np.int32(0)
    for block in range(num_blocks):
        at = source + 4 * BLOCK * block
        total += round_32(load_floats(at), load_floats(at + 64), scale, target + BLOCK * block)
    store_float(target + num_blocks * BLOCK, scale)
    store_int(target + num_blocks * BLOCK + 8 * num_blocks, total)


@njit(nogil=True, inline="always")
def scale_of(most):
    """The scale of numbers whose largest magnitude is `most`."""
    return max(most, np.float32(SCALE_LEAST)) * np.float32(1 / STEPS)


@njit(nogil=True, inline="always")
def round_32(low, high, scale, target):
    """32 numbers as bytes; their sum."""
    low, high = rounded(div(low, splat_float(scale))), rounded(div(high, splat_float(scale)))
    store_int8s(target, low)
    store_int8s(target + 16, high)
    return sum_of_ints(add_ints(to_ints(low), to_ints(high)))
