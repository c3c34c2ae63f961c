"""The gated delta rule goes on from any state that was kept, bit for bit, and a tree's nodes follow their ancestors."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roost.layers.gated_delta import (
    NOT_KEPT,
    DeltaShape,
    DeltaWeights,
    Recurrence,
    Replay,
    gated_delta,
    whole_sequences,
)
from roost.layers.rounds import Pages
from tests.support.segments import make_segments

SHAPE = DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=8, value_dim=6, conv_len=4)
LENGTH = 23


def _weights(dtype: torch.dtype = torch.float32) -> DeltaWeights:
    generator = torch.Generator().manual_seed(2)
    return DeltaWeights(
        shape=SHAPE,
        conv=torch.randn(SHAPE.conv_len, SHAPE.num_channels, generator=generator).to(dtype),
        decay=-torch.rand(SHAPE.num_value_heads, generator=generator),
        forget_bias=torch.randn(SHAPE.num_value_heads, generator=generator),
    )


def _inputs(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(LENGTH, SHAPE.input_len, generator=torch.Generator().manual_seed(3)).to(dtype)


def _whole(inputs: Tensor) -> Tensor:
    weights = _weights(inputs.dtype)
    return gated_delta(inputs, weights, whole_sequences(torch.tensor([len(inputs)]), SHAPE, inputs.dtype))


def _empty(dtype: torch.dtype) -> Recurrence:
    """A row with a page of slots for its inputs, and three pages of states, the first of nothing."""
    at = whole_sequences(torch.tensor([1]), SHAPE, dtype)
    return replace(
        at,
        inputs=torch.full((2 * LENGTH, SHAPE.input_len), torch.nan, dtype=dtype),
        states=torch.cat([at.states, torch.full_like(at.states, torch.nan).repeat(2, 1, 1, 1)]),
        tails=torch.cat([at.tails, torch.full_like(at.tails, torch.nan).repeat(2, 1, 1)]),
    )


def _step(at: Recurrence, inputs: Tensor, start: int, *, source: tuple[int, int], kept: tuple[int, int]) -> Tensor:
    """Run inputs at positions from `start` on; `source` and `kept` are a page and its position."""
    column = torch.tensor([0])
    replay = Replay(
        segments=make_segments([0], [start], [len(inputs)], are_rounds=False),
        slots=LENGTH + start + torch.arange(len(inputs)),
        pages=Pages(table=torch.tensor([[1]], dtype=torch.int32), size=LENGTH),
        sources=column + source[0],
        starts=column + source[1],
        replayed_max=LENGTH,
        kept_at=torch.tensor([[kept[1], NOT_KEPT]]),
        kept_in=torch.tensor([[kept[0], 0]]),
    )
    return gated_delta(inputs, _weights(inputs.dtype), replace(at, replay=replay))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kept_at", "cut"), [(1, 2), (3, 3), (5, 9), (9, 9), (16, 22)])
def test_a_text_that_is_cut_anywhere_says_the_same_bits(dtype: torch.dtype, kept_at: int, cut: int) -> None:
    inputs = _inputs(dtype)
    expected, at = _whole(inputs), _empty(dtype)
    first = _step(at, inputs[:cut], 0, source=(0, 0), kept=(1, kept_at))
    second = _step(at, inputs[cut:], cut, source=(1, kept_at), kept=(2, LENGTH))
    assert torch.equal(torch.cat([first, second]), expected)


def test_a_state_may_be_kept_among_inputs_that_are_run_again() -> None:
    inputs = _inputs()
    at = _empty(inputs.dtype)
    _step(at, inputs[:10], 0, source=(0, 0), kept=(1, 4))
    _step(at, inputs[10:12], 10, source=(1, 4), kept=(2, 8))
    again = _empty(inputs.dtype)
    _step(again, inputs[:8], 0, source=(0, 0), kept=(2, 8))
    assert torch.equal(at.states[2], again.states[2])
    assert torch.equal(at.tails[2], again.tails[2])


def test_a_state_in_front_of_all_tokens_reads_zeros() -> None:
    inputs = _inputs()
    at = _empty(inputs.dtype)
    _step(at, inputs[:5], 0, source=(0, 0), kept=(1, 2))
    assert torch.equal(at.tails[1], torch.cat([torch.zeros(1, SHAPE.num_channels), inputs[:2, : SHAPE.num_channels]]))


def test_each_node_of_a_tree_follows_its_ancestors() -> None:
    inputs = _inputs()
    prefix, nodes = inputs[:6], inputs[6:11]
    parents = [-1, 0, 0, 1, 2]
    mask = torch.zeros(1, 5, 5, dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            mask[0, node] = mask[0, parent]
        mask[0, node, node] = True
    at = _empty(inputs.dtype)
    _step(at, prefix, 0, source=(0, 0), kept=(1, 4))
    replay = replace(
        at.replay,
        segments=make_segments([0], [6], [5], trees=(torch.tensor([[0, 1, 1, 2, 2]]), mask)),
        slots=LENGTH + 6 + torch.arange(5),
        pages=Pages(table=torch.tensor([[1]], dtype=torch.int32), size=LENGTH),
        sources=torch.tensor([1]),
        starts=torch.tensor([4]),
    )
    said = gated_delta(nodes, _weights(), replace(at, replay=replay))
    for node in range(5):
        path = torch.cat([prefix, nodes[mask[0, node, : node + 1].nonzero()[:, 0]]])
        assert torch.equal(said[node], _whole(path)[-1]), node
