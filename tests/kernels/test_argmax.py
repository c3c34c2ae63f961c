"""The largest score's id: the lowest among equals, no NaN, nothing past the vocabulary."""

import pytest
import torch
from torch import Tensor

from tests.support.canaries import DTYPES, MARGIN

argmax = pytest.importorskip("roost.kernels.argmax")
VOCABULARIES = (49152, 50257, 4096, 4097, 1000, 1)


def rows(num_rows: int, vocab_size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Scores within a larger buffer of still larger ones."""
    buffer = torch.full((num_rows, vocab_size + 77), torch.inf)
    generator = torch.Generator().manual_seed(vocab_size)
    buffer[:, :vocab_size] = torch.randn((num_rows, vocab_size), generator=generator)
    return buffer.to(device, dtype)[:, :vocab_size]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab_size", VOCABULARIES)
def test_the_lowest_id_of_the_largest_score(vocab_size: int, dtype: torch.dtype, device: torch.device) -> None:
    logits = rows(5, vocab_size, dtype, device)  # 16-bit scores of this many have equals
    buffer = torch.full((5 + 2 * MARGIN,), -7, dtype=torch.int64, device=device)
    ids = argmax.argmax(logits, out=buffer[MARGIN:-MARGIN])
    assert (buffer[:MARGIN] == -7).all() and (buffer[-MARGIN:] == -7).all()
    is_largest = logits == logits.amax(dim=1, keepdim=True)
    assert ids.tolist() == [row.index(True) for row in is_largest.tolist()]
    assert torch.equal(argmax.argmax(logits), ids)


def test_equals_nan_and_infinities(device: torch.device) -> None:
    logits = rows(7, 9001, torch.float32, device).clone()
    logits[0, [8999, 4096, 4095]] = 50.0  # equals in two chunks
    logits[1, [17, 5000, 9000]] = torch.nan
    logits[2] = torch.nan
    logits[3] = -torch.inf
    logits[4] = torch.nan
    logits[4, 9000] = -torch.inf
    logits[5, [600, 300]] = torch.inf
    logits[6, 0] = torch.nan
    logits[6, 1:] = -torch.inf
    ids = argmax.argmax(logits).tolist()
    assert ids[0] == 4095 and ids[2:] == [0, 0, 9000, 300, 1]
    assert ids[1] == int(logits[1].nan_to_num(nan=-100.0).argmax())


def test_no_rows(device: torch.device) -> None:
    assert argmax.argmax(torch.zeros((0, 50), device=device)).shape == (0,)
