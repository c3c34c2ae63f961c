"""The gated delta rule equals its reference, goes on from kept states bit for bit, and follows trees."""

import pytest
import torch

from roost.layers.gated_delta import DeltaShape
from tests.support.delta_batches import (
    SHAPES,
    assert_cuts_change_nothing,
    assert_slots_need_not_be_there,
    both,
    replay_of,
    trees_of,
)

kernel = pytest.importorskip("roost.kernels.gated_delta")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", [[1, 1, 1], [4, 2, 6], [3, 0, 1]])
def test_chunks_and_rounds(lens: list[int], shape: DeltaShape, dtype: torch.dtype, device: torch.device) -> None:
    ours, theirs = both(kernel.gated_delta, shape, dtype, replay_of([0, 7, 9], lens, device), sum(lens))
    for own, wanted in zip(ours, theirs, strict=True):
        tolerance = 1e-4 if own.dtype == torch.float32 else 0.02
        torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_node_of_a_tree_follows_its_ancestors(shape: DeltaShape, device: torch.device) -> None:
    ours, theirs = both(kernel.gated_delta, shape, torch.float32, *trees_of(device))
    for own, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_that_is_cut_anywhere_says_the_same_bits(shape: DeltaShape, device: torch.device) -> None:
    assert_cuts_change_nothing(kernel.gated_delta, shape, device)


@pytest.mark.parametrize("shape", SHAPES)
def test_of_a_chunk_most_inputs_have_no_slots(shape: DeltaShape, device: torch.device) -> None:
    assert_slots_need_not_be_there(kernel.gated_delta, shape, device)
