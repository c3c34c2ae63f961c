"""Draws with Gumbel noise where logits are in the host's memory, in Numba: the very tokens of `layers.gumbel`.

Every token is hashed, with vector instructions; only those whose noise might make them the largest are scored exactly,
from the table. Never changes a logit. Called by the sampler and by drafters on a CPU.
"""

import math

import numba
import numpy as np
from numba import njit

from roost.layers.gumbel import BIN_BITS, HASH_1, HASH_2, LINE_BITS, SCALE_BITS, SIDE_LEN
from roost.numba_kernels.support import compiled_folder

numba.config.CACHE_DIR = str(compiled_folder())

_BLOCK = 512  # tokens that are hashed together
_ONE = np.int32(0x3F800000)  # bits of 1.0
_NATS = np.float32(math.log(2) / 2**23)  # of one unit in the bits of a float32
_MARGIN = np.float32(1e-3)  # more than roundings can add to the bound
_H1, _H2, _TOP, _ALL = np.uint32(HASH_1), np.uint32(HASH_2), np.uint32(2**31), np.uint32(2**32 - 1)
_UNIT = np.float32(2.0**-32)
_SCALE = np.float32(2.0**-SCALE_BITS)
_BINS, _LINE = 1 << BIN_BITS, 1 << LINE_BITS


@njit(nogil=True, inline="always")
def _hashed(word):
    word = np.uint32((word ^ (word >> np.uint32(16))) * _H1)  # without the cast, Numba goes on in 64 bits
    word = np.uint32((word ^ (word >> np.uint32(15))) * _H2)
    return np.uint32(word ^ (word >> np.uint32(16)))


@njit(nogil=True, inline="always")
def _bits(token_id, low, high):
    """The random bits of a token in a draw."""
    return _hashed(np.uint32(_hashed(np.uint32(np.uint32(token_id) ^ low)) + high))


@njit(nogil=True)
def _noise(bits, table):
    """The noise of a token's bits."""
    is_upper = bits >= _TOP
    distance = np.float64(2 * np.int64(_ALL ^ bits if is_upper else bits) + 1)
    fraction, exponent = math.frexp(distance)
    along = (2 * fraction - 1) * _BINS
    place = np.int64(along)
    line = np.int64((along - place) * _LINE)
    place += (exponent - 1) * _BINS + (SIDE_LEN if is_upper else 0)
    whole = np.int64(table[0, place]) + ((np.int64(table[1, place]) * line) >> LINE_BITS)
    return np.float32(whole) * _SCALE


@njit(nogil=True, cache=True, error_model="numpy")
def winner(logits, token_ids, low, high, best, temperature, least, table):
    """The place of the largest score among logits [n] float32 of tokens [n] int32; the first among equals.

    Only of those whose scaled logit is at least `least`; -1 if there is none. `low` and `high` are the words of the
    draw's key, `best` the largest logit.
    """
    bits, shares = np.empty(_BLOCK, np.uint32), np.empty(_BLOCK, np.float32)
    as_ints = shares.view(np.int32)
    top, place, count = np.float32(-np.inf), -1, len(logits)
    for first in range(0, count, _BLOCK):
        number = min(_BLOCK, count - first)
        for i in range(number):
            word = _bits(token_ids[first + i], low, high)
            bits[i] = word
            shares[i] = np.float32(_ALL ^ word) * _UNIT
        num_near = 0
        for i in range(number):  # noise is at most -log(1 - u), and a float's bits are nearly its logarithm
            bound = np.float32(np.int32(_ONE - as_ints[i])) * _NATS + _MARGIN
            num_near += (logits[first + i] - best) / temperature + bound > top
        if num_near == 0:
            continue
        for i in range(number):
            scaled = (logits[first + i] - best) / temperature
            if scaled >= least and scaled + np.float32(np.int32(_ONE - as_ints[i])) * _NATS + _MARGIN > top:
                score = scaled + _noise(bits[i], table)
                if score > top:
                    top, place = score, first + i
    return place


@njit(nogil=True, cache=True, error_model="numpy")
def put_scores(scores, logits, token_ids, low, high, best, temperature, least, table):
    """Write the scores [n] of logits [n]; -inf where the scaled logit is below `least`."""
    for i in range(len(logits)):
        scaled = (logits[i] - best) / temperature
        if scaled >= least:
            scores[i] = scaled + _noise(_bits(token_ids[i], low, high), table)
        else:
            scores[i] = np.float32(-np.inf)
