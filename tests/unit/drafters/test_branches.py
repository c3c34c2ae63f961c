"""Where branches lie, worked out on the device for many rows, is where the shape says; on any page size."""

import pytest
import torch

from roost.attention.kv_cache import PageTable
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.device.cpu import CpuDevice
from roost.drafters.eagle import DraftBranches
from roost.spec_shape import DraftKv, SpecShape
from tests.support.segments import make_segments
from tests.support.spec_configs import spec_config

LENGTHS = [1, 2, 3, 10, 63, 64, 65, 103, 126, 128, 254, 255, 256, 257, 300, 511, 512, 513]


def placed(page_size: int, shape: SpecShape) -> tuple[DraftBranches, PageTable]:
    """The branches of rows of all lengths; page p of row r has the number 1 + p * rows + r."""
    config = EngineConfig(
        memory=MemoryConfig(page_size=page_size, pool_tokens=10**7),
        sched=SchedConfig(context=600, max_running=len(LENGTHS), overlap=False),
        spec=spec_config(shape),
    )
    table = PageTable(resolve(config, ModelTraits(vocab_size=9)), 0, CpuDevice())
    num_rows, pages_per_row = table.pages.shape
    table.pages[:] = 1 + torch.arange(pages_per_row) * num_rows + torch.arange(num_rows)[:, None]
    return DraftBranches(make_segments(range(len(LENGTHS)), LENGTHS), shape, table), table


def slot(table: PageTable, row: int, position: int) -> int:
    page = int(table.pages[row, position // table.page_size])
    return page * table.page_size + position % table.page_size


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256, 512])
@pytest.mark.parametrize("topk", [1, 4, 8])
@pytest.mark.parametrize("steps", [2, 5])
def test_branches_lie_where_the_shape_says(page_size: int, topk: int, steps: int) -> None:
    tokens = steps + 1 if topk == 1 else 8
    shape = SpecShape(steps=steps, topk=topk, tokens=tokens, draft_kv=DraftKv.PAIR)
    branches, table = placed(page_size, shape)

    def lies(row: int, branch: int, step: int) -> int:
        return slot(table, row, shape.branch_position(LENGTHS[row], branch, step))

    rows = range(len(LENGTHS))
    for step in range(steps - 1):
        assert branches.slots(step).tolist() == [[lies(row, k, step) for k in range(topk)] for row in rows]
    parent = torch.arange(topk).flip(0).expand(len(LENGTHS), -1)
    sources, dests = branches.moves(parent, steps - 1)
    moves = [
        (lies(row, topk - 1 - k, step), lies(row, k, step))
        for row in rows
        for k in range(topk)
        for step in range(steps - 1)
    ]
    assert list(zip(sources.flatten().tolist(), dests.flatten().tolist(), strict=True)) == moves


@pytest.mark.parametrize("page_size", [1, 4, 64, 512])
@pytest.mark.parametrize("topk", [4, 8])
def test_what_a_branch_reads_is_the_text_and_what_it_wrote(page_size: int, topk: int) -> None:
    shape = SpecShape(steps=5, topk=topk, tokens=8, draft_kv=DraftKv.PAIR)
    branches, table = placed(page_size, shape)
    written = torch.stack([branches.slots(step) for step in range(shape.branch_len)], dim=-1)  # [R, K, steps]
    for step in range(shape.branch_len):
        segments = branches.segments(step)
        bases, shifts, host = segments.branch_bases, segments.branch_shifts, segments.host
        assert bases is not None and shifts is not None and host is not None
        assert host.branch_bases is not None and host.branch_shifts is not None
        assert (host.branch_bases.tolist(), host.branch_shifts.tolist()) == (bases.tolist(), shifts.tolist())
        assert host.start_positions.tolist() == segments.start_positions.tolist()
        for number, (row, last) in enumerate(zip(segments.rows, segments.start_positions.tolist(), strict=True)):
            places = torch.arange(last + 1)
            places = torch.where(places < bases[number], places, places + shifts[number])
            text = table.slots(row, torch.arange(LENGTHS[int(row)]))
            assert torch.equal(table.slots(row, places), torch.cat([text, written[row, number % topk, : step + 1]]))
