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
from roost.spec_shape import MATCH_MAX
from roost.step import StepPlan, StepResult
from tests.support.step_plans import PAGE_SIZE, PAGES, Row, SuccessorModel, ints, plan_of, small

SPEC = SpecConfig(spec="ngram", spec_steps=3)
CHOSEN = SpecConfig(spec="ngram")  # rounds are narrowed to what was drafted


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
    ran(runs, plan_of([Row(row=0, tokens=TEXT, start=0, begins=True)], shape))
    result = ran(runs, plan_of([Row(row=0, width=4, device_len_max=9)], shape, step=1))
    assert result.accept_lens.tolist() == [3] and result.tokens[0, :3].tolist() == [3, 4, 5]
    assert result.lengths.tolist() == [9]


def taking(plan: StepPlan, *widths: int) -> StepPlan:
    """A plan whose rows take so much of what followed any match; 0: none."""
    tables = np.array([[0] + [width] * MATCH_MAX for width in widths], dtype=np.int32)
    return replace(plan, lookup_widths=tables, head_width=1)


TEXT = (1, 2, 3, 4, 9, 1)  # after a 1 came 2, 3, 4: the model's own choice


@pytest.mark.parametrize(("width", "num_nodes"), [(17, 17), (5, 5), (2, 2), (0, 1)])
def test_a_round_verifies_as_many_nodes_as_were_looked_up_for_it(width: int, num_nodes: int) -> None:
    runs, shape = runner(CHOSEN), small(CHOSEN).spec
    ran(runs, plan_of([Row(row=0, tokens=TEXT, start=0, begins=True)], shape))
    round_ = taking(plan_of([Row(row=0, width=17, device_len_max=9)], shape, step=1), width)
    result = ran(runs, round_)
    assert result.lookups is not None
    assert result.lookups.num_nodes.tolist() == [num_nodes]
    assert result.lookups.is_used.tolist() == [width > 0] and result.lookups.match_lens.tolist() == [2]
    assert result.lookups.drafts[0, :4].tolist() == [3, 4, 9, 1]
    assert result.accept_lens.tolist() == [min(3, num_nodes)]
    assert result.tokens[0, : min(3, num_nodes)].tolist() == [3, 4, 5][: min(3, num_nodes)]


def test_rounds_that_are_narrowed_each_to_its_own_width_keep_their_places() -> None:
    runs, shape = runner(CHOSEN), small(CHOSEN).spec
    ran(runs, plan_of([Row(row=row, tokens=TEXT, start=0, begins=True) for row in range(4)], shape))
    rows = [Row(row=row, width=17, device_len_max=9) for row in (2, 0, 3, 1)]
    result = ran(runs, taking(plan_of(rows, shape, step=1), 0, 5, 2, 17))
    assert result.lookups is not None and result.lookups.num_nodes.tolist() == [1, 5, 2, 17]
    assert result.accept_lens.tolist() == [1, 3, 2, 3] and result.lengths.tolist() == [7, 9, 8, 9]
    assert [own[:length].tolist() for own, length in zip(result.tokens, result.accept_lens, strict=True)] == [
        [3],
        [3, 4, 5],
        [3, 4],
        [3, 4, 5],
    ]


@pytest.mark.parametrize("width", [0, 2, 17])
def test_a_prompt_beside_rounds_that_are_narrowed_is_scored_at_its_own_places(width: int) -> None:
    shape, chunk = small(CHOSEN).spec, Row(row=0, tokens=(3, 4, 7, 8), start=0, begins=True)
    scored = {"num_top_logprobs": [0], "prompt_logprob_starts": [0], "prompt_logprob_ends": [3]}
    alone = replace(plan_of([chunk], shape), **{name: ints(*value) for name, value in scored.items()})
    wanted = ran(runner(CHOSEN), alone).prompt_logprobs
    runs = runner(CHOSEN)
    ran(runs, plan_of([Row(row=1, tokens=TEXT, start=0, begins=True)], shape))
    beside = plan_of([Row(row=1, width=17, device_len_max=9), chunk], shape, step=1)
    beside = replace(beside, **{name: ints(-1, *value) for name, value in scored.items()})
    found = ran(runs, taking(beside, width, 0)).prompt_logprobs
    assert wanted is not None and found is not None
    assert found.offsets.tolist() == [0, 0, 3] and found.logprobs.tolist() == wanted.logprobs.tolist()


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
