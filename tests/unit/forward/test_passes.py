"""The two halves of a step: what they leave on the device for the next one, and for the padding row."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.config.options import SpecConfig
from roost.config.resolved import Resolved
from roost.device.cpu import CpuDevice
from roost.drafters.protocol import Pairs
from roost.drafters.tree import Trees, chains
from roost.errors import InvariantError
from roost.forward.layout import StepLayout, chunk_columns, plan_layout
from roost.forward.passes import Passes
from roost.layers.rounds import NOTHING
from roost.layers.segments import Segments
from roost.spec_shape import SpecShape
from roost.step import RowSetup
from tests.support.step_plans import PAGES, Row, SuccessorModel, plan_of, small

SHAPE = small().spec


def passes(model: SuccessorModel, resolved: Resolved | None = None) -> Passes:
    return Passes(model, resolved or small(), CpuDevice(), None)


def laid_out(made: Passes, rows: list[Row], step: int = 0, shape: SpecShape = SHAPE) -> StepLayout:
    """The layout of a plan, sent, and the rows' tables brought up to date."""
    plan, has_drafter = plan_of(rows, shape, step), made.drafter is not None
    made.tables[0].apply(plan.deltas[0])
    layout = plan_layout(plan)
    chunks = {} if layout.is_rounds else chunk_columns(plan, layout, has_drafter=has_drafter)
    layout.lay_out(has_drafter=has_drafter, tile_len_max=16, chunks=chunks).send(CpuDevice())
    starts = np.where(plan.is_prefill, plan.start_positions, made.lengths.device.numpy()[plan.rows])
    return layout.at(torch.tensor(plan.rows, dtype=torch.int64), plan.rows, starts)


@torch.inference_mode()
def ran(made: Passes, rows: list[Row], step: int = 0, shape: SpecShape = SHAPE) -> Tensor:
    layout = laid_out(made, rows, step, shape)
    target = made.draft_and_forward(layout)
    drawn = torch.full_like(target.trees.tokens, NOTHING)
    drawn.view(-1)[layout["node_cells"]] = made.logits(layout, target).argmax(dim=1)
    return made.accept_and_extend(layout, target, drawn)[1]


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


def test_a_chunk_starts_where_the_host_says_whatever_length_its_row_had_before() -> None:
    made = passes(SuccessorModel())
    ran(made, [Row(row=0, tokens=(3, 4, 5, 6), start=0, begins=True)])
    assert ran(
        made, [Row(row=0, tokens=(7, 8), start=1), Row(row=1, tokens=(2,), start=0, begins=True)], 1
    ).tolist() == [
        [1, 3, 9],
        [1, 1, 3],
    ]
    (cache,) = made.kv_caches
    first = cache.table.page_size  # the first page of row 0
    assert cache.values[0, first : first + 4, 0, 0].tolist() == [3, 7, 8, 6]


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


SPEC = SpecConfig(spec="ngram", spec_steps=2)


class Careless:
    """A drafter that proposes what a test says, whatever it is asked for."""

    aux_layers: tuple[int, ...] = ()

    def __init__(self, trees: Trees) -> None:
        self._trees = trees

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Nothing."""

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """As it was told."""
        return self._trees

    def extend(self, pairs: Pairs) -> None:
        """Nothing."""


def drafted(*drafts: tuple[int, ...], are_chains: bool = True) -> Tensor:
    """Two rows whose last tokens are 3 and 7, in a round with such nodes."""
    resolved = small(SPEC)
    made = passes(SuccessorModel(), resolved)
    made.drafter = None
    rows = [Row(row=row, tokens=(token - 1,), start=0, begins=True) for row, token in ((0, 3), (1, 7))]
    ran(made, rows, shape=resolved.spec)
    trees = chains(torch.tensor(drafts))
    made.drafter = Careless(replace(trees, are_chains=are_chains))
    return ran(made, [Row(row=0, width=3), Row(row=1, width=3)], 1, resolved.spec)


def test_whatever_a_drafter_proposes_the_tokens_are_the_targets() -> None:
    right = drafted((3, 4, 5), (7, 8, 9))
    assert right[:, 0].tolist() == [3, 3] and right[:, 2:5].tolist() == [[4, 5, 6], [8, 9, 10]]
    wrong = drafted((3, 9, 9), (7, 8, NOTHING))
    assert wrong[:, 0].tolist() == [1, 2] and wrong[0, 2] == 4 and wrong[1, 2:4].tolist() == [8, 9]
    assert drafted((0, 4, 5), (0, 8, 9)).tolist() == right.tolist()  # node 0 is the root, whatever it says


@pytest.mark.parametrize(
    ("drafts", "are_chains", "reason"),
    [
        (((3, 4, 5, 6), (7, 8, 9, 10)), True, r"\(2, 4\).*asked for were \(2, 3\)"),
        (((3, 4), (7, 8)), True, r"\(2, 2\).*asked for were \(2, 3\)"),
        (((3, 4, 5), (7, 8, 9)), False, "chains were asked for"),
    ],
)
def test_trees_that_were_not_asked_for_are_refused(
    drafts: tuple[tuple[int, ...], ...], are_chains: bool, reason: str
) -> None:
    with pytest.raises(InvariantError, match=reason):
        drafted(*drafts, are_chains=are_chains)
