"""Sums over ranks, which are threads here: the same bits on each, in the order of the ranks, whatever the batch."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from roost.config.options import GLOO
from roost.parallel.group import DistributedGroup

SIZE = 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sum_has_the_same_bits_on_every_rank_and_for_a_token_alone(tmp_path: Path, dtype: torch.dtype) -> None:
    drawn = torch.Generator().manual_seed(0)
    parts = [(torch.randn((257, 31), generator=drawn) * 10**rank).to(dtype) for rank in range(SIZE)]

    def work(rank: int) -> tuple[Tensor, Tensor, Tensor, int]:
        group = DistributedGroup(rank, SIZE, transport=GLOO, device=torch.device("cpu"), store=tmp_path / "store")
        whole = group.all_reduce(parts[rank].clone())
        alone = group.all_reduce(parts[rank][200:201].clone())
        return whole, alone, group.all_gather(parts[rank][:, ::2]), group.num_calls

    with ThreadPoolExecutor(max_workers=SIZE) as ranks:
        found = list(ranks.map(work, range(SIZE)))
    expected = (parts[0].float() + parts[1].float() + parts[2].float()).to(dtype)
    for whole, alone, gathered, num_calls in found:
        assert whole.dtype == dtype
        assert torch.equal(whole, expected)
        assert torch.equal(alone, expected[200:201])
        assert torch.equal(gathered, torch.cat([part[:, ::2] for part in parts], dim=1))
        assert num_calls == 3
