"""The columns of a graph of chunks and rounds: what a step says, then padding, whatever was there before."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.forward.layout import StepLayout, chunk_columns, plan_layout
from roost.graphs.mixed import PaddedColumns
from roost.spec_shape import DraftKv, SpecShape
from roost.step import StepPlan
from tests.support.step_plans import ROUND, Row, plan_of

TILE_LEN = 16
PADDING_ROW = 99
NUM_TOKENS, NUM_ROWS = 48, 9  # the last is the padding row
SHAPE = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)


@st.composite
def plans(draw: st.DrawFn) -> StepPlan:
    """Chunks, final or not, and rounds of one width, in any order; at least one chunk."""
    width, rows, num_left = draw(st.integers(1, 4)), [], NUM_TOKENS
    for number in draw(st.permutations(range(NUM_ROWS - 1)))[: draw(st.integers(1, NUM_ROWS - 1))]:
        if rows and (draw(st.booleans()) or not num_left):
            if num_left >= width:
                rows.append(Row(row=number, width=width, device_len_max=30, start=ROUND))
                num_left -= width
            continue
        length = draw(st.integers(1, num_left))
        tokens, is_final = tuple(range(1, length + 1)), draw(st.booleans())
        rows.append(Row(row=number, tokens=tokens, start=draw(st.integers(0, 9)), is_final=is_final))
        num_left -= length
    return plan_of(rows, SHAPE)


def laid_out(plan: StepPlan) -> StepLayout:
    layout = plan_layout(plan, SHAPE.tokens)
    chunks = chunk_columns(plan, layout, has_drafter=True)
    return layout.lay_out(has_drafter=True, tile_len_max=TILE_LEN, chunks=chunks)


def kept(columns: PaddedColumns, plan: StepPlan) -> dict[str, np.ndarray]:
    """The columns as a graph gets them."""
    packed = torch.tensor(columns.packed(laid_out(plan).columns | {"rows": plan.rows}))
    return {name: part.numpy() for name, part in columns.unpacked(packed).items()}


def empty() -> PaddedColumns:
    return PaddedColumns(NUM_TOKENS, NUM_ROWS, SHAPE.tokens, TILE_LEN, PADDING_ROW)


@given(plans(), plans())
def test_a_step_finds_nothing_of_the_one_before_it(before: StepPlan, plan: StepPlan) -> None:
    used = empty()
    kept(used, before)
    found, fresh = kept(used, plan), kept(empty(), plan)
    assert found.keys() == fresh.keys()
    for name, column in found.items():
        assert column.tolist() == fresh[name].tolist(), name


@given(plans())
def test_what_a_step_leaves_empty_is_the_padding_rows_and_none_of_its_nodes(plan: StepPlan) -> None:
    layout, found = laid_out(plan), kept(empty(), plan)
    num_tokens, num_pairs = int(layout.query_lens.sum()), int(layout.num_pairs.sum())
    for name, column in layout.columns.items():
        if name in found:
            assert found[name][: len(column)].tolist() == column.tolist(), name
    rows = found["rows"]
    assert rows[: len(plan.rows)].tolist() == plan.rows.tolist() and (rows[len(plan.rows) :] == PADDING_ROW).all()
    for what, number in (("token", num_tokens), ("pair", num_pairs)):
        assert (rows[found[f"{what}_segment"][number:]] == PADDING_ROW).all()
        assert (found[f"{what}_index"][number:] == 0).all() and (found[f"{what}_cells"][number:] == -1).all()
    assert (rows[found["sampling"][len(layout.sampling) :]] == PADDING_ROW).all()
    padding_cell = found["node_cells"][int(layout.num_nodes.sum()) :] // SHAPE.tokens
    assert (padding_cell >= len(layout.sampling)).all()
    for batch in ("tokens", "pairs"):
        assert (found[f"{batch}.query_lens"][len(plan.rows) :] == 0).all()
        assert (found[f"{batch}.tile_segments"] < len(plan.rows)).all()


@given(plans())
def test_every_token_is_the_hosts_or_a_node_of_a_round(plan: StepPlan) -> None:
    found, sampling = laid_out(plan).columns, np.flatnonzero(plan.is_final | ~plan.is_prefill).tolist()
    offset = 0
    for row, (is_chunk, length) in enumerate(zip(plan.is_prefill, plan.query_lens.tolist(), strict=True)):
        cells = found["token_cells"][offset : offset + length].tolist()
        if is_chunk:
            own = plan.tokens[plan.token_offsets[row] : plan.token_offsets[row + 1]]
            assert cells == [-1] * length and found["chunk_tokens"][offset : offset + length].tolist() == own.tolist()
        else:
            first = sampling.index(row) * SHAPE.tokens
            assert cells == list(range(first, first + length))
        offset += length


@given(plans())
def test_a_pair_ends_in_what_the_host_says_or_in_what_its_row_accepts(plan: StepPlan) -> None:
    layout = laid_out(plan)
    found, sampling = layout.columns, layout.sampling.tolist()
    first = source = 0
    for row, (is_chunk, length) in enumerate(zip(plan.is_prefill, plan.query_lens.tolist(), strict=True)):
        pairs = slice(first, first + length)  # of a chain: as many as tokens
        cells, sources = found["pair_cells"][pairs].tolist(), found["pair_sources"][pairs].tolist()
        if is_chunk:
            assert cells[:-1] == [-1] * (length - 1) and sources == list(range(source, source + length))
            assert cells[-1] == (sampling.index(row) * SHAPE.accept_max if plan.is_final[row] else -1)
            own = plan.tokens[plan.token_offsets[row] : plan.token_offsets[row + 1]].tolist()
            assert found["successors"][pairs].tolist()[:-1] == own[1:]
        else:
            cell = sampling.index(row) * SHAPE.accept_max
            assert cells == list(range(cell, cell + length)) and sources == [source] * length
        first, source = first + length, source + length
