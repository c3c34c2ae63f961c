"""Draws and draft scores in Triton are those of the reference, bit for bit where no sum decides."""

import pytest
import torch

from roost.layers import gumbel
from tests.unit.layers.test_gumbel import OPTIONS, VOCAB_SIZE, rows_of_options

kernels = pytest.importorskip("roost.kernels.gumbel")


def _on(draws: gumbel.RowDraws, device: torch.device) -> gumbel.RowDraws:
    tensors = {name: getattr(draws, name).to(device) for name in ("reals", "wholes", "bias_ids", "biases")}
    return gumbel.RowDraws(vocab_size=draws.vocab_size, **tensors)


@pytest.mark.parametrize("vocab_size", [1, 700, 5000])
def test_a_draw_is_the_references(vocab_size: int, device: torch.device) -> None:
    draws, _, _, positions = rows_of_options()
    drawn = [row for row, (temperature, *_) in enumerate(OPTIONS.values()) if temperature]
    rows = torch.tensor(drawn)
    logits = torch.randn(len(drawn), vocab_size, generator=torch.Generator().manual_seed(2)) * 4
    logits[1, vocab_size // 2 :] = -torch.inf
    logits[2] = -torch.inf
    wanted = gumbel.draw(logits, rows, positions[rows], draws)
    found = kernels.draw(logits.to(device), rows.to(device), positions[rows].to(device), _on(draws, device))
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_draft_scores_are_the_references(dtype: torch.dtype, device: torch.device) -> None:
    draws, logits, token_ids, positions = rows_of_options()
    logits, rows = logits.to(dtype), torch.arange(len(OPTIONS))
    wanted = gumbel.draft_scores(logits, token_ids, rows, positions, draws)
    arguments = [each.to(device) for each in (logits, token_ids, rows, positions)]
    found = kernels.draft_scores(*arguments, _on(draws, device)).cpu()
    for row, name in enumerate(OPTIONS):
        is_kept = wanted[row] > -torch.inf
        border = (is_kept != (found[row] > -torch.inf)).sum()  # the least that is kept is found to a thousandth
        assert border <= (1 if name in ("top-k", "top-p", "all") else 0), name
        both = is_kept & (found[row] > -torch.inf)
        assert torch.equal(found[row][both], wanted[row][both]), name
    best = kernels.best_drafts(*arguments, _on(draws, device)).cpu()
    assert best.tolist() == wanted.argmax(dim=-1).tolist()


def test_no_rows_are_no_drafts(device: torch.device) -> None:
    draws, _, token_ids, _ = rows_of_options()
    none, empty = torch.zeros(0, dtype=torch.int64, device=device), torch.zeros(0, VOCAB_SIZE, device=device)
    assert len(kernels.draw(empty, none, none, _on(draws, device))) == 0
    own = torch.zeros(0, len(token_ids), device=device)
    assert len(kernels.best_drafts(own, token_ids.to(device), none, none, _on(draws, device))) == 0
