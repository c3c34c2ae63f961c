"""The gated delta rule on a CPU equals its reference, whoever takes its pieces, and goes on bit for bit."""

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

ops = pytest.importorskip("roost.numba_kernels.ops", exc_type=ImportError)
CPU = torch.device("cpu")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("lens", [[1, 1, 1], [4, 2, 6], [3, 0, 1]])
def test_chunks_and_rounds(lens: list[int], shape: DeltaShape) -> None:
    replay = replay_of([0, 7, 9], lens, CPU)
    ours, theirs = both(ops.NUMBA_OPS.gated_delta, shape, torch.float32, replay, sum(lens))
    for own, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_node_of_a_tree_follows_its_ancestors(shape: DeltaShape) -> None:
    ours, theirs = both(ops.NUMBA_OPS.gated_delta, shape, torch.float32, *trees_of(CPU))
    for own, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_text_that_is_cut_anywhere_says_the_same_bits(shape: DeltaShape) -> None:
    assert_cuts_change_nothing(ops.NUMBA_OPS.gated_delta, shape, CPU)


@pytest.mark.parametrize("shape", SHAPES)
def test_of_a_chunk_most_inputs_have_no_slots(shape: DeltaShape) -> None:
    assert_slots_need_not_be_there(ops.NUMBA_OPS.gated_delta, shape, CPU)
