"""The step seam: nothing in flight can be changed."""

from dataclasses import FrozenInstanceError, fields, replace

import numpy as np
import pytest

from roost.spec_shape import PLAIN
from roost.step import LookupColumns, StepId, StepPlan, StepResult, TableDelta


def _ints(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def test_the_columns_of_a_result_cannot_be_written() -> None:
    result = StepResult(
        step=StepId(1),
        rows=_ints(0),
        epochs=_ints(0),
        accept_lens=_ints(1),
        tokens=_ints(7).reshape(1, 1),
        lengths=_ints(3),
    )
    with pytest.raises(ValueError, match="read-only"):
        result.accept_lens[0] = 2
    with pytest.raises(FrozenInstanceError):
        result.step = StepId(2)  # type: ignore[misc]


def test_what_was_looked_up_cannot_be_written() -> None:
    lookups = LookupColumns(
        match_lens=_ints(3), is_used=np.array([True]), num_nodes=_ints(4), drafts=_ints(7, 8).reshape(1, 2)
    )
    for each in fields(LookupColumns):
        with pytest.raises(ValueError, match="read-only"):
            getattr(lookups, each.name)[...] = 0


def test_the_columns_of_a_delta_cannot_be_written() -> None:
    delta = TableDelta(rows=_ints(0), firsts=_ints(0), offsets=_ints(0, 1), pages=_ints(4))
    with pytest.raises(ValueError, match="read-only"):
        delta.pages[0] = 5


def _plan() -> StepPlan:
    return StepPlan(
        step=StepId(0),
        shape=PLAIN,
        rows=_ints(0),
        epochs=_ints(0),
        is_prefill=np.array([True]),
        query_lens=_ints(2),
        start_positions=_ints(0),
        device_lens_max=_ints(0),
        firsts=_ints(0).reshape(1, 1),
        ends=_ints(8).reshape(1, 1),
        is_final=np.array([True]),
        next_tokens=_ints(-1),
        tokens=_ints(5, 6),
        token_offsets=_ints(0, 2),
        num_top_logprobs=_ints(-1),
        prompt_logprob_starts=_ints(-1),
        prompt_logprob_ends=_ints(-1),
        setups=(),
        deltas=(TableDelta(rows=_ints(0), firsts=_ints(0), offsets=_ints(0, 1), pages=_ints(4)),),
    )


def _columns() -> list[str]:
    others = ("step", "shape", "setups", "deltas", "head_width", "shown_row", "states")
    return [field.name for field in fields(StepPlan) if field.name not in others]


@pytest.mark.parametrize("name", _columns())
def test_the_columns_of_a_plan_cannot_be_written(name: str) -> None:
    plan = replace(_plan(), lookup_widths=_ints(0, 5).reshape(1, 2))
    with pytest.raises(ValueError, match="read-only"):
        getattr(plan, name)[...] = 0
    with pytest.raises(FrozenInstanceError):
        setattr(plan, name, _ints(9))
