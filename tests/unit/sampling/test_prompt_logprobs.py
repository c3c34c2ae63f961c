"""Log-probabilities of a step: many positions are looked at in pieces."""

import pytest
import torch
from torch import Tensor

from roost.sampling import logprobs as module
from roost.sampling.logprobs import LOGPROB_POSITIONS_MAX, log_probabilities, output_logprobs

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
