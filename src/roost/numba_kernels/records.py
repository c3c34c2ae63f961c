"""Records: one operation each, as a row of 64-bit numbers that compiled code reads.

A record's first number is its kind; the rest are addresses, sizes and flags, at places that the kernel of that kind
names. A program is a list of records (`numba_kernels.program`), each cut into pieces that the threads of the team take
one after the other; the next record begins when all are done. So a kernel is a function (record, piece, number of
pieces, …) that writes only its own share. Called by kernels.
"""

from numba import njit

from roost.numba_kernels.simd import float_of_bits, load_long

NUM_FIELDS = 32
RECORD_BYTES = 8 * NUM_FIELDS


@njit(nogil=True, inline="always")
def field(record, number):
    """One of a record's numbers."""
    return load_long(record + 8 * number)


@njit(nogil=True, inline="always")
def float_field(record, number):
    """One of them that is a float64."""
    return float_of_bits(field(record, number))


@njit(nogil=True, inline="always")
def share(count, piece, num_pieces):
    """The part [first, last) of `count` things that is one of so many pieces."""
    return count * piece // num_pieces, count * (piece + 1) // num_pieces
