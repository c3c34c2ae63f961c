"""A mixture of experts: for each token the gated feed-forwards that its router picked, summed by their shares.

said(t) = sum over j: share[t, j] * down[e] @ (activation(gate[e] @ x[t]) * (up[e] @ x[t])), e = ids[t, j]; in float32
and rounded once between; each projection may add a bias. Of few tokens each (token, expert) has programs that read
that expert's weights once. Of many they are sorted by expert and cut into tiles of one expert for tensor cores: as many
programs as can be needed, so that shapes follow from the number of tokens and steps can be captured. The reference is
in `layers.experts`.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from roost.kernels.gated_activation import ACTIVATION_CODES, gated
from roost.kernels.routing import sort_by_expert
from roost.layers.experts import Experts, Routed

_FEW = 128  # pairs of token and expert up to which each is by itself, while they are no more than half the experts
_BLOCK_N, _BLOCK_K = 8, 512  # of few tokens
_TILE_M, _TILE_N, _TILE_K = 32, 64, 64  # of many
_SUM_BLOCK = 1024
_INTERPRETED = knobs.runtime.interpret


def mix_experts(normed: Tensor, routed: Routed, experts: Experts) -> Tensor:
    """What the experts of each token say of normed hidden states [num_tokens, hidden_size]."""
    assert experts.stacked is not None and normed.stride(1) == 1
    (gate_up, down), (gate_up_bias, down_bias) = experts.stacked, experts.biases or (None, None)
    (num_tokens, num_active), (num_experts, hidden, width) = routed.ids.shape, down.shape
    assert gate_up.shape == (num_experts, 2 * width, hidden) and gate_up.is_contiguous() and down.is_contiguous()
    assert all(bias.is_contiguous() for bias in experts.biases or ())
    output = normed.new_empty((num_tokens, hidden))
    if not num_tokens:
        return output
    ids, shares, num_pairs = routed.ids.contiguous(), routed.shares.contiguous(), num_tokens * num_active
    gated_pairs = normed.new_empty((num_pairs, width))
    sizes = {"HIDDEN": hidden, "WIDTH": width, "NUM_ACTIVE": num_active}
    activation = {"ACTIVATION": ACTIVATION_CODES[experts.activation]}
    said = normed.new_empty((num_pairs, hidden))
    if num_pairs <= min(_FEW, num_experts // 2):
        few = {**sizes, "BLOCK_N": _BLOCK_N, "BLOCK_K": _BLOCK_K, "num_warps": 4}
        _gate_up_of_pairs[(num_pairs, triton.cdiv(width, _BLOCK_N))](
            *(normed, normed.stride(0), gate_up, gate_up_bias, ids, gated_pairs), **few, **activation
        )
        _down_of_pairs[(num_pairs, triton.cdiv(hidden, _BLOCK_N))](*(gated_pairs, down, down_bias, ids, said), **few)
        return _summed(said, shares, output)
    pairs = sort_by_expert(ids.flatten(), num_experts)
    many = {"NUM_EXPERTS": num_experts, "TILE_M": _TILE_M, "TILE_N": _TILE_N, "TILE_K": _TILE_K, "num_warps": 4}
    many |= {"BLOCK_EXPERTS": triton.next_power_of_2(num_experts), "WIDE": _INTERPRETED}
    num_tiles = num_pairs // _TILE_M + min(num_experts, num_pairs)  # as many as there can be
    _gate_up_of_tiles[(num_tiles, triton.cdiv(width, _TILE_N))](
        *(normed, normed.stride(0), gate_up, gate_up_bias, *pairs, gated_pairs), **sizes, **many, **activation
    )
    _down_of_tiles[(num_tiles, triton.cdiv(hidden, _TILE_N))](
        *(gated_pairs, down, down_bias, *pairs, said), HIDDEN=hidden, WIDTH=width, **many
    )
    return _summed(said, shares, output)


def _summed(said: Tensor, shares: Tensor, output: Tensor) -> Tensor:
    """What the experts of a token say, in the order of their shares."""
    (num_tokens, hidden), num_active = output.shape, shares.shape[1]
    _sum_by_shares[(num_tokens, triton.cdiv(hidden, _SUM_BLOCK))](
        *(said, shares, output), HIDDEN=hidden, NUM_ACTIVE=num_active, BLOCK=_SUM_BLOCK, num_warps=4
    )
    return output


@triton.jit
def _gate_up_of_pairs(
    normed,  # [num_tokens, HIDDEN]
    token_stride,
    weight,  # [num_experts, 2 * WIDTH, HIDDEN]
    bias,  # [num_experts, 2 * WIDTH]; None: there is none
    ids,  # [num_tokens, NUM_ACTIVE]
    output,  # [num_tokens * NUM_ACTIVE, WIDTH]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids + pair)
    own = weight + expert * (2 * WIDTH * HIDDEN)
    token = normed + pair // NUM_ACTIVE * token_stride
    gate = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    up = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, HIDDEN, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(token + k, mask=k < HIDDEN, other=0.0).to(tl.float32)[None, :]
        cells = row.to(tl.int64)[:, None] * HIDDEN + k[None, :]
        is_in = (row < WIDTH)[:, None] & (k < HIDDEN)[None, :]
        gate += tl.load(own + cells, mask=is_in, other=0.0).to(tl.float32) * x
        up += tl.load(own + WIDTH * HIDDEN + cells, mask=is_in, other=0.0).to(tl.float32) * x
    gates, ups = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        added = bias + expert * (2 * WIDTH) + row
        gates += tl.load(added, mask=row < WIDTH, other=0.0).to(tl.float32)
        ups += tl.load(added + WIDTH, mask=row < WIDTH, other=0.0).to(tl.float32)
    product = gated(gates, ups, ACTIVATION)
    tl.store(output + pair * WIDTH + row, product.to(output.dtype.element_ty), mask=row < WIDTH)


@triton.jit
def _down_of_pairs(
    inputs,  # [num_tokens * NUM_ACTIVE, WIDTH]
    weight,  # [num_experts, HIDDEN, WIDTH]
    bias,  # [num_experts, HIDDEN]; None: there is none
    ids,  # [num_tokens, NUM_ACTIVE]
    said,  # [num_tokens * NUM_ACTIVE, HIDDEN]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    pair, row = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    expert = tl.load(ids + pair)
    own = weight + expert * (HIDDEN * WIDTH)
    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, WIDTH, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        x = tl.load(inputs + pair * WIDTH + k, mask=k < WIDTH, other=0.0).to(tl.float32)[None, :]
        cells = row.to(tl.int64)[:, None] * WIDTH + k[None, :]
        is_in = (row < HIDDEN)[:, None] & (k < WIDTH)[None, :]
        sums += tl.load(own + cells, mask=is_in, other=0.0).to(tl.float32) * x
    total = tl.sum(sums, 1)
    if bias is not None:
        total += tl.load(bias + expert * HIDDEN + row, mask=row < HIDDEN, other=0.0).to(tl.float32)
    tl.store(said + pair * HIDDEN + row, total.to(said.dtype.element_ty), mask=row < HIDDEN)


@triton.jit
def _gate_up_of_tiles(
    normed,  # [num_tokens, HIDDEN]
    token_stride,
    weight,  # [NUM_EXPERTS, 2 * WIDTH, HIDDEN]
    bias,  # [NUM_EXPERTS, 2 * WIDTH]; None: there is none
    pairs,  # [num_pairs] in the order of their experts
    ends,  # [NUM_EXPERTS]
    output,  # [num_pairs, WIDTH]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no product of bfloat16
):
    expert, pair, is_pair = _pairs_of_tile(pairs, ends, NUM_EXPERTS, BLOCK_EXPERTS, TILE_M)
    if expert >= NUM_EXPERTS:
        return
    row = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    own, tokens = weight + expert * (2 * WIDTH * HIDDEN), normed + (pair // NUM_ACTIVE)[:, None] * token_stride
    gate = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    up = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in tl.range(0, HIDDEN, TILE_K):
        k = start + tl.arange(0, TILE_K)
        x = tl.load(tokens + k[None, :], mask=is_pair[:, None] & (k < HIDDEN)[None, :], other=0.0)
        cells = row.to(tl.int64)[None, :] * HIDDEN + k[:, None]
        is_in = (row < WIDTH)[None, :] & (k < HIDDEN)[:, None]
        w = tl.load(own + cells, mask=is_in, other=0.0)
        w_up = tl.load(own + WIDTH * HIDDEN + cells, mask=is_in, other=0.0)
        if WIDE:
            x, w, w_up = x.to(tl.float32), w.to(tl.float32), w_up.to(tl.float32)
        gate = tl.dot(x, w, gate, input_precision="ieee")
        up = tl.dot(x, w_up, up, input_precision="ieee")
    if bias is not None:
        added = bias + expert * (2 * WIDTH) + row
        gate += tl.load(added, mask=row < WIDTH, other=0.0).to(tl.float32)[None, :]
        up += tl.load(added + WIDTH, mask=row < WIDTH, other=0.0).to(tl.float32)[None, :]
    product = gated(gate, up, ACTIVATION).to(output.dtype.element_ty)
    tl.store(output + pair[:, None] * WIDTH + row[None, :], product, mask=is_pair[:, None] & (row < WIDTH)[None, :])


@triton.jit
def _pairs_of_tile(pairs, ends, NUM_EXPERTS: tl.constexpr, BLOCK_EXPERTS: tl.constexpr, TILE_M: tl.constexpr):
    """The expert of this program's tile, its pairs, and which of them there are; an expert too many is none."""
    tile, each = tl.program_id(0), tl.arange(0, BLOCK_EXPERTS)
    end = tl.load(ends + each, mask=each < NUM_EXPERTS, other=0)
    begin = tl.load(ends + each - 1, mask=(each > 0) & (each < NUM_EXPERTS), other=0)
    num_tiles = tl.where(each < NUM_EXPERTS, (end - begin + TILE_M - 1) // TILE_M, 0)
    tile_end = tl.cumsum(num_tiles, 0)
    expert = tl.sum(((tile_end <= tile) & (each < NUM_EXPERTS)).to(tl.int32))
    first = tl.sum(tl.where(each == expert, begin + (tile - tile_end + num_tiles) * TILE_M, 0))
    place = first + tl.arange(0, TILE_M)
    is_pair = place < tl.sum(tl.where(each == expert, end, 0))
    return expert.to(tl.int64), tl.load(pairs + place, mask=is_pair, other=0), is_pair


@triton.jit
def _down_of_tiles(
    inputs,  # [num_pairs, WIDTH]
    weight,  # [NUM_EXPERTS, HIDDEN, WIDTH]
    bias,  # [NUM_EXPERTS, HIDDEN]; None: there is none
    pairs,  # [num_pairs] in the order of their experts
    ends,  # [NUM_EXPERTS]
    said,  # [num_pairs, HIDDEN]
    HIDDEN: tl.constexpr,
    WIDTH: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    TILE_K: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr,
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no product of bfloat16
):
    expert, pair, is_pair = _pairs_of_tile(pairs, ends, NUM_EXPERTS, BLOCK_EXPERTS, TILE_M)
    if expert >= NUM_EXPERTS:
        return
    row = tl.program_id(1) * TILE_N + tl.arange(0, TILE_N)
    own, lines = weight + expert * (HIDDEN * WIDTH), inputs + pair[:, None] * WIDTH
    sums = tl.zeros((TILE_M, TILE_N), dtype=tl.float32)
    for start in tl.range(0, WIDTH, TILE_K):
        k = start + tl.arange(0, TILE_K)
        x = tl.load(lines + k[None, :], mask=is_pair[:, None] & (k < WIDTH)[None, :], other=0.0)
        cells = row.to(tl.int64)[None, :] * WIDTH + k[:, None]
        is_in = (row < HIDDEN)[None, :] & (k < WIDTH)[:, None]
        w = tl.load(own + cells, mask=is_in, other=0.0)
        if WIDE:
            x, w = x.to(tl.float32), w.to(tl.float32)
        sums = tl.dot(x, w, sums, input_precision="ieee")
    if bias is not None:
        sums += tl.load(bias + expert * HIDDEN + row, mask=row < HIDDEN, other=0.0).to(tl.float32)[None, :]
    cells = said + pair[:, None] * HIDDEN + row[None, :]
    tl.store(cells, sums.to(said.dtype.element_ty), mask=is_pair[:, None] & (row < HIDDEN)[None, :])


@triton.jit
def _sum_by_shares(
    said,  # [num_tokens * NUM_ACTIVE, HIDDEN]
    shares,  # [num_tokens, NUM_ACTIVE]
    output,  # [num_tokens, HIDDEN]
    HIDDEN: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.range(0, NUM_ACTIVE):
        pair = token * NUM_ACTIVE + place
        value = tl.load(said + pair * HIDDEN + column, mask=column < HIDDEN, other=0.0)
        total += tl.load(shares + pair).to(tl.float32) * value.to(tl.float32)
    tl.store(output + token * HIDDEN + column, total.to(output.dtype.element_ty), mask=column < HIDDEN)
