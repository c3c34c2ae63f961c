"""Failure mode 7: what rounds need in each buffer is stated once, with widths that are never confused."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from roost.attention.kv_cache import PageTable
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.device.cpu import CpuDevice
from roost.drafters.eagle import DraftBranches
from roost.errors import InvariantError
from roost.forward.layout import rounds_layout
from roost.graph_sizes import batch_sizes, mixed_sizes, step_tokens_max
from roost.graphs.buffers import BufferSizes, check_fits, round_sizes
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.spec_widths import Widths
from tests.support.segments import make_segments
from tests.support.spec_configs import spec_config

TILE_LEN = 16
TREE = SpecShape(steps=5, topk=4, tokens=9, draft_kv=DraftKv.PAIR)  # S, K, T, S + 1 all differ
CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
NGRAM = SpecShape(steps=3, topk=1, tokens=4, reads_history=True)


def test_07_every_buffer_of_a_tree_has_its_own_width() -> None:
    assert round_sizes(7, TREE.tokens, TREE) == BufferSizes(
        rows=7,
        nodes=7 * 9,
        mask=7 * 9 * 9,
        drafts=7 * 4,
        moves=7 * 4 * 3,
        pairs=7 * 6,
        accepted=7 * 6,
    )


def test_07_a_round_without_drafts_needs_one_of_each() -> None:
    for shape in (PLAIN, CHAIN, TREE, NGRAM):
        sizes = round_sizes(5, 1, shape)
        assert (sizes.nodes, sizes.pairs, sizes.accepted) == (5, 5, 5)
        assert (sizes.mask, sizes.drafts, sizes.moves) == (0, 0, 0)


@pytest.mark.parametrize("shape", [PLAIN, NGRAM, CHAIN, TREE], ids=["plain", "ngram", "chain", "tree"])
@pytest.mark.parametrize("number", [1, 3, 8])
def test_07_layouts_are_as_large_as_stated(shape: SpecShape, number: int) -> None:
    sizes = round_sizes(number, shape.tokens, shape)
    layout = rounds_layout(number, shape.tokens, shape).lay_out(has_drafter=True, tile_len_max=TILE_LEN)
    layout.send(CpuDevice())
    assert len(layout["token_segment"]) == len(layout["node_tokens"]) == sizes.nodes
    assert len(layout["pair_segment"]) == len(layout["pair_cells"]) == sizes.pairs
    assert len(layout["tokens.query_lens"]) == sizes.rows


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_07_moves_are_as_large_as_stated(page_size: int) -> None:
    config = EngineConfig(
        memory=MemoryConfig(page_size=page_size, pool_tokens=10**6),
        sched=SchedConfig(context=600, max_running=3, overlap=False),
        spec=spec_config(TREE),
    )
    table = PageTable(resolve(config, ModelTraits(vocab_size=9)), 0, CpuDevice())
    rounds = make_segments([0, 1, 2], [1, 63, 130])
    branches, sizes = DraftBranches(rounds, TREE, table), round_sizes(3, TREE.tokens, TREE)
    beam = torch.zeros(3, TREE.topk, dtype=torch.int64)
    assert branches.moves(beam, TREE.steps - 2)[0].numel() == sizes.moves
    assert branches.slots(0).numel() == len(branches.segments(0).rows) == sizes.drafts


def test_a_launch_that_does_not_fit_is_refused_with_the_numbers() -> None:
    held = round_sizes(4, TREE.tokens, TREE)
    check_fits(round_sizes(3, TREE.tokens, TREE), held, "a round")
    with pytest.raises(InvariantError) as refused:
        check_fits(round_sizes(5, TREE.tokens, TREE), held, "a graph of 4 rounds")
    assert str(refused.value) == "a graph of 4 rounds: rows needs 5 entries and the buffer holds 4"


@pytest.mark.parametrize("most", [1, 2, 3, 8, 20, 64, 65, 200, 256, 300, 1000])
def test_captured_batches_rise_to_the_largest_there_can_be(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(after <= 2 * before for before, after in pairwise(sizes))


@pytest.mark.parametrize("most", [1, 5, 16, 17, 100, 128, 129, 512, 2048, 2304, 3072, 4096])
def test_captured_steps_with_chunks_rise_to_the_largest_there_can_be(most: int) -> None:
    sizes = mixed_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(size % TILE_LEN == 0 for size in sizes[:-1])
    assert all(after - before <= before / 8 for before, after in pairwise(sizes) if before >= 128)


def test_steps_of_more_tokens_than_the_largest_graph_are_not_captured() -> None:
    assert mixed_sizes(4097) == mixed_sizes(10**6) == mixed_sizes(4096)


def test_a_step_has_room_for_all_rounds_beside_a_whole_chunk() -> None:
    plain, fixed = Widths(shape=PLAIN, is_auto=False, limit=None), Widths(shape=CHAIN, is_auto=False, limit=None)
    assert step_tokens_max(2048, plain, 64) == 2048 + 64
    assert step_tokens_max(2048, fixed, 64) == 2048 + 64 * 4
    assert step_tokens_max(512, replace(fixed, limit=8), 64) == 512 + 64  # more than 8 rounds carry no drafts
    chosen = Widths(shape=SpecShape(steps=6, topk=1, tokens=7), is_auto=True, limit=None)
    assert step_tokens_max(512, chosen, 64) == 512 + 64 * 5
