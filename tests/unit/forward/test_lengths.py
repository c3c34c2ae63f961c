"""Failure mode 9: lengths on the host are one mirror with one door, and what is derived from them is never stale."""

from dataclasses import replace

import numpy as np
import torch

from roost.forward.lengths import Lengths, StepLengths
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.step import Ints, StepId, StepPlan, TableDelta

SPECULATING = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
NUM_ROWS = 6


def ints(*values: int) -> Ints:
    return np.array(values, dtype=np.int32)


def plan(rows: Ints, starts: Ints, widths: Ints, shape: SpecShape = PLAIN) -> StepPlan:
    """A step; a start of -1 is a round, whose length the device knows."""
    none = ints(*[-1] * len(rows))
    empty = TableDelta(rows=ints(), firsts=ints(), offsets=ints(0), pages=ints())
    return StepPlan(
        step=StepId(0),
        shape=shape,
        rows=rows,
        epochs=np.zeros_like(rows),
        is_prefill=starts >= 0,
        query_lens=widths,
        start_positions=starts,
        device_lens_max=np.zeros_like(rows),
        firsts=np.zeros_like(rows)[None],
        ends=np.zeros_like(rows)[None],
        is_final=starts >= 0,
        next_tokens=none,
        tokens=ints(),
        token_offsets=np.zeros(len(rows) + 1, dtype=np.int32),
        num_top_logprobs=none,
        prompt_logprob_starts=none,
        prompt_logprob_ends=none,
        setups=(),
        deltas=(empty,),
    )


def lengths(*device: int) -> Lengths:
    """Lengths that the device knows and the host has not seen."""
    made = Lengths(NUM_ROWS, torch.device("cpu"))
    made.device[: len(device)] = torch.tensor(device)
    return made


def moved(step: StepLengths) -> StepLengths:
    """A step that has run."""
    step._lengths.move(torch.tensor(step._plan.rows), torch.tensor(step.ends, dtype=torch.int64))
    step.advance()
    return step


def test_a_chunk_starts_where_the_plan_says_and_a_round_where_its_row_is() -> None:
    made = lengths()
    moved(made.of_step(plan(ints(4, 1), ints(0, 0), ints(7, 3))))
    step = made.of_step(plan(ints(1, 4, 2), ints(-1, -1, 5), ints(1, 1, 6)))
    assert step.start_positions.tolist() == [3, 7, 5]
    assert step.ends.tolist() == [4, 8, 11]
    assert step.total == 23


def test_device_and_host_advance_together() -> None:
    made = lengths()
    moved(made.of_step(plan(ints(0, 3), ints(0, 9), ints(5, 2))))
    moved(made.of_step(plan(ints(3, 0), ints(-1, -1), ints(1, 1))))
    assert made.device.tolist() == made.host_seen.tolist() == [6, 0, 0, 12, 0, 0]


def test_09_a_step_is_described_by_what_it_started_from_not_by_what_came_after() -> None:
    made = lengths()
    first = moved(made.of_step(plan(ints(2), ints(0), ints(8))))
    second = moved(made.of_step(plan(ints(2), ints(-1), ints(1))))
    moved(made.of_step(plan(ints(2), ints(-1), ints(1))))
    assert (first.start_positions.tolist(), first.ends.tolist(), first.total) == ([0], [8], 8)
    assert (second.start_positions.tolist(), second.ends.tolist(), second.total) == ([8], [9], 9)


def test_09_only_a_step_the_host_cannot_foresee_asks_the_device() -> None:
    made = lengths(11, 12, 13)
    plain = made.of_step(plan(ints(0, 2), ints(-1, -1), ints(1, 1)))
    assert plain.start_positions.tolist() == [0, 0], "a plain step believes the mirror"
    speculating = made.of_step(plan(ints(0, 2), ints(-1, -1), ints(4, 4), SPECULATING))
    assert speculating.start_positions.tolist() == [11, 13]
    assert made.host_seen.tolist() == [11, 0, 13, 0, 0, 0], "rows that are not in the step stay as they were seen"


def test_09_the_one_door_takes_lengths_anew_and_forgets_the_sum() -> None:
    made = lengths(20, 30)
    step = made.of_step(plan(ints(0, 1), ints(-1, -1), ints(1, 1)))
    assert step.total == 2
    made.device[0] = 25  # a step before it has run meanwhile
    assert step.total == 2 and step.start_positions.tolist() == [0, 0], "nothing changes but by the door"
    step.refresh(sync=True)
    assert (step.start_positions.tolist(), step.ends.tolist(), step.total) == ([25, 30], [26, 31], 57)
    made.host_seen[1] = 40
    step.refresh(sync=False)
    assert (step.start_positions.tolist(), step.total) == ([25, 40], 67)


def test_09_a_refresh_leaves_chunks_where_the_plan_put_them() -> None:
    made = lengths(20, 30)
    step = made.of_step(plan(ints(0, 1), ints(6, -1), ints(3, 1)))
    step.refresh(sync=True)
    assert step.start_positions.tolist() == [6, 30]
    assert made.host_seen[0] == 0, "a chunk's row is not asked for"


def test_09_the_sum_is_computed_once_and_only_when_asked_for() -> None:
    class Counting(StepLengths):
        sums = 0

        @property
        def ends(self) -> Ints:
            Counting.sums += 1
            return super().ends

    step = Counting(lengths(), plan(ints(0, 1), ints(0, 4), ints(5, 5)))
    step.refresh(sync=False)
    assert Counting.sums == 0
    assert [step.total, step.total, step.total] == [14, 14, 14]
    assert Counting.sums == 1


def test_a_row_used_again_starts_where_its_new_plan_says() -> None:
    made = lengths()
    moved(made.of_step(plan(ints(3), ints(0), ints(50))))
    step = moved(made.of_step(plan(ints(3), ints(0), ints(4))))
    assert step.start_positions.tolist() == [0]
    assert made.of_step(plan(ints(3), ints(-1), ints(1))).start_positions.tolist() == [4]


def test_a_plan_in_flight_is_not_written_to() -> None:
    made = lengths(7)
    asked = replace(plan(ints(0), ints(-1), ints(1)))
    moved(made.of_step(asked))
    assert (asked.start_positions.tolist(), asked.query_lens.tolist()) == ([-1], [1])
