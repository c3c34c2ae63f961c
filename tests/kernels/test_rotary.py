"""Queries turn, keys and values reach their slots, and no other slot is touched."""

import pytest
import torch
from torch import Tensor

from roost.layers.rotary import Rope, cos_sin_at, frequencies, rotate
from tests.support.canaries import DTYPES, SENTINEL, Fenced, assert_near

rope = pytest.importorskip("roost.kernels.rotary")


def projected(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Heads as a view of a wider buffer: tokens lie further apart than they are long."""
    num_tokens, num_all, head_dim = shape
    wide = torch.randn((num_tokens, num_all * head_dim + 48), generator=torch.Generator().manual_seed(num_tokens))
    return wide.to(device, dtype)[:, 16 : 16 + num_all * head_dim].unflatten(1, (num_all, head_dim))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(1, 32, 8, 128), (7, 9, 3, 64), (3, 4, 4, 80), (5, 8, 1, 256), (2, 3, 3, 16), (13, 5, 1, 22), (2, 8, 1, 512)],
)
def test_rope_write_turns_and_writes(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    heads = projected((num_tokens, num_heads + 2 * num_kv_heads, head_dim), dtype, device)
    positions = torch.randint(0, 3000, (num_tokens,), generator=generator).to(device)
    cos_sin = cos_sin_at(positions, frequencies(Rope(theta=10000.0), head_dim, device), dtype)
    num_slots = 3 * num_tokens + 2
    slots = torch.randperm(num_slots, generator=generator)[:num_tokens].to(device)
    keys, values = (Fenced((num_slots, num_kv_heads, head_dim), dtype, device) for _ in range(2))
    keys.tensor.fill_(SENTINEL), values.tensor.fill_(SENTINEL)
    out = Fenced((num_tokens, num_heads, head_dim), dtype, device)
    qk, value = heads.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if num_tokens % 2:
        qk = qk.contiguous()  # as a norm of queries and keys leaves them
    query = rope.rope_write(qk, value, *cos_sin, slots, keys.tensor, values.tensor, out=out.tensor)
    for fenced in (keys, values, out):
        fenced.check()
    wide = rotate(qk.to(torch.float32), (cos_sin[0].to(torch.float32), cos_sin[1].to(torch.float32))).to(dtype)
    assert_near(query, wide[:, :num_heads])
    assert_near(keys.tensor[slots], wide[:, num_heads:])
    assert torch.equal(values.tensor[slots], value)
    assert_near(query, rotate(qk, cos_sin)[:, :num_heads], steps=4)  # which rounds twice
    others = torch.ones(num_slots, dtype=torch.bool, device=device)
    others[slots] = False
    assert (keys.tensor[others] == SENTINEL).all() and (values.tensor[others] == SENTINEL).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_heads", "head_dim"), [(1, 32, 128), (7, 9, 64), (3, 4, 80), (5, 8, 512)])
def test_queries_without_keys_turn_as_those_with_keys_do(
    num_tokens: int, num_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    query = projected((num_tokens, num_heads, head_dim), dtype, device)
    positions = torch.arange(3, 3 + num_tokens, device=device)
    cos_sin = cos_sin_at(positions, frequencies(Rope(theta=10000.0), head_dim, device), dtype)
    out = Fenced((num_tokens, num_heads, head_dim), dtype, device)
    assert_near(rope.rope(query, *cos_sin, out=out.tensor), rotate(query, cos_sin), steps=4)
    out.check()
