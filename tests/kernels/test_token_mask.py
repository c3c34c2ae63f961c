"""Token masks: each form forbids what the reference forbids, in place, and touches nothing else."""

import numpy as np
import pytest
import torch

from roost.kernels.token_mask import mask_logits as in_triton
from roost.layers.token_mask import mask_logits, mask_logits_on_host

FORMS = {"host": mask_logits_on_host, "triton": in_triton}


def masks_of(number: int, vocab_size: int) -> torch.Tensor:
    """Masks that allow all of some words, nothing of others, and some tokens of the rest."""
    rng = np.random.default_rng(3)
    words = rng.integers(-(2**31), 2**31, (number, -(-vocab_size // 32))).astype(np.int32)
    kinds = rng.integers(0, 3, words.shape)
    return torch.from_numpy(np.where(kinds == 0, 0, np.where(kinds == 1, -1, words)).astype(np.int32))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("vocab_size", [32, 50, 4096, 5000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forbidden_tokens_become_impossible_and_nothing_else_changes(
    form: str, vocab_size: int, dtype: torch.dtype
) -> None:
    device = torch.device("cuda" if form == "triton" and torch.cuda.is_available() else "cpu")
    logits = torch.randn((7, vocab_size), generator=torch.Generator().manual_seed(1)).to(device, dtype)
    nodes, masks = torch.tensor([5, 0, 3], device=device), masks_of(3, vocab_size).to(device)
    expected, found = logits.clone(), logits.clone()
    mask_logits(expected, nodes, masks)
    FORMS[form](found, nodes, masks)
    assert torch.equal(found, expected)
    untouched = [1, 2, 4, 6]
    assert torch.equal(found[untouched], logits[untouched])


def test_the_reference_reads_the_lowest_bit_first() -> None:
    logits = torch.zeros((1, 40))
    mask_logits(logits, torch.tensor([0]), torch.tensor([[0b101, 1 << 7]], dtype=torch.int32))
    assert torch.flatten(torch.nonzero(logits[0] == 0)).tolist() == [0, 2, 39]
    mask_logits(logits, torch.tensor([0]), torch.tensor([[-(2**31), 0]], dtype=torch.int32))
    assert torch.isinf(logits).all()
