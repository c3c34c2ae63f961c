"""Gated delta rule: the recurrence of a linear-attention layer from kept states, replayed inputs and new tokens.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  said = S^T q        S: [KEY_DIM, VALUE_DIM] of each value head

A program folds one segment into a block of columns of one head's state, token after token; of a tree each node after
its ancestors. The state stays in registers, and so does what the convolution reads, a token at its position modulo
TAPS, so that no sum depends on where a step began. Reads a state once, and inputs once for each block of columns. The
reference is `layers.gated_delta`. Called by models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.layers.gated_delta import NORM_EPS, DeltaWeights, Recurrence

_BLOCK_V = 32  # columns of a program: the same everywhere, since sums depend on it
_SOFTPLUS_MAX = 20.0  # from here on log(1 + exp(x)) is x


def gated_delta(inputs: Tensor, weights: DeltaWeights, at: Recurrence) -> Tensor:
    """What the heads [num_tokens, num_value_heads, value_dim] say of inputs [num_tokens, input_len], row by row."""
    replay, segments, shape = at.replay, at.replay.segments, weights.shape
    at.inputs.index_copy_(0, replay.slots, inputs)
    said = inputs.new_empty((len(inputs), shape.num_value_heads, shape.value_dim))
    if not said.numel() or not len(segments.rows):
        return said
    block_v = min(_BLOCK_V, triton.next_power_of_2(shape.value_dim))
    mask, tree_of = segments.tree_mask, segments.tree_of
    trees = (None, None) if mask is None or tree_of is None else (tree_of, mask.view(torch.uint8))
    assert (
        inputs.stride(1) == 1 and at.inputs.is_contiguous() and at.states.is_contiguous() and at.tails.is_contiguous()
    )
    assert weights.conv.is_contiguous() and replay.kept_at.stride(1) == replay.kept_in.stride(1) == 1
    _gated_delta[(len(segments.rows), shape.num_value_heads, triton.cdiv(shape.value_dim, block_v))](
        *(inputs, at.inputs, at.states, at.tails, said, weights.conv, weights.decay, weights.forget_bias),
        *(segments.rows, segments.offsets, segments.query_lens, segments.start_positions, replay.pages.table),
        *(replay.sources, replay.starts, replay.kept_at, replay.kept_in, *trees),
        *(inputs.stride(0), replay.pages.table.stride(0), replay.sources.stride(0), replay.starts.stride(0)),
        *(replay.kept_at.stride(0), replay.kept_in.stride(0)),
        NUM_KEPT=replay.kept_at.shape[1],
        NODES=0 if mask is None else mask.shape[1],
        PAGE_SIZE=replay.pages.size,
        NUM_KEY_HEADS=shape.num_key_heads,
        NUM_VALUE_HEADS=shape.num_value_heads,
        KEY_DIM=shape.key_dim,
        VALUE_DIM=shape.value_dim,
        CONV_LEN=shape.conv_len,
        EPS=NORM_EPS,
        SOFTPLUS_MAX=_SOFTPLUS_MAX,
        BLOCK_K=triton.next_power_of_2(shape.key_dim),
        BLOCK_V=block_v,
        TAPS=triton.next_power_of_2(shape.conv_len),
        num_warps=4,
    )
    return said


@triton.jit
def _gated_delta(
    inputs,
    slots,
    states,
    tails,
    said,
    conv,
    decay,
    forget_bias,
    rows,
    offsets,
    query_lens,
    start_positions,
    table,
    sources,
    starts,
    kept_at,
    kept_in,
    tree_of,
    tree_mask,
    input_stride,
    table_stride,
    source_stride,
    start_stride,
    kept_at_stride,
    kept_in_stride,
    NUM_KEPT: tl.constexpr,
    NODES: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    CONV_LEN: tl.constexpr,
    EPS: tl.constexpr,
    SOFTPLUS_MAX: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    TAPS: tl.constexpr,
):
    number, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KEY_LEN: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_LEN + NUM_VALUE_HEADS * VALUE_DIM
    INPUT_LEN: tl.constexpr = CHANNELS + 2 * NUM_VALUE_HEADS
    SHARES: tl.constexpr = NUM_VALUE_HEADS // NUM_KEY_HEADS
    dims, columns = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    query_at = (head // SHARES) * KEY_DIM + dims  # channels
    key_at, value_at = KEY_LEN + query_at, 2 * KEY_LEN + head * VALUE_DIM + columns
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    row, offset, length = tl.load(rows + number), tl.load(offsets + number), tl.load(query_lens + number)
    start, first = tl.load(start_positions + number), tl.load(starts + number * start_stride)
    source = tl.load(sources + number * source_stride).to(tl.int64)
    decay_of, bias_of = tl.load(decay + head), tl.load(forget_bias + head)

    of_state = head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
    is_state = is_dim[:, None] & is_column[None, :]
    STATE: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    TAIL: tl.constexpr = (CONV_LEN - 1) * CHANNELS
    state = tl.load(states + source * STATE + of_state, mask=is_state, other=0.0)
    before = tails + source * TAIL
    query_taps = _tail(before, query_at, is_dim, first, CHANNELS, CONV_LEN, TAPS)
    key_taps = _tail(before, key_at, is_dim, first, CHANNELS, CONV_LEN, TAPS)
    value_taps = _tail(before, value_at, is_column, first, CHANNELS, CONV_LEN, TAPS)

    is_tree = False
    if NODES > 0:
        tree = tl.load(tree_of + number)
        is_tree = tree >= 0
    end = start + tl.where(is_tree, 0, length)  # a tree's nodes do not follow one another
    for position in range(first, tl.where(length > 0, end, first)):
        if position < start:
            page = tl.load(table + row * table_stride + position // PAGE_SIZE).to(tl.int64)
            token = slots + (page * PAGE_SIZE + position % PAGE_SIZE) * INPUT_LEN
        else:
            token = inputs + (offset + position - start).to(tl.int64) * input_stride
        state, query_taps, key_taps, value_taps, heard = _fold(
            *(state, query_taps, key_taps, value_taps, token, position, conv, query_at, key_at, value_at),
            *(is_dim, is_column, head, decay_of, bias_of, CHANNELS, NUM_VALUE_HEADS, CONV_LEN, TAPS, KEY_DIM),
            *(EPS, SOFTPLUS_MAX),
        )
        if position >= start:
            out = said + ((offset + position - start).to(tl.int64) * NUM_VALUE_HEADS + head) * VALUE_DIM + columns
            tl.store(out, heard.to(said.dtype.element_ty), mask=is_column)
        for place in tl.static_range(NUM_KEPT):
            if tl.load(kept_at + number * kept_at_stride + place) == position + 1:
                page = tl.load(kept_in + number * kept_in_stride + place).to(tl.int64)
                tl.store(states + page * STATE + of_state, state, mask=is_state)
                behind = tails + page * TAIL
                if block + head % SHARES == 0:  # the others have the same queries and keys
                    _keep_tail(behind, query_at, is_dim, query_taps, position + 1, CHANNELS, CONV_LEN, TAPS)
                    _keep_tail(behind, key_at, is_dim, key_taps, position + 1, CHANNELS, CONV_LEN, TAPS)
                _keep_tail(behind, value_at, is_column, value_taps, position + 1, CHANNELS, CONV_LEN, TAPS)

    if NODES > 0:
        for node in range(0, tl.where(is_tree, length, 0)):
            path, path_query, path_key, path_value, position = state, query_taps, key_taps, value_taps, start
            heard = tl.zeros((BLOCK_V,), tl.float32)
            for ancestor in range(0, node + 1):
                if tl.load(tree_mask + (tree.to(tl.int64) * NODES + node) * NODES + ancestor) != 0:
                    token = inputs + (offset + ancestor).to(tl.int64) * input_stride
                    path, path_query, path_key, path_value, heard = _fold(
                        *(path, path_query, path_key, path_value, token, position, conv, query_at, key_at, value_at),
                        *(is_dim, is_column, head, decay_of, bias_of, CHANNELS, NUM_VALUE_HEADS, CONV_LEN, TAPS),
                        *(KEY_DIM, EPS, SOFTPLUS_MAX),
                    )
                    position += 1
            out = said + ((offset + node).to(tl.int64) * NUM_VALUE_HEADS + head) * VALUE_DIM + columns
            tl.store(out, heard.to(said.dtype.element_ty), mask=is_column)


@triton.jit
def _fold(
    state,
    query_taps,
    key_taps,
    value_taps,
    token,
    position,
    conv,
    query_at,
    key_at,
    value_at,
    is_dim,
    is_column,
    head,
    decay,
    forget_bias,
    CHANNELS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    CONV_LEN: tl.constexpr,
    TAPS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    EPS: tl.constexpr,
    SOFTPLUS_MAX: tl.constexpr,
):
    """Fold the inputs of the token at a position into a state: the state, the taps, and what the head says."""
    query, query_taps = _convolve(query_taps, token, position, conv, query_at, is_dim, CHANNELS, CONV_LEN, TAPS)
    key, key_taps = _convolve(key_taps, token, position, conv, key_at, is_dim, CHANNELS, CONV_LEN, TAPS)
    value, value_taps = _convolve(value_taps, token, position, conv, value_at, is_column, CHANNELS, CONV_LEN, TAPS)
    query *= tl.rsqrt(tl.sum(query * query) + EPS) * tl.rsqrt(KEY_DIM * 1.0)
    key *= tl.rsqrt(tl.sum(key * key) + EPS)
    forget = tl.load(token + CHANNELS + head).to(tl.float32) + forget_bias
    learn = tl.load(token + CHANNELS + NUM_VALUE_HEADS + head).to(tl.float32)
    softplus = tl.where(forget > SOFTPLUS_MAX, forget, tl.log(1.0 + tl.exp(tl.minimum(forget, SOFTPLUS_MAX))))
    state *= tl.exp(decay * softplus)
    missing = (value - tl.sum(key[:, None] * state, 0)) / (1.0 + tl.exp(-learn))
    state += key[:, None] * missing[None, :]
    return state, query_taps, key_taps, value_taps, tl.sum(query[:, None] * state, 0)


@triton.jit
def _convolve(
    taps, token, position, conv, channels, is_in, CHANNELS: tl.constexpr, CONV_LEN: tl.constexpr, TAPS: tl.constexpr
):
    """Channels of a token through the convolution, and the taps with it."""
    place = tl.arange(0, TAPS)
    age = (position - place) & (TAPS - 1)
    new = tl.load(token + channels, mask=is_in, other=0.0).to(tl.float32)
    taps = tl.where((age == 0)[None, :], new[:, None], taps)
    is_read = is_in[:, None] & (age < CONV_LEN)[None, :]
    weight = tl.load(conv + (CONV_LEN - 1 - age)[None, :] * CHANNELS + channels[:, None], mask=is_read, other=0.0)
    mixed = tl.sum(taps * weight.to(tl.float32), 1)
    return mixed / (1.0 + tl.exp(-mixed)), taps


@triton.jit
def _tail(tail, channels, is_in, position, CHANNELS: tl.constexpr, CONV_LEN: tl.constexpr, TAPS: tl.constexpr):
    """The taps in front of a position, from what was kept."""
    age = (position - 1 - tl.arange(0, TAPS)) & (TAPS - 1)
    is_kept = is_in[:, None] & (age < CONV_LEN - 1)[None, :]
    return tl.load(tail + (CONV_LEN - 2 - age)[None, :] * CHANNELS + channels[:, None], mask=is_kept, other=0.0).to(
        tl.float32
    )


@triton.jit
def _keep_tail(
    tail, channels, is_in, taps, position, CHANNELS: tl.constexpr, CONV_LEN: tl.constexpr, TAPS: tl.constexpr
):
    """Keep the taps in front of a position."""
    age = (position - 1 - tl.arange(0, TAPS)) & (TAPS - 1)
    is_kept = is_in[:, None] & (age < CONV_LEN - 1)[None, :]
    place = tail + (CONV_LEN - 2 - age)[None, :] * CHANNELS + channels[:, None]
    tl.store(place, taps.to(tail.dtype.element_ty), mask=is_kept)
