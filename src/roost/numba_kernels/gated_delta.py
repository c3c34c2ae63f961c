"""The gated delta rule on a CPU: states folded head by head, in memory that stays near.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  said = S^T q        S: [key_dim, value_dim] of a value head

A piece is some heads of some rows. A head's state is copied to scratch, where inputs are folded into it one after the
other, those in slots first, then the row's own; of a tree each node after its ancestors, from the state in front of it.
What the convolution reads lies beside it, a token at its position modulo the taps. Bytes moved: a state read once for
a row, and its scratch for each token. The reference is `layers.gated_delta`. Called by `numba_kernels.program`.
"""

import math

import numpy as np
from numba import njit

from roost.numba_kernels.activation import SILU, activated
from roost.numba_kernels.records import field, float_field, share
from roost.numba_kernels.rows import copy_row, scale_row, squares_of
from roost.numba_kernels.simd import (
    first_of,
    fma,
    load_byte,
    load_float,
    load_floats,
    load_nth_int,
    load_nth_long,
    mul,
    splat_float,
    store_float,
    store_floats,
    zero_floats,
)

# Of a record, besides its kind. Addresses of contiguous tensors, floats unless they say so; strides are in numbers.
(
    NUM_SEGMENTS,
    INPUTS,  # [num_tokens, input_len]
    INPUT_STRIDE,
    SLOTS,  # int64 [num_tokens] where they go
    KEPT_INPUTS,  # [num_slots, input_len]
    STATES,  # [num_pages, num_value_heads, key_dim, value_dim]
    TAILS,  # [num_pages, conv_len - 1, num_channels]
    SAID,  # [num_tokens, num_value_heads, value_dim]
    CONV,  # [conv_len, num_channels], the current token last
    DECAY,
    FORGET_BIAS,
    ROWS,  # int64 [num_segments]
    OFFSETS,  # int32
    QUERY_LENS,  # int32
    START_POSITIONS,  # int64
    TABLE,  # int32
    TABLE_STRIDE,
    PAGE_SIZE,
    REPLAY,  # int64 [num_segments, 2 + 2 * num_kept]: source, its position, where states are kept, their pages
    NUM_KEPT,
    TREE_OF,  # int32 [num_segments]; 0: there are no trees
    TREE_MASK,  # bool [num_trees, num_nodes, num_nodes]
    NUM_NODES,
    NUM_KEY_HEADS,
    NUM_VALUE_HEADS,
    KEY_DIM,
    VALUE_DIM,
    CONV_LEN,
    SCRATCH,
    EPS,  # as the bits of a float64
) = range(1, 31)
_PIECES = 4  # of a record, for each member of the team


def scratch_floats(key_dim, value_dim, conv_len):
    """Numbers of scratch that a member needs: a state and taps, the same again for trees, and a token's vectors."""
    taps = conv_len * (2 * key_dim + value_dim)
    return 2 * (key_dim * value_dim + taps) + 2 * key_dim + 3 * value_dim


@njit(nogil=True)
def delta_pieces(record, size):
    """Into how many pieces the heads of all rows are cut."""
    return min(field(record, NUM_SEGMENTS) * field(record, NUM_VALUE_HEADS), _PIECES * size)


@njit(nogil=True)
def gated_delta(record, piece, num_pieces, member):
    """Fold the rows' inputs into their states, head by head."""
    heads = field(record, NUM_VALUE_HEADS)
    first, last = share(field(record, NUM_SEGMENTS) * heads, piece, num_pieces)
    for unit in range(first, last):
        number, head = unit // heads, unit % heads
        if load_nth_int(field(record, QUERY_LENS), number) > 0:
            if head == 0:
                _keep_inputs(record, number)
            _fold_row(record, number, head, member)


@njit(nogil=True)
def _keep_inputs(record, number):
    """The inputs of a row's tokens to their slots. Nobody reads these in this step."""
    offset, length = load_nth_int(field(record, OFFSETS), number), _input_len(record)
    for token in range(offset, offset + load_nth_int(field(record, QUERY_LENS), number)):
        slot = load_nth_long(field(record, SLOTS), token)
        source = field(record, INPUTS) + 4 * token * field(record, INPUT_STRIDE)
        copy_row(source, field(record, KEPT_INPUTS) + 4 * slot * length, length)


@njit(nogil=True, inline="always")
def _num_channels(record):
    keys = 2 * field(record, NUM_KEY_HEADS) * field(record, KEY_DIM)
    return keys + field(record, NUM_VALUE_HEADS) * field(record, VALUE_DIM)


@njit(nogil=True, inline="always")
def _input_len(record):
    return _num_channels(record) + 2 * field(record, NUM_VALUE_HEADS)


@njit(nogil=True)
def _fold_row(record, number, head, member):
    """One head of one row."""
    key_dim, value_dim = field(record, KEY_DIM), field(record, VALUE_DIM)
    whole = key_dim * value_dim + field(record, CONV_LEN) * (2 * key_dim + value_dim)  # of a state and its taps
    state = field(record, SCRATCH) + 4 * member * (2 * whole + 2 * key_dim + 3 * value_dim)
    vectors = state + 4 * 2 * whole
    replay = field(record, REPLAY) + 8 * number * (2 + 2 * field(record, NUM_KEPT))
    source, first = load_nth_long(replay, 0), load_nth_long(replay, 1)
    offset, length = load_nth_int(field(record, OFFSETS), number), load_nth_int(field(record, QUERY_LENS), number)
    start, row = load_nth_long(field(record, START_POSITIONS), number), load_nth_long(field(record, ROWS), number)
    _take_state(record, head, source, first, state)
    is_tree = field(record, TREE_OF) != 0 and load_nth_int(field(record, TREE_OF), number) >= 0
    for position in range(first, start + (0 if is_tree else length)):
        if position < start:
            page_size = field(record, PAGE_SIZE)
            place = row * field(record, TABLE_STRIDE) + position // page_size
            slot = load_nth_int(field(record, TABLE), place) * page_size + position % page_size
            token = field(record, KEPT_INPUTS) + 4 * slot * _input_len(record)
        else:
            token = field(record, INPUTS) + 4 * (offset + position - start) * field(record, INPUT_STRIDE)
        _fold(record, head, state, vectors, token, position)
        if position >= start:
            _say(record, head, vectors, offset + position - start)
        for kept in range(2, 2 + field(record, NUM_KEPT)):
            if load_nth_long(replay, kept) == position + 1:
                _put_state(record, head, load_nth_long(replay, kept + field(record, NUM_KEPT)), position + 1, state)
    if is_tree:
        tree, path = load_nth_int(field(record, TREE_OF), number), state + 4 * whole
        for node in range(length):
            copy_row(state, path, whole)
            position = start
            for ancestor in range(node + 1):
                nodes = field(record, NUM_NODES)
                if load_byte(field(record, TREE_MASK) + (tree * nodes + node) * nodes + ancestor) != 0:
                    token = field(record, INPUTS) + 4 * (offset + ancestor) * field(record, INPUT_STRIDE)
                    _fold(record, head, path, vectors, token, position)
                    position += 1
            _say(record, head, vectors, offset + node)


@njit(nogil=True, inline="always")
def _channels(record, head, part):
    """First of the head's channels, and how many: of queries (0), of keys or of values (2)."""
    key_dim, num_keys = field(record, KEY_DIM), field(record, NUM_KEY_HEADS)
    if part == 2:
        return 2 * num_keys * key_dim + head * field(record, VALUE_DIM), field(record, VALUE_DIM)
    shared = head // (field(record, NUM_VALUE_HEADS) // num_keys)
    return (part * num_keys + shared) * key_dim, key_dim


@njit(nogil=True, inline="always")
def _tap(record, state, position):
    """Where a position's channels lie beside a state: queries, keys, values."""
    key_dim, value_dim, conv_len = field(record, KEY_DIM), field(record, VALUE_DIM), field(record, CONV_LEN)
    return state + 4 * (key_dim * value_dim + position % conv_len * (2 * key_dim + value_dim))


@njit(nogil=True)
def _take_state(record, head, page, position, state):
    """Copy a state, and what the convolution reads in front of its position."""
    size, conv_len = field(record, KEY_DIM) * field(record, VALUE_DIM), field(record, CONV_LEN)
    copy_row(field(record, STATES) + 4 * (page * field(record, NUM_VALUE_HEADS) + head) * size, state, size)
    for back in range(1, conv_len):
        tail = field(record, TAILS) + 4 * (page * (conv_len - 1) + conv_len - 1 - back) * _num_channels(record)
        target = _tap(record, state, position - back + conv_len)
        for part in range(3):
            channel, count = _channels(record, head, part)
            copy_row(tail + 4 * channel, target, count)
            target += 4 * count


@njit(nogil=True)
def _put_state(record, head, page, position, state):
    """The other way around; queries and keys are put down by the first of the heads that share them."""
    size, conv_len = field(record, KEY_DIM) * field(record, VALUE_DIM), field(record, CONV_LEN)
    copy_row(state, field(record, STATES) + 4 * (page * field(record, NUM_VALUE_HEADS) + head) * size, size)
    is_first = head % (field(record, NUM_VALUE_HEADS) // field(record, NUM_KEY_HEADS)) == 0
    for back in range(1, conv_len):
        tail = field(record, TAILS) + 4 * (page * (conv_len - 1) + conv_len - 1 - back) * _num_channels(record)
        source = _tap(record, state, position - back + conv_len)
        for part in range(3):
            channel, count = _channels(record, head, part)
            if part == 2 or is_first:
                copy_row(source, tail + 4 * channel, count)
            source += 4 * count


@njit(nogil=True)
def _fold(record, head, state, vectors, token, position):
    """Fold the inputs of the token at a position into a state; `vectors`: query, key, value, missing, said."""
    key_dim, value_dim = field(record, KEY_DIM), field(record, VALUE_DIM)
    tap, target = _tap(record, state, position), vectors
    for part in range(3):
        channel, count = _channels(record, head, part)
        copy_row(token + 4 * channel, tap, count)
        _convolve(record, state, position, tap - _tap(record, state, position), channel, target, count)
        tap, target = tap + 4 * count, target + 4 * count
    query, key, value = vectors, vectors + 4 * key_dim, vectors + 8 * key_dim
    missing, said = value + 4 * value_dim, value + 8 * value_dim
    scale_row(query, _unit_factor(record, query) * np.float32(1.0 / math.sqrt(key_dim)), key_dim)
    scale_row(key, _unit_factor(record, key), key_dim)
    heads, channels = field(record, NUM_VALUE_HEADS), _num_channels(record)
    forget = np.float64(load_float(token + 4 * (channels + head)))
    forget += np.float64(load_float(field(record, FORGET_BIAS) + 4 * head))
    softplus = forget if forget > 20.0 else math.log1p(math.exp(forget))
    decay = np.float32(math.exp(np.float64(load_float(field(record, DECAY) + 4 * head)) * softplus))
    rate = np.float32(1.0 / (1.0 + math.exp(-np.float64(load_float(token + 4 * (channels + heads + head))))))
    _clear(missing, value_dim)
    _clear(said, value_dim)
    for at in range(key_dim):  # forget, and what is recalled of the key
        _scale_and_add(state + 4 * at * value_dim, decay, missing, load_float(key + 4 * at), value_dim)
    for at in range(value_dim):
        gap = load_float(value + 4 * at) - load_float(missing + 4 * at)
        store_float(missing + 4 * at, rate * gap)
    for at in range(key_dim):  # learn, and what is said to the query
        line = state + 4 * at * value_dim
        _learn_and_add(line, missing, load_float(key + 4 * at), said, load_float(query + 4 * at), value_dim)


@njit(nogil=True)
def _convolve(record, state, position, part, channel, target, count):
    """The channels of a part, `part` bytes behind a tap's first, through the convolution and silu."""
    conv_len, channels, whole = field(record, CONV_LEN), _num_channels(record), count // 16 * 16
    for at in range(0, whole, 16):
        total = zero_floats()
        for back in range(conv_len):
            weight = field(record, CONV) + 4 * ((conv_len - 1 - back) * channels + channel + at)
            tap = _tap(record, state, position - back + conv_len) + part + 4 * at
            total = fma(load_floats(tap), load_floats(weight), total)
        store_floats(target + 4 * at, activated(total, SILU))
    for at in range(whole, count):
        one = np.float32(0.0)
        for back in range(conv_len):
            weight = field(record, CONV) + 4 * ((conv_len - 1 - back) * channels + channel + at)
            one += load_float(_tap(record, state, position - back + conv_len) + part + 4 * at) * load_float(weight)
        store_float(target + 4 * at, first_of(activated(splat_float(one), SILU)))


@njit(nogil=True)
def _unit_factor(record, vector):
    """What makes a query or key of length one."""
    total = squares_of(vector, field(record, KEY_DIM))
    return np.float32(1.0) / np.float32(math.sqrt(total + np.float32(float_field(record, EPS))))


@njit(nogil=True)
def _clear(vector, count):
    for at in range(count):
        store_float(vector + 4 * at, np.float32(0.0))


@njit(nogil=True, inline="always")
def _scale_and_add(line, factor, total, share_of, count):
    """line *= factor; total += share * line."""
    whole = count // 16 * 16
    for at in range(0, whole, 16):
        each = mul(load_floats(line + 4 * at), splat_float(factor))
        store_floats(line + 4 * at, each)
        store_floats(total + 4 * at, fma(each, splat_float(share_of), load_floats(total + 4 * at)))
    for at in range(whole, count):
        one = load_float(line + 4 * at) * factor
        store_float(line + 4 * at, one)
        store_float(total + 4 * at, load_float(total + 4 * at) + one * share_of)


@njit(nogil=True, inline="always")
def _learn_and_add(line, missing, key, total, query, count):
    """line += key * missing; total += query * line."""
    whole = count // 16 * 16
    for at in range(0, whole, 16):
        each = fma(load_floats(missing + 4 * at), splat_float(key), load_floats(line + 4 * at))
        store_floats(line + 4 * at, each)
        store_floats(total + 4 * at, fma(each, splat_float(query), load_floats(total + 4 * at)))
    for at in range(whole, count):
        one = load_float(line + 4 * at) + key * load_float(missing + 4 * at)
        store_float(line + 4 * at, one)
        store_float(total + 4 * at, load_float(total + 4 * at) + query * one)


@njit(nogil=True)
def _say(record, head, vectors, token):
    """What the head says after a token."""
    value_dim = field(record, VALUE_DIM)
    said = vectors + 4 * (2 * field(record, KEY_DIM) + 2 * value_dim)
    place = (token * field(record, NUM_VALUE_HEADS) + head) * value_dim
    copy_row(said, field(record, SAID) + 4 * place, value_dim)
