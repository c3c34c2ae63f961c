"""The two halves of a step: what they leave on the device for the next one, and for the padding row."""

import numpy as np
import pytest
import torch

from roost.device.cpu import CpuDevice
from roost.forward.layout import StepLayout, chunk_columns, plan_layout
from roost.forward.passes import Passes
from tests.support.step_plans import PAGES, Row, SuccessorModel, plan_of, small

SHAPE = small().spec


def passes(model: SuccessorModel) -> Passes:
    return Passes(model, small(), CpuDevice(), None)


def laid_out(made: Passes, rows: list[Row], step: int = 0) -> StepLayout:
    """The layout of a plan, sent, and the rows' tables brought up to date."""
    plan = plan_of(rows, SHAPE, step)
    made.tables[0].apply(plan.deltas[0])
    layout = plan_layout(plan)
    chunks = {} if layout.is_rounds else chunk_columns(plan, layout, has_drafter=False)
    layout.lay_out(has_drafter=False, tile_len_max=16, chunks=chunks).send(CpuDevice())
    starts = np.where(plan.is_prefill, plan.start_positions, made.lengths.device.numpy()[plan.rows])
    return layout.at(torch.tensor(plan.rows, dtype=torch.int64), plan.rows, starts)


@torch.inference_mode()
def ran(made: Passes, rows: list[Row], step: int = 0) -> torch.Tensor:
    layout = laid_out(made, rows, step)
    target = made.draft_and_forward(layout)
    return made.accept_and_extend(layout, target, target.logits.argmax(dim=1))[1]


def test_lengths_and_last_tokens_by_row_are_what_the_next_step_starts_from() -> None:
    made = passes(SuccessorModel())
    rows = [
        Row(row=0, tokens=(3, 4), start=0, begins=True),
        Row(row=2, tokens=(6, 7, 8), start=0, is_final=False, begins=True),
    ]
    assert ran(made, rows).tolist() == [[1, 2, 5], [0, 3, 0]]  # tokens added, length, the tokens
    assert made.lengths.device[[0, 2]].tolist() == [2, 3] and int(made.last_tokens[0]) == 5
    assert ran(made, [Row(row=0)], 1).tolist() == [[1, 3, 6]]  # from the device's own numbers
    assert ran(made, [Row(row=2, tokens=(9,), start=3)], 2).tolist() == [[1, 4, 10]]


def test_keys_and_values_go_to_the_slots_of_the_rows_pages() -> None:
    made = passes(SuccessorModel())
    ran(made, [Row(row=1, tokens=(5, 6, 7, 8, 9), start=0, begins=True)])
    (cache,) = made.kv_caches
    first = (PAGES + 1) * cache.table.page_size  # the first page of row 1
    assert cache.values[0, first : first + 5, 0, 0].tolist() == [5, 6, 7, 8, 9]


def test_the_padding_row_has_no_length_and_writes_to_the_null_page() -> None:
    made = passes(SuccessorModel())
    (cache,) = made.kv_caches
    cache.values.zero_()
    row = Row(row=made.padding_row, tokens=(4, 4), start=0)
    for step in range(3):
        assert ran(made, [row], step)[0, 1] == 0
    assert int(made.lengths.device[made.padding_row]) == 0
    assert not cache.values[0, cache.table.page_size :].any() and cache.values[0, :2].any()


def test_a_pass_that_breaks_leaves_lengths_and_last_tokens_as_they_were() -> None:
    model = SuccessorModel()
    made = passes(model)
    ran(made, [Row(row=0, tokens=(3, 4), start=0, begins=True)])
    model.breaks = True
    with pytest.raises(RuntimeError, match="as the test wants it"):
        ran(made, [Row(row=0)], 1)
    assert int(made.lengths.device[0]) == 2 and int(made.last_tokens[0]) == 5
    model.breaks = False
    assert ran(made, [Row(row=0)], 2).tolist() == [[1, 3, 6]]
