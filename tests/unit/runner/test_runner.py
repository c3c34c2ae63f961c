"""The runner, one plan at a time: results in the plan's order, what it refuses, and what it does not do again."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.config.options import SpecConfig
from roost.device.cpu import CpuDevice
from roost.errors import InvariantError
from roost.runner.runner import Runner
from roost.step import StepPlan, StepResult
from tests.support.step_plans import PAGE_SIZE, PAGES, Row, SuccessorModel, plan_of, small

SPEC = SpecConfig(spec="ngram", spec_steps=3)


class Counting(CpuDevice):
    """Counts what is sent."""

    def __init__(self) -> None:
        self.num_sent = 0

    def send(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Tensor]:
        """One more."""
        self.num_sent += 1
        return super().send(arrays)


def runner(spec: SpecConfig | None = None, device: CpuDevice | None = None) -> Runner:
    return Runner(SuccessorModel(), small(spec), device or CpuDevice())


@torch.inference_mode()
def ran(runs: Runner, plan: StepPlan) -> StepResult:
    runs.apply(plan)
    return runs.run(plan)()


def test_chunks_and_rounds_of_one_step_are_told_row_by_row_in_the_plans_order() -> None:
    runs, shape = runner(), small().spec
    first = ran(runs, plan_of([Row(row=1, tokens=(3, 4), start=0, begins=True)], shape))
    assert (first.accept_lens.tolist(), first.tokens.tolist(), first.lengths.tolist()) == ([1], [[5]], [2])
    rows = [
        Row(row=0, tokens=(7, 7, 7), start=0, is_final=False, begins=True),
        Row(row=1, device_len_max=2),
        Row(row=2, tokens=(9,), start=0, begins=True),
    ]
    mixed = ran(runs, plan_of(rows, shape, step=1))
    assert mixed.rows.tolist() == [0, 1, 2]
    assert mixed.accept_lens.tolist() == [0, 1, 1]  # a chunk that is not final adds nothing
    assert mixed.tokens[1:].tolist() == [[6], [10]] and mixed.lengths.tolist() == [3, 3, 1]


def test_a_round_keeps_the_drafts_that_are_right_and_one_token_more() -> None:
    runs, shape = runner(SPEC), small(SPEC).spec
    text = (1, 2, 3, 4, 9, 1)  # after a 1 came 2, 3, 4: the model's own choice
    ran(runs, plan_of([Row(row=0, tokens=text, start=0, begins=True)], shape))
    result = ran(runs, plan_of([Row(row=0, width=4, device_len_max=9)], shape, step=1))
    assert result.accept_lens.tolist() == [3] and result.tokens[0, :3].tolist() == [3, 4, 5]
    assert result.lengths.tolist() == [9]


@pytest.mark.parametrize(
    ("row", "held", "reason"),
    [
        (Row(row=0, device_len_max=4), 1, r"writes \[6, 7\)"),  # longer than the plan says it can be
        (Row(row=0, tokens=(1, 2, 3), start=2), 1, r"holds \[0, 4\)"),  # past its pages
    ],
)
def test_a_step_that_would_touch_what_its_plan_does_not_hold_is_refused(row: Row, held: int, reason: str) -> None:
    runs, shape = runner(), small().spec
    ran(runs, plan_of([Row(row=0, tokens=(1, 2, 3, 4, 5, 6), start=0, begins=True)], shape))
    with pytest.raises(InvariantError, match=reason):
        ran(runs, plan_of([row], shape, step=1, held=held))


def test_a_step_that_reads_behind_its_window_frontier_is_refused_by_the_numbers() -> None:
    runs, shape = runner(), small().spec
    plan = plan_of([Row(row=0, tokens=(1, 2), start=4, begins=True)], shape)
    with pytest.raises(InvariantError, match=r"reads from 0.*the plan holds \[4, 32\)"):
        ran(runs, replace(plan, firsts=np.full((1, 1), PAGE_SIZE, dtype=np.int32)))
    assert PAGES * PAGE_SIZE == 32


def test_rounds_of_as_many_rows_send_their_layout_and_their_rows_once() -> None:
    device = Counting()
    runs, shape = runner(device=device), small().spec
    ran(runs, plan_of([Row(row=row, tokens=(row, 1), start=0, begins=True) for row in (0, 1)], shape))

    def rounds(*rows: int, length: int) -> int:
        before = device.num_sent
        ran(runs, plan_of([Row(row=row, device_len_max=length) for row in rows], shape, step=length))
        return device.num_sent - before

    assert rounds(0, 1, length=2) == 1  # the layout; the rows are there since the prefill
    assert rounds(0, 1, length=3) == 0
    assert rounds(1, 0, length=4) == 1  # the rows alone
