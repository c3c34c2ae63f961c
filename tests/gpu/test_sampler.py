"""The sampler on a device: the same tokens as on the host, and no wait for the device."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from roost.device.open import open_device
from roost.sampling.params import SamplingParams
from roost.sampling.sampler import Sampler
from tests.support.plain_sampler import Case

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

NUM_ROWS, VOCAB_SIZE = 48, 50_001
OPTIONS = (
    SamplingParams(temperature=0),
    SamplingParams(seed=1),
    SamplingParams(temperature=0.5, top_p=0.9, seed=2),
    SamplingParams(top_k=40, top_p=0.95, min_p=0.01, seed=3),
    SamplingParams(repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logit_bias=((7, 4.0),), seed=4),
    SamplingParams(temperature=0, frequency_penalty=1.0),
)
CASES = [
    Case(sampling=OPTIONS[row % len(OPTIONS)], prompt=(1, 2), output=(9, 9), min_len=40 + row, stop_ids=(5, 11))
    for row in range(NUM_ROWS)
]


@pytest.fixture
def without_sync() -> Iterator[None]:
    """Makes every wait for the device an error."""
    torch.zeros(1).pin_memory().to("cuda")
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def _tokens(device: str, logits: torch.Tensor, order: np.ndarray) -> torch.Tensor:
    sampler = Sampler(NUM_ROWS, VOCAB_SIZE, open_device(torch.device(device)))
    for row, case in enumerate(CASES):
        sampler.set_row(case.setup(row))
    rows = torch.from_numpy(order).pin_memory().to(device, non_blocking=True)
    sampler.note(rows, rows + 100)
    return sampler.sample(logits, rows, order.tolist(), 50 + rows, extra=torch.stack([rows, -rows], dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_device_draws_what_the_host_draws_in_any_order(dtype: torch.dtype, without_sync: None) -> None:
    logits = (torch.randn(NUM_ROWS, VOCAB_SIZE, generator=torch.Generator().manual_seed(5)) * 3).to(dtype)
    order = np.random.default_rng(1).permutation(NUM_ROWS)
    there = logits.pin_memory().to("cuda", non_blocking=True)
    picked = there[torch.from_numpy(order).pin_memory().to("cuda", non_blocking=True)]
    got = _tokens("cuda", picked, order), _tokens("cuda", there, np.arange(NUM_ROWS))
    torch.cuda.set_sync_debug_mode("default")
    expected = _tokens("cpu", logits, np.arange(NUM_ROWS))
    assert torch.equal(got[1].cpu(), expected)
    assert torch.equal(got[0].cpu(), expected[torch.from_numpy(order)])
