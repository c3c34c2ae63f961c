"""Gated delta rule: the recurrence of a linear-attention layer from kept states, replayed inputs and new tokens.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  said = S^T q        S: [KEY_DIM, VALUE_DIM] of each value head

One kernel takes each token that will be folded through the convolution and the norms, by itself. The other folds what
that left into some columns of one head's state, in the registers of one warp, token after token; of a tree each node
after its ancestors. It reads a state once. No sum depends on where a step began: products are fused with none. The
reference is `layers.gated_delta`. Called by models.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.layers.gated_delta import NORM_EPS, DeltaWeights, Recurrence

_BLOCK_V = 32  # columns of a program that folds: the same everywhere, since sums depend on it
_BLOCK_CHANNELS = 2048  # of a program that prepares
_SOFTPLUS_MAX = 20.0  # from here on log(1 + exp(x)) is x
_NEVER = tl.constexpr(2**30)  # a position that no text has


def gated_delta(inputs: Tensor, weights: DeltaWeights, at: Recurrence) -> Tensor:
    """What the heads [num_tokens, num_value_heads, value_dim] say of inputs [num_tokens, input_len], row by row."""
    replay, segments, shape = at.replay, at.replay.segments, weights.shape
    at.inputs.index_copy_(0, replay.slots, inputs)
    said = inputs.new_empty((len(inputs), shape.num_value_heads, shape.value_dim))
    num_segments = len(segments.rows)
    if not said.numel() or not num_segments:
        return said
    mask, tree_of = segments.tree_mask, segments.tree_of
    trees = (None, None) if mask is None or tree_of is None else (tree_of, mask.view(torch.uint8))
    assert inputs.stride(1) == replay.kept_at.stride(1) == replay.kept_in.stride(1) == 1
    assert all(each.is_contiguous() for each in (at.inputs, at.states, at.tails, weights.conv))
    num_replayed = num_segments * replay.replayed_max
    prepared = inputs.new_empty((num_replayed + len(inputs), shape.input_len), dtype=torch.float32)
    columns = (segments.offsets, segments.query_lens, segments.start_positions, replay.starts, replay.kept_at)
    strides = (replay.sources.stride(0), replay.starts.stride(0), replay.kept_at.stride(0), replay.kept_in.stride(0))
    sizes = {
        "NUM_KEPT": replay.kept_at.shape[1],
        "NODES": 0 if mask is None else mask.shape[1],
        "NUM_KEY_HEADS": shape.num_key_heads,
        "NUM_VALUE_HEADS": shape.num_value_heads,
        "KEY_DIM": shape.key_dim,
        "VALUE_DIM": shape.value_dim,
        "BLOCK_K": triton.next_power_of_2(shape.key_dim),
    }
    heads = max(1, _BLOCK_CHANNELS // sizes["BLOCK_K"])
    parts = triton.cdiv(2 * shape.num_key_heads, heads), triton.cdiv(shape.num_value_heads, heads)
    _prepare[(len(prepared), sum(parts))](
        *(inputs, at.inputs, at.tails, prepared, weights.conv, weights.decay, weights.forget_bias, segments.rows),
        *(replay.pages.table, *columns, replay.sources, replay.kept_in, *trees, *strides),
        *(inputs.stride(0), replay.pages.table.stride(0), num_segments, num_replayed, replay.replayed_max),
        **sizes,
        CONV_LEN=shape.conv_len,
        PAGE_SIZE=replay.pages.size,
        EPS=NORM_EPS,
        SOFTPLUS_MAX=_SOFTPLUS_MAX,
        KEY_PARTS=parts[0],
        HEADS=heads,
        BLOCK_V=triton.next_power_of_2(shape.value_dim),
        BLOCK_SEGMENTS=triton.next_power_of_2(num_segments),
        BLOCK_NODES=triton.next_power_of_2(max(1, sizes["NODES"])),
        num_warps=4,
        enable_fp_fusion=False,
    )
    block_v = min(_BLOCK_V, triton.next_power_of_2(shape.value_dim))
    _gated_delta[(num_segments, shape.num_value_heads, triton.cdiv(shape.value_dim, block_v))](
        *(prepared, at.states, said, *columns, replay.sources, replay.kept_in, *trees, *strides),
        *(num_replayed, replay.replayed_max),
        **sizes,
        BLOCK_KEPT=triton.next_power_of_2(max(1, sizes["NUM_KEPT"])),
        BLOCK_V=block_v,
        num_warps=1,
        enable_fp_fusion=False,
    )
    return said


@triton.jit
def _prepare(
    inputs,
    slots,
    tails,
    prepared,
    conv,
    decay,
    forget_bias,
    rows,
    table,
    offsets,
    query_lens,
    start_positions,
    starts,
    kept_at,
    sources,
    kept_in,
    tree_of,
    tree_mask,
    source_stride,
    start_stride,
    kept_at_stride,
    kept_in_stride,
    input_stride,
    table_stride,
    num_segments,
    num_replayed,
    replayed_max,
    NUM_KEPT: tl.constexpr,
    NODES: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CONV_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    EPS: tl.constexpr,
    SOFTPLUS_MAX: tl.constexpr,
    KEY_PARTS: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK_V: tl.constexpr,
    BLOCK_SEGMENTS: tl.constexpr,
    BLOCK_NODES: tl.constexpr,
):
    """Some heads of one token: queries and keys of length one, or values and rates."""
    place, part = tl.program_id(0), tl.program_id(1)
    KEY_LEN: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_LEN + NUM_VALUE_HEADS * VALUE_DIM
    INPUT_LEN: tl.constexpr = CHANNELS + 2 * NUM_VALUE_HEADS
    TAIL: tl.constexpr = (CONV_LEN - 1) * CHANNELS
    is_new, token = place >= num_replayed, place - num_replayed
    number = place // tl.maximum(replayed_max, 1)  # the segment
    if is_new:
        number = _segment_of(token, offsets, query_lens, num_segments, BLOCK_SEGMENTS)
    is_token = number >= 0
    number = tl.maximum(number, 0)
    node = token - tl.load(offsets + number)
    start, first = tl.load(start_positions + number), tl.load(starts + number * start_stride)
    position = tl.where(is_new, start + node, first + place % tl.maximum(replayed_max, 1))
    is_token = is_token & (is_new | ((position < start) & (tl.load(query_lens + number) > 0)))

    nodes = tl.arange(0, BLOCK_NODES)
    ranks = tl.zeros((BLOCK_NODES,), tl.int32)  # of what a node reads, from its root on 1, 2, …; 0: it does not
    if NODES > 0:
        tree = tl.load(tree_of + number)
        if is_new & (tree >= 0):
            of_node = tree_mask + (tree.to(tl.int64) * NODES + node) * NODES + nodes
            reads = (tl.load(of_node, mask=nodes <= tl.where(is_token, node, -1), other=0) != 0).to(tl.int32)
            ranks, position = tl.cumsum(reads, 0) * reads, start + tl.sum(reads) - 1
    behind = tl.zeros((), tl.int64)  # the page where what is read behind the token is kept; the null page: it is not
    for each_kept in tl.static_range(NUM_KEPT):
        if tl.load(kept_at + number * kept_at_stride + each_kept) == position + 1:
            behind = tl.load(kept_in + number * kept_in_stride + each_kept).to(tl.int64)
    is_kept, behind = is_token & (tl.max(ranks) == 0) & (behind > 0), tails + behind * TAIL
    row, source = tl.load(rows + number), tl.load(sources + number * source_stride).to(tl.int64)
    before, own = tails + source * TAIL, inputs + (token - node).to(tl.int64) * input_stride
    out, pages = prepared + place.to(tl.int64) * INPUT_LEN, table + row * table_stride
    if part < KEY_PARTS:
        heads, dims = part * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_K)
        channels = heads[:, None] * KEY_DIM + dims[None, :]
        is_channel = (heads < tl.where(is_token, 2 * NUM_KEY_HEADS, 0))[:, None] & (dims < KEY_DIM)[None, :]
        mixed = _convolved(
            *(
                channels,
                is_channel,
                position,
                start,
                first,
                ranks,
                nodes,
                before,
                own,
                slots,
                pages,
                conv,
                behind,
                is_kept,
            ),
            *(input_stride, CHANNELS, INPUT_LEN, CONV_LEN, PAGE_SIZE),
        )
        scale = tl.where(heads < NUM_KEY_HEADS, tl.rsqrt(KEY_DIM * 1.0), 1.0)
        scale *= tl.rsqrt(tl.sum(mixed * mixed, 1) + EPS)
        tl.store(out + channels, mixed * scale[:, None], mask=is_channel)
    else:
        values, columns = (part - KEY_PARTS) * HEADS + tl.arange(0, HEADS), tl.arange(0, BLOCK_V)
        said_at = 2 * KEY_LEN + values[:, None] * VALUE_DIM + columns[None, :]
        is_value = values < tl.where(is_token, NUM_VALUE_HEADS, 0)
        is_said = is_value[:, None] & (columns < VALUE_DIM)[None, :]
        value = _convolved(
            *(said_at, is_said, position, start, first, ranks, nodes, before, own, slots, pages, conv, behind, is_kept),
            *(input_stride, CHANNELS, INPUT_LEN, CONV_LEN, PAGE_SIZE),
        )
        tl.store(out + said_at, value, mask=is_said)
        rates = own + node * input_stride
        if not is_new:
            rates = _in_slot(slots, pages, position, INPUT_LEN, PAGE_SIZE)
        _prepare_rates(
            rates + CHANNELS, out + CHANNELS, decay, forget_bias, values, is_value, NUM_VALUE_HEADS, SOFTPLUS_MAX
        )


@triton.jit
def _segment_of(token, offsets, query_lens, num_segments, BLOCK_SEGMENTS: tl.constexpr):
    """The segment that a token of the batch is in; -1: it is padding."""
    each = tl.arange(0, BLOCK_SEGMENTS)
    begins = tl.load(offsets + each, mask=each < num_segments, other=0)
    lens = tl.load(query_lens + each, mask=each < num_segments, other=0)
    return tl.max(tl.where((begins <= token) & (token < begins + lens), each, -1))


@triton.jit
def _prepare_rates(
    rates,
    out,
    decay,
    forget_bias,
    heads,
    is_head,
    NUM_VALUE_HEADS: tl.constexpr,
    SOFTPLUS_MAX: tl.constexpr,
):
    """What stays of a state, and how much it learns, head by head."""
    forget = tl.load(rates + heads, mask=is_head, other=0.0).to(tl.float32)
    forget += tl.load(forget_bias + heads, mask=is_head, other=0.0)
    softplus = tl.where(forget > SOFTPLUS_MAX, forget, tl.log(1.0 + tl.exp(tl.minimum(forget, SOFTPLUS_MAX))))
    learn = tl.load(rates + NUM_VALUE_HEADS + heads, mask=is_head, other=0.0).to(tl.float32)
    tl.store(out + heads, tl.exp(tl.load(decay + heads, mask=is_head, other=0.0) * softplus), mask=is_head)
    tl.store(out + NUM_VALUE_HEADS + heads, 1.0 / (1.0 + tl.exp(-learn)), mask=is_head)


@triton.jit
def _in_slot(slots, pages, position, INPUT_LEN: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where the inputs of a position lie."""
    page = tl.load(pages + tl.maximum(position, 0) // PAGE_SIZE).to(tl.int64)
    return slots + (page * PAGE_SIZE + position % PAGE_SIZE) * INPUT_LEN


@triton.jit
def _convolved(
    channels,
    is_in,
    position,
    start,
    first,
    ranks,
    nodes,
    before,
    own,
    slots,
    pages,
    conv,
    behind,
    is_kept,
    input_stride,
    CHANNELS: tl.constexpr,
    INPUT_LEN: tl.constexpr,
    CONV_LEN: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
):
    """Channels of a token through the convolution; what the next tokens read of them is kept where it is to be."""
    mixed = tl.zeros(channels.shape, tl.float32)
    depth = tl.max(ranks)
    num_own = tl.where(depth > 0, depth, position - start + 1)  # of the row's own tokens, this one included
    for age in tl.static_range(CONV_LEN):
        at = position - age
        if age < num_own:  # such a token may have no slot: not all of a chunk is kept
            node = tl.where(depth > 0, tl.max(tl.where(ranks == num_own - age, nodes, 0)), at - start)
            token = own + node * input_stride
        elif at < first:
            token = before + (CONV_LEN - 1 + at - first) * CHANNELS
        else:
            token = _in_slot(slots, pages, at, INPUT_LEN, PAGE_SIZE)
        tap = tl.load(token + channels, mask=is_in, other=0.0)
        weight = tl.load(conv + (CONV_LEN - 1 - age) * CHANNELS + channels, mask=is_in, other=0.0)
        mixed += tap.to(tl.float32) * weight.to(tl.float32)
        if (age < CONV_LEN - 1) and is_kept:
            tl.store(behind + (CONV_LEN - 2 - age) * CHANNELS + channels, tap, mask=is_in)
    return mixed / (1.0 + tl.exp(-mixed))


@triton.jit
def _gated_delta(
    prepared,
    states,
    said,
    offsets,
    query_lens,
    start_positions,
    starts,
    kept_at,
    sources,
    kept_in,
    tree_of,
    tree_mask,
    source_stride,
    start_stride,
    kept_at_stride,
    kept_in_stride,
    num_replayed,
    replayed_max,
    NUM_KEPT: tl.constexpr,
    NODES: tl.constexpr,
    NUM_KEY_HEADS: tl.constexpr,
    NUM_VALUE_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_KEPT: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    number, head, block = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    KEY_LEN: tl.constexpr = NUM_KEY_HEADS * KEY_DIM
    CHANNELS: tl.constexpr = 2 * KEY_LEN + NUM_VALUE_HEADS * VALUE_DIM
    INPUT_LEN: tl.constexpr = CHANNELS + 2 * NUM_VALUE_HEADS
    STATE: tl.constexpr = NUM_VALUE_HEADS * KEY_DIM * VALUE_DIM
    dims, columns = tl.arange(0, BLOCK_K), block * BLOCK_V + tl.arange(0, BLOCK_V)
    query_at = (head // (NUM_VALUE_HEADS // NUM_KEY_HEADS)) * KEY_DIM + dims
    key_at, value_at, rates_at = KEY_LEN + query_at, 2 * KEY_LEN + head * VALUE_DIM + columns, CHANNELS + head
    is_dim, is_column = dims < KEY_DIM, columns < VALUE_DIM
    offset, length = tl.load(offsets + number), tl.load(query_lens + number)
    start, first = tl.load(start_positions + number), tl.load(starts + number * start_stride)
    source = tl.load(sources + number * source_stride).to(tl.int64)
    of_state = states + head * KEY_DIM * VALUE_DIM + dims[:, None] * VALUE_DIM + columns[None, :]
    is_state = is_dim[:, None] & is_column[None, :]
    state = tl.load(of_state + source * STATE, mask=is_state, other=0.0)

    kept = tl.arange(0, BLOCK_KEPT)
    keeps = tl.load(kept_at + number * kept_at_stride + kept, mask=kept < NUM_KEPT, other=-1)
    pages = tl.load(kept_in + number * kept_in_stride + kept, mask=kept < NUM_KEPT, other=0)
    next_kept = tl.min(tl.where(keeps > first, keeps, _NEVER))
    is_tree = False
    if NODES > 0:
        tree = tl.load(tree_of + number)
        is_tree = tree >= 0
    replayed = prepared + (number * replayed_max).to(tl.int64) * INPUT_LEN
    own = prepared + (num_replayed + offset).to(tl.int64) * INPUT_LEN
    num_before = start - first
    end = tl.where(length > 0, num_before + tl.where(is_tree, 0, length), 0)  # nodes do not follow one another
    for done in range(0, end):
        token = tl.where(done < num_before, replayed + done * INPUT_LEN, own + (done - num_before) * INPUT_LEN)
        state = _fold(state, token, key_at, value_at, rates_at, is_dim, is_column, NUM_VALUE_HEADS)
        if done >= num_before:
            heard = tl.sum(tl.load(token + query_at, mask=is_dim, other=0.0)[:, None] * state, 0)
            out = said + ((offset + done - num_before).to(tl.int64) * NUM_VALUE_HEADS + head) * VALUE_DIM + columns
            tl.store(out, heard.to(said.dtype.element_ty), mask=is_column)
        if first + done + 1 == next_kept:
            page = tl.max(tl.where(keeps == next_kept, pages, 0)).to(tl.int64)
            tl.store(of_state + page * STATE, state, mask=is_state)
            next_kept = tl.min(tl.where(keeps > next_kept, keeps, _NEVER))

    if NODES > 0:
        for node in range(0, tl.where(is_tree, length, 0)):
            path = state
            for ancestor in range(0, node + 1):
                if tl.load(tree_mask + (tree.to(tl.int64) * NODES + node) * NODES + ancestor) != 0:
                    token = own + ancestor * INPUT_LEN
                    path = _fold(path, token, key_at, value_at, rates_at, is_dim, is_column, NUM_VALUE_HEADS)
            query = tl.load(own + node * INPUT_LEN + query_at, mask=is_dim, other=0.0)
            out = said + ((offset + node).to(tl.int64) * NUM_VALUE_HEADS + head) * VALUE_DIM + columns
            tl.store(out, tl.sum(query[:, None] * path, 0).to(said.dtype.element_ty), mask=is_column)


@triton.jit
def _fold(state, token, key_at, value_at, rates_at, is_dim, is_column, NUM_VALUE_HEADS: tl.constexpr):
    """Fold a token into a state."""
    key = tl.load(token + key_at, mask=is_dim, other=0.0)
    value = tl.load(token + value_at, mask=is_column, other=0.0)
    state *= tl.load(token + rates_at)
    missing = (value - tl.sum(key[:, None] * state, 0)) * tl.load(token + rates_at + NUM_VALUE_HEADS)
    return state + key[:, None] * missing[None, :]
