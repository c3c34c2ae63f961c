"""Gated delta rule: the recurrence of a linear-attention layer, token by token; the torch reference.

    S <- exp(g) S;  S <- S + k (beta (v - S^T k))^T;  said = S^T q        S: [key_dim, value_dim] of each head

Queries, keys and values have come through a short convolution, queries and keys are of length one. A row goes on from a
state that was kept, runs the inputs behind it again, and then its own tokens. All of them are folded by one operation,
one token after the other, so that a state's bits do not depend on how a text was cut. Called by models, through `Ops`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from roost.layers.convolution import convolution
from roost.layers.rounds import Pages
from roost.layers.segments import Segments

NOT_KEPT = -1  # in place of a position
NORM_EPS = 1e-6  # of the length of queries and keys, as checkpoints were trained with
# What comes before the state is computed in: torch rounds a float32 differently by its place among others, which does
# not show behind this.
_WIDE = torch.float64


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """Sizes of one layer's recurrence. A query or key head serves a run of consecutive value heads."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int  # of a head
    value_dim: int
    conv_len: int  # tokens that the convolution reads, the current one included

    @property
    def key_len(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_len(self) -> int:
        """Numbers of its values."""
        return self.num_value_heads * self.value_dim

    @property
    def num_channels(self) -> int:
        """Of the convolution: queries, keys and values of a token."""
        return 2 * self.key_len + self.value_len

    @property
    def input_len(self) -> int:
        """Numbers of a token that the recurrence reads: those, then how much to forget and to learn, head by head."""
        return self.num_channels + 2 * self.num_value_heads

    @property
    def projected_len(self) -> int:
        """Numbers of a token that are projected in front of it: those, and the gate behind it."""
        return self.input_len + self.value_len

    def state_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of a state of one layer, whose inputs have this type."""
        matrices = self.num_value_heads * self.key_dim * self.value_dim * torch.float32.itemsize
        return matrices + (self.conv_len - 1) * self.num_channels * dtype.itemsize


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaWeights:
    """What a layer's recurrence has learned."""

    shape: DeltaShape
    conv: Tensor  # [conv_len, num_channels], the current token last; of the inputs' type
    decay: Tensor  # [num_value_heads] float32, below zero
    forget_bias: Tensor  # [num_value_heads] float32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Replay:
    """What the rows of a pass go on from, and what they keep; the same for all layers."""

    segments: Segments
    slots: Tensor  # [num_tokens] where the inputs of each token go
    pages: Pages  # of the book of inputs
    sources: Tensor  # [num_segments] page of the state that each row starts from
    starts: Tensor  # [num_segments] its position: inputs from there on lie in slots
    replayed_max: int  # of them, in front of a row's own tokens
    kept_at: Tensor  # [num_segments, n] positions past it at which the state is kept; NOT_KEPT: none
    kept_in: Tensor  # [num_segments, n] pages for them


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Recurrence:
    """One layer's inputs and states, and what a pass does with them."""

    replay: Replay
    inputs: Tensor  # [num_slots, input_len]
    states: Tensor  # [num_pages, num_value_heads, key_dim, value_dim] float32
    tails: Tensor  # [num_pages, conv_len - 1, num_channels] what the convolution reads from in front of a state


@runtime_checkable
class Recurs(Protocol):
    """A pass's way to the states of recurrent layers."""

    def recurrence(self, layer: int, inputs: Tensor) -> Recurrence:
        """That of a layer, for the inputs [num_tokens, input_len] of the pass."""
        ...


def gated_delta(inputs: Tensor, weights: DeltaWeights, at: Recurrence) -> Tensor:
    """What the heads [num_tokens, num_value_heads, value_dim] say of inputs [num_tokens, input_len], row by row.

    The inputs go to their slots, and states at the positions that a row names to their pages.
    """
    replay, segments, shape = at.replay, at.replay.segments, weights.shape
    at.inputs.index_copy_(0, replay.slots, inputs)
    said = inputs.new_empty((len(inputs), shape.num_value_heads, shape.value_dim))
    columns = (segments.rows, segments.offsets, segments.query_lens, segments.start_positions)
    for number, (row, offset, length, start) in enumerate(torch.stack(columns, dim=1).tolist()):
        source, first = int(replay.sources[number]), int(replay.starts[number])
        places = torch.arange(first, start, device=inputs.device)
        before = at.inputs[replay.pages.slots(torch.full_like(places, row), places)]
        pairs = zip(replay.kept_at[number].tolist(), replay.kept_in[number].tolist(), strict=True)
        kept = {place - first: page for place, page in pairs if place != NOT_KEPT}
        for path, num_new in _paths(segments, number, length):
            tokens = offset + path
            outputs = _fold(torch.cat([before, inputs[tokens]]), weights, at, source, kept)
            said[tokens[-num_new:]] = outputs[-num_new:].to(said.dtype)
    return said


def _paths(segments: Segments, number: int, length: int) -> Iterator[tuple[Tensor, int]]:
    """Tokens of a segment that follow one another, and how many of them, at the end, nobody has had before.

    All of them at once, if there are any; of a tree each node with its ancestors.
    """
    tree = -1 if segments.tree_of is None else int(segments.tree_of[number])
    if tree < 0 or segments.tree_mask is None:
        if length:
            yield torch.arange(length, device=segments.rows.device), length
        return
    for node in range(length):
        yield segments.tree_mask[tree, node, : node + 1].nonzero()[:, 0], 1


def _fold(inputs: Tensor, weights: DeltaWeights, at: Recurrence, source: int, kept: Mapping[int, int]) -> Tensor:
    """Fold inputs [n, input_len] into a state, one after the other: what the heads say after each, in float32.

    `kept`: after how many the state goes to which page.
    """
    num_channels, num_before = weights.shape.num_channels, weights.shape.conv_len - 1
    state, channels = at.states[source], torch.cat([at.tails[source], inputs[:, :num_channels]])
    query, key, value = _convolved(channels, weights)
    forget, learn = inputs[:, num_channels:].to(_WIDE).chunk(2, dim=1)
    decay = (weights.decay * softplus(forget + weights.forget_bias)).exp().to(torch.float32)
    rate, said = learn.sigmoid().to(torch.float32), []
    for i in range(len(inputs)):
        state = state * decay[i, :, None, None]
        missing = value[i] - (key[i, :, :, None] * state).sum(dim=1)
        state = state + key[i, :, :, None] * (rate[i, :, None] * missing)[:, None]
        said.append((query[i, :, :, None] * state).sum(dim=1))
        if i + 1 in kept:
            at.states[kept[i + 1]] = state
            at.tails[kept[i + 1]] = channels[i + 1 : i + 1 + num_before]
    return torch.stack(said)


def _convolved(channels: Tensor, weights: DeltaWeights) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [n, num_value_heads, …] from channels [conv_len - 1 + n, num_channels]."""
    shape, num_before = weights.shape, weights.shape.conv_len - 1
    channels, conv = channels.to(_WIDE), weights.conv.t().to(_WIDE)
    mixed = silu(convolution(channels[num_before:], channels[:-1].unfold(0, num_before, 1).transpose(1, 2), conv))
    query, key, value = mixed.split((shape.key_len, shape.key_len, shape.value_len), dim=1)
    shares = shape.num_value_heads // shape.num_key_heads
    heads = (each.unflatten(1, (-1, shape.key_dim)).repeat_interleave(shares, dim=1) for each in (query, key))
    query, key = (each * (each.square().sum(dim=-1, keepdim=True) + NORM_EPS).rsqrt() for each in heads)
    found = query * shape.key_dim**-0.5, key, value.unflatten(1, (-1, shape.value_dim))
    return found[0].to(torch.float32), found[1].to(torch.float32), found[2].to(torch.float32)


def whole_sequences(lengths: Tensor, shape: DeltaShape, dtype: torch.dtype) -> Recurrence:
    """The recurrence of sequences of some lengths, one behind the other, of which nothing has run and nothing stays."""
    number, device, total = len(lengths), lengths.device, int(lengths.sum())
    zeros = lengths.new_zeros(number, dtype=torch.int64)
    nowhere = lengths.new_zeros((number, 0), dtype=torch.int64)
    column = zeros.to(torch.int32)
    segments = Segments(
        rows=zeros,
        start_positions=zeros,
        offsets=(lengths.cumsum(0) - lengths).to(torch.int32),
        query_lens=lengths.to(torch.int32),
        tile_segments=column,
        tile_offsets=column,
        tile_len=1,
    )
    replay = Replay(
        segments=segments,
        slots=torch.zeros(total, dtype=torch.int64, device=device),
        pages=Pages(table=column[:1, None], size=1),
        sources=zeros,
        starts=zeros,
        replayed_max=0,
        kept_at=nowhere,
        kept_in=nowhere,
    )
    inputs = torch.zeros((1, shape.input_len), dtype=dtype, device=device)
    nothing = (shape.num_value_heads, shape.key_dim, shape.value_dim)
    return Recurrence(
        replay=replay,
        inputs=inputs,
        states=torch.zeros((1, *nothing), dtype=torch.float32, device=device),
        tails=torch.zeros((1, shape.conv_len - 1, shape.num_channels), dtype=dtype, device=device),
    )
