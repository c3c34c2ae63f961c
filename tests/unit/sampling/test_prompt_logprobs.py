"""Log-probabilities of a step: many positions are looked at in pieces, and parts of a step are put together again."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.sampling import logprobs as module
from roost.sampling.logprobs import (
    LOGPROB_POSITIONS_MAX,
    joined_logprobs,
    log_probabilities,
    logprob_columns,
    output_logprobs,
)

VOCAB = 11


@pytest.fixture
def looked_at(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Positions of each piece."""
    pieces: list[int] = []

    def noted(logits: Tensor, chosen: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
        pieces.append(len(logits))
        return log_probabilities(logits, chosen, top)

    monkeypatch.setattr(module, "log_probabilities", noted)
    return pieces


@pytest.mark.parametrize("number", [1, LOGPROB_POSITIONS_MAX, LOGPROB_POSITIONS_MAX + 1, 3 * LOGPROB_POSITIONS_MAX - 1])
def test_outputs_are_scored_in_pieces_and_as_if_at_once(number: int, looked_at: list[int]) -> None:
    random = torch.Generator().manual_seed(number)
    logits = torch.randn(2 * number, VOCAB, generator=random)
    at = torch.randperm(2 * number, generator=random)[:number]
    tokens = torch.randint(0, VOCAB, (number,), generator=random)
    found = output_logprobs(logits, at, tokens, 3)
    assert sum(looked_at) == number and max(looked_at) <= LOGPROB_POSITIONS_MAX
    for mine, whole in zip(found, log_probabilities(logits[at], tokens, 3), strict=True):
        assert torch.equal(mine, whole)


def _some(counts: list[int], top: int, first: int) -> module.LogprobColumns:
    number = sum(counts)
    entries = np.arange(first, first + number, dtype=np.float32)
    tops = np.repeat(entries[:, None], top, axis=1)
    return logprob_columns(np.array(counts), [entries, tops.astype(np.int64), -tops])


@pytest.mark.parametrize("order", [list, lambda parts: list(reversed(parts))], ids=["in order", "reversed"])
def test_logprobs_of_parts_are_in_the_order_of_the_rows(order: Callable[[list[object]], list[object]]) -> None:
    part = np.array([True, False, False, True, False])
    parts = [(part, _some([2, 1], 3, 10)), (~part, _some([0, 3, 1], 1, 20))]
    joined = joined_logprobs(order(parts))  # type: ignore[arg-type]
    assert joined is not None
    assert joined.offsets.tolist() == [0, 2, 2, 5, 6, 7]
    assert joined.logprobs.tolist() == [10, 11, 20, 21, 22, 12, 23]
    assert joined.top_ids.tolist() == [
        [10] * 3,
        [11] * 3,
        *([each, 0, 0] for each in (20, 21, 22)),
        [12] * 3,
        [23, 0, 0],
    ]
    assert joined.top_logprobs[0].tolist() == [-10] * 3 and joined.top_logprobs[-1].tolist() == [-23, 0, 0]


def test_parts_of_which_one_has_logprobs_leave_the_other_rows_without() -> None:
    part = np.array([False, True])
    joined = joined_logprobs([(part, _some([2], 1, 5)), (~part, None)])
    assert joined is not None and joined.offsets.tolist() == [0, 0, 2]
    assert joined_logprobs([(part, None), (~part, None)]) is None
