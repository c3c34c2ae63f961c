"""The step seam: nothing in flight can be changed."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from roost.step import StepId, StepResult, TableDelta


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


def test_the_columns_of_a_delta_cannot_be_written() -> None:
    delta = TableDelta(rows=_ints(0), firsts=_ints(0), offsets=_ints(0, 1), pages=_ints(4))
    with pytest.raises(ValueError, match="read-only"):
        delta.pages[0] = 5
