"""Failure mode 7: what rounds need in each buffer is stated once, with widths that are never confused."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.attention.kv_cache import PageTable
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.device.cpu import CpuDevice
from roost.drafters.eagle import DraftBranches
from roost.errors import InvariantError
from roost.forward.layout import StepLayout, chunks_layout, rounds_layout
from roost.graph_sizes import batch_sizes, chunk_sizes
from roost.graphs.buffers import BufferSizes, check_fits, round_sizes
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from tests.support.segments import make_segments
from tests.support.spec_configs import spec_config

TILE_LEN = 16
TREE = SpecShape(steps=5, topk=4, tokens=9, draft_kv=DraftKv.PAIR)  # S, K, T, S + 1 all differ
CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
NGRAM = SpecShape(steps=3, topk=1, tokens=4, reads_history=True)


def test_07_every_buffer_of_a_tree_has_its_own_width() -> None:
    assert round_sizes(7, TREE.tokens, TREE, 16) == BufferSizes(
        rows=7,
        nodes=7 * 9,
        mask=7 * 9 * 9,
        drafts=7 * 4,
        moves=7 * 4 * 3,
        tails=7 * 3 * 16,
        pairs=7 * 6,
        accepted=7 * 6,
    )


def test_07_a_round_without_drafts_needs_one_of_each() -> None:
    for shape in (PLAIN, CHAIN, TREE, NGRAM):
        sizes = round_sizes(5, 1, shape, 16)
        assert (sizes.nodes, sizes.pairs, sizes.accepted) == (5, 5, 5)
        assert (sizes.mask, sizes.drafts, sizes.moves, sizes.tails) == (0, 0, 0, 0)


@pytest.mark.parametrize("shape", [PLAIN, NGRAM, CHAIN, TREE], ids=["plain", "ngram", "chain", "tree"])
@pytest.mark.parametrize("number", [1, 3, 8])
def test_07_layouts_are_as_large_as_stated(shape: SpecShape, number: int) -> None:
    sizes = round_sizes(number, shape.tokens, shape, 16)
    layout = rounds_layout(number, shape.tokens, shape).lay_out(has_drafter=True, tile_len_max=TILE_LEN)
    layout.send(CpuDevice())
    assert len(layout["token_segment"]) == len(layout["node_tokens"]) == sizes.nodes
    assert len(layout["pair_segment"]) == len(layout["accept_cells"]) == sizes.pairs
    assert len(layout["tokens.query_lens"]) == sizes.rows


@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_07_moves_and_tails_are_as_large_as_stated(page_size: int) -> None:
    config = EngineConfig(
        memory=MemoryConfig(page_size=page_size, pool_tokens=10**6),
        sched=SchedConfig(context=600, max_running=3, overlap=False),
        spec=spec_config(TREE),
    )
    table = PageTable(resolve(config, ModelTraits(vocab_size=9)), 0, CpuDevice())
    rounds = make_segments([0, 1, 2], [1, 63, 130])
    branches, sizes = DraftBranches(rounds, TREE, table), round_sizes(3, TREE.tokens, TREE, page_size)
    beam = torch.zeros(3, TREE.topk, dtype=torch.int64)
    assert branches.moves(beam, TREE.steps - 2)[0].numel() == sizes.moves
    assert page_size == 1 or branches.tail_copies()[0].numel() == sizes.tails
    assert branches.slots(0).numel() == len(branches.segments(0).rows) == sizes.drafts


def test_a_launch_that_does_not_fit_is_refused_with_the_numbers() -> None:
    held = round_sizes(4, TREE.tokens, TREE, 16)
    check_fits(round_sizes(3, TREE.tokens, TREE, 16), held, "a round")
    with pytest.raises(InvariantError) as refused:
        check_fits(round_sizes(5, TREE.tokens, TREE, 16), held, "a graph of 4 rounds")
    assert str(refused.value) == "a graph of 4 rounds: rows needs 5 entries and the buffer holds 4"


@pytest.mark.parametrize("most", [1, 2, 3, 8, 20, 64, 65, 200, 256, 300, 1000])
def test_captured_batches_rise_to_the_largest_there_can_be(most: int) -> None:
    sizes = batch_sizes(most)
    assert sizes[-1] == most and sizes == sorted(set(sizes))
    assert all(after <= 2 * before for before, after in pairwise(sizes))


@pytest.mark.parametrize("chunk", [1, 5, 16, 17, 20, 100, 512, 2048, 3000])
def test_captured_chunks_rise_to_the_largest_there_can_be(chunk: int) -> None:
    sizes = chunk_sizes(chunk, 64, 8192, TILE_LEN)
    tokens = [size.tokens for size in sizes]
    assert tokens[-1] == chunk and tokens == sorted(set(tokens))
    assert all(after + 1 <= max(2 * TILE_LEN, (before + 1) * 3 // 2 + 1) for before, after in pairwise(tokens))
    assert all(size.num_tokens % TILE_LEN == 0 for size in sizes[:-1])
    assert all(1 <= size.chunks <= 64 for size in sizes)


def test_captured_chunks_are_shorter_than_a_row() -> None:
    assert max(size.tokens for size in chunk_sizes(512, 64, 128, TILE_LEN)) < 128


@given(st.data())
def test_padded_chunks_fill_every_buffer_as_captured_and_only_final_ones_sample(data: st.DataObject) -> None:
    size = data.draw(st.sampled_from(chunk_sizes(200, 8, 8192, TILE_LEN)))
    widths: list[int] = []
    while size.holds(len(widths) + 1, sum(widths) + 1) and data.draw(st.booleans()):
        widths.append(data.draw(st.integers(1, size.tokens - sum(widths))))
    is_final = np.array(data.draw(st.lists(st.booleans(), min_size=len(widths), max_size=len(widths))), dtype=np.bool_)

    def laid_out(widths: list[int], is_final: np.ndarray) -> StepLayout:
        layout = chunks_layout(np.array(widths, dtype=np.int64), is_final, size, CHAIN)
        layout.lay_out(has_drafter=True, tile_len_max=TILE_LEN, num_tiles=size.num_tiles).send(CpuDevice())
        return layout

    empty, layout = laid_out([], np.zeros(0, dtype=np.bool_)), laid_out(widths, is_final)
    assert {name: column.shape for name, column in layout.columns.items()} == {
        name: column.shape for name, column in empty.columns.items()
    }
    finals = np.flatnonzero(is_final).tolist()
    assert layout.query_lens[: len(widths)].tolist() == widths and layout.query_lens.sum() == size.num_tokens
    assert not layout.query_lens[len(widths) : -1].any() and 1 <= layout.query_lens[-1] <= size.tokens + 1
    assert layout.sampling.tolist() == finals + [size.num_rows - 1] * (size.num_rows - len(finals))
    lasts = np.cumsum(layout.query_lens)[finals] - 1
    assert (
        layout["accept_pairs"][: len(finals)].tolist()
        == layout["node_tokens"][: len(finals)].tolist()
        == lasts.tolist()
    )
    assert (
        layout["accept_pairs"][len(finals) :] >= sum(widths)
    ).all()  # no pair of a chunk that is not final is touched
    spans, firsts = (layout[f"tokens.{name}"].tolist() for name in ("tile_segments", "tile_offsets"))
    live = [(span, first) for span, first in zip(spans, firsts, strict=True) if span >= 0]
    covered = [(span, first + number) for span, first in live for number in range(TILE_LEN)]
    kept = [(span, token) for span, token in covered if token < layout.query_lens[span]]
    assert kept == [(span, token) for span, width in enumerate(layout.query_lens.tolist()) for token in range(width)]
