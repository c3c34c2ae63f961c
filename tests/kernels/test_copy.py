"""Slots are copied in all layers at once, overlapping paths included, and no other slot is touched."""

from random import Random

import pytest
import torch
from torch import Tensor

from roost.attention.registry import TRITON
from tests.support.canaries import DTYPES, Fenced

copy = pytest.importorskip("roost.kernels.copy")


def check(shape: tuple[int, int, int, int], dtype: torch.dtype, sources: Tensor, dests: Tensor) -> None:
    """What every slot holds afterwards is what its source held before."""
    buffers = []
    for seed in range(2):
        fenced = Fenced(shape, dtype, sources.device)
        fenced.tensor.copy_(torch.randn(shape, generator=torch.Generator().manual_seed(seed)))
        buffers.append(fenced)
    expected = [fenced.tensor.clone() for fenced in buffers]
    for buffer, fenced in zip(expected, buffers, strict=True):
        buffer[:, dests.flatten()] = fenced.tensor[:, sources.flatten()]
    copy.copy_slots(buffers[0].tensor, buffers[1].tensor, sources, dests)
    for buffer, fenced in zip(expected, buffers, strict=True):
        fenced.check()
        assert torch.equal(fenced.tensor, buffer)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("group_len", "num_layers", "num_kv_heads", "head_dim"),
    [(4, 3, 8, 128), (1, 1, 1, 16), (7, 2, 3, 20), (64, 2, 3, 64)],
)
def test_a_path_moves_to_the_front_over_itself(
    group_len: int, num_layers: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    random, num_groups = Random(group_len), 3
    slots = torch.tensor(random.sample(range(1, 400), 2 * num_groups * group_len)).view(num_groups, -1)
    paths = [sorted(random.sample(range(2 * group_len), group_len)) for _ in range(num_groups)]
    sources = slots.gather(1, torch.tensor(paths)).to(device)
    dests = slots[:, :group_len].contiguous().to(device)
    check((num_layers, 400, num_kv_heads, head_dim), dtype, sources, dests)


def test_slots_change_places_within_a_group(device: torch.device) -> None:
    order = torch.tensor(Random(5).sample(range(20), 20))
    check((2, 23, 2, 40), torch.bfloat16, torch.arange(20, device=device)[None], order[None].to(device))


@pytest.mark.parametrize("group_len", [65, 130, 512, copy._GROUP_LEN_MAX])
def test_slots_change_places_within_a_long_group(group_len: int, device: torch.device) -> None:
    orders = [Random(seed).sample(range(group_len), group_len) for seed in range(2)]
    sources = torch.arange(2 * group_len).view(2, -1)
    dests = torch.stack([group_len * number + torch.tensor(order) for number, order in enumerate(orders)])
    check((2, 2 * group_len, 1, 48), torch.float16, sources.to(device), dests.to(device))


def test_a_group_is_as_long_as_the_backend_declares_and_no_longer(device: torch.device) -> None:
    most = TRITON.copied_max
    assert most is not None
    slots = torch.arange(2 * most, device=device)
    check((1, 2 * most, 1, 16), torch.float32, slots[None, :most], slots[None, most:])
    one_more = slots[None, : most + 1]
    buffer = torch.zeros(1, 2 * most, 1, 16, device=device)
    with pytest.raises(AssertionError, match=f"a group of {most + 1} slots"):
        copy.copy_slots(buffer, buffer.clone(), one_more, one_more)


def test_groups_that_are_one_in_memory_copy_from_one_place(device: torch.device) -> None:
    sources = torch.arange(5, device=device).expand(3, 5)
    check((2, 30, 2, 16), torch.bfloat16, sources, torch.arange(10, 25, device=device).view(3, 5))


def test_nothing_to_copy_is_no_launch(device: torch.device) -> None:
    none = torch.zeros((0, 4), dtype=torch.int64, device=device)
    check((1, 5, 1, 16), torch.float32, none, none)
