"""Rotary positions and the write to slots in Numba equal the reference: any head sizes, floats, float16 and int8."""

import pytest
import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, LayerKv, PageTable
from roost.attention.protocol import ReadKv
from roost.attention.torch_backend import TorchAttention
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.device.open import open_device
from roost.layers.quantised_kv import quantise
from roost.layers.rotary import CosSin, Rope, cos_sin_at, frequencies, rotate
from roost.layers.segments import Segments
from roost.models.model import KvShape
from tests.numba_kernels.runs import CPU, FP16, FP32, INT8, SCALE, team_of
from tests.support.canaries import assert_near
from tests.support.segments import make_segments
from tests.support.tiny_models import configure

KINDS = pytest.mark.parametrize("dtype", [FP32, FP16, INT8], ids=["fp32", "fp16", "int8"])
HEADS = pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(2, 32, 8, 128), (7, 9, 3, 64), (3, 4, 4, 80), (5, 3, 1, 22), (40, 2, 1, 4)],
)


def cache_of(num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvCache:
    """A cache of two layers, with nothing in it."""
    resolved = resolve(configure(page_size=4, pool_tokens=256, context=32), ModelTraits(vocab_size=9))
    table = PageTable(resolved, 0, open_device(CPU))
    table.pages[0, :6] = torch.tensor([9, 3, 7, 1, 12, 5])
    kv = KvShape(num_kv_heads=num_kv_heads, head_dim=head_dim, scale=SCALE, dtype=dtype)
    cache = KvCache(table, [kv, kv])
    for each in (cache.keys, cache.values, cache.scales):
        if each is not None:
            each.fill_(77)
    return cache


class Halves(TorchAttention):
    """The reference, with a cache of float16 too: what it keeps and reads is rounded."""

    def write(self, cache: KvCache, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        if cache.keys.dtype != FP16:
            return super().write(cache, layer, slots, qk, value, cos_sin)
        wide = cache_of(value.shape[1], value.shape[2], FP32)
        query = super().write(wide, layer, slots, qk, value, cos_sin)
        cache.keys[layer, slots], cache.values[layer, slots] = (
            wide.keys[layer, slots].half(),
            wide.values[layer, slots].half(),
        )
        return query

    def read(self, table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
        read = super().read(table, segments, kv)
        if kv.dtype != FP16:
            return read

        def read_wide(query: Tensor, layer: LayerKv, sinks: Tensor | None = None) -> Tensor:
            return read(query, LayerKv(layer.keys.to(FP32), layer.values.to(FP32), None), sinks)

        return read_wide


def heads_of(num_tokens: int, num_heads: int, head_dim: int) -> Tensor:
    """Heads of very different sizes."""
    generator = torch.Generator().manual_seed(head_dim)
    sizes = torch.randn((num_tokens, num_heads, 1), generator=generator).mul(2).exp()
    return torch.randn((num_tokens, num_heads, head_dim), generator=generator) * sizes


def cos_sin(positions: Tensor, head_dim: int) -> CosSin:
    return cos_sin_at(positions, frequencies(Rope(theta=10000.0), head_dim, CPU), FP32)


@KINDS
@HEADS
@pytest.mark.parametrize("size", [1, 3])
def test_each_slot_gets_its_own_heads_and_the_others_stay(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, size: int
) -> None:
    cache, other = cache_of(num_kv_heads, head_dim, dtype), cache_of(num_kv_heads, head_dim, dtype)
    wide = heads_of(num_tokens, num_heads + 2 * num_kv_heads, head_dim)  # queries, keys and values are views of it
    qk, value = wide.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    slots = 1 + 2 * torch.randperm(num_tokens, generator=torch.Generator().manual_seed(3))
    angles = cos_sin(torch.arange(5, 5 + num_tokens), head_dim)
    query = team_of(size).write(cache, 1, slots, qk, value, angles)
    assert_near(query, rotate(qk, angles)[:, :num_heads], steps=16)
    Halves(open_device(CPU)).write(other, 1, slots, qk, value, angles)
    assert torch.equal(cache.values, other.values)
    assert torch.equal(cache.keys[0], other.keys[0])
    difference = (cache.keys.to(FP32) - other.keys.to(FP32)).abs()
    assert (difference <= (1 if dtype == INT8 else 2e-3 * other.keys.to(FP32).abs() + 1e-5)).all()
    if cache.scales is not None and other.scales is not None:
        assert torch.equal(cache.scales[:, :, 1], other.scales[:, :, 1])
        torch.testing.assert_close(cache.scales, other.scales, rtol=1e-6, atol=0)


@HEADS
def test_codes_and_scales_are_those_of_the_reference(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int
) -> None:
    cache = cache_of(num_kv_heads, head_dim, INT8)
    qk, value = heads_of(num_tokens, num_heads + num_kv_heads, head_dim), heads_of(num_tokens, num_kv_heads, head_dim)
    value[0], value[1, :, 1] = 1e-42, torch.inf
    qk[1, :, 2], qk[0] = torch.nan, 0.0
    slots = torch.arange(num_tokens)
    team_of(1).write(cache, 0, slots, qk, value, cos_sin(torch.zeros(num_tokens), head_dim))  # nothing is rotated
    assert cache.scales is not None
    for place, (buffer, vectors) in enumerate(((cache.keys, qk[:, num_heads:]), (cache.values, value))):
        codes, scales = quantise(vectors, INT8)
        assert torch.equal(buffer[0, :num_tokens], codes)
        torch.testing.assert_close(cache.scales[0, :, place, :num_tokens], scales.t(), rtol=0, atol=0, equal_nan=True)


@HEADS
@pytest.mark.parametrize("size", [1, 3])
def test_queries_without_keys_turn_as_those_with_keys_do(
    num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int, size: int
) -> None:
    cache = cache_of(num_kv_heads, head_dim, FP32)
    wide = heads_of(num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    qk, value = wide.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    slots, angles, team = torch.arange(num_tokens), cos_sin(torch.arange(5, 5 + num_tokens), head_dim), team_of(size)
    wanted = team.write(cache, 0, slots, qk, value, angles).clone()
    kept = cache.keys.clone(), cache.values.clone()
    assert torch.equal(team.rotate(wide[:, :num_heads], angles), wanted)
    assert torch.equal(cache.keys, kept[0]) and torch.equal(cache.values, kept[1])


@KINDS
def test_a_token_is_written_as_it_is_alone(dtype: torch.dtype) -> None:
    together, alone = cache_of(3, 24, dtype), cache_of(3, 24, dtype)
    qk, value, slots = heads_of(20, 6, 24), heads_of(20, 3, 24), torch.arange(20)
    angles = cos_sin(torch.arange(20), 24)
    query = team_of(3).write(together, 0, slots, qk, value, angles)
    for token in range(20):
        at, own = slice(token, token + 1), (angles[0][token : token + 1], angles[1][token : token + 1])
        assert torch.equal(team_of(1).write(alone, 0, slots[at], qk[at], value[at], own), query[at])
    assert torch.equal(together.keys, alone.keys) and torch.equal(together.values, alone.values)
    if together.scales is not None and alone.scales is not None:
        assert torch.equal(together.scales, alone.scales)


@KINDS
def test_both_backends_read_the_same_after_the_same_writes_and_copies(dtype: torch.dtype) -> None:
    number, heads = torch.arange(20), heads_of(20, 8, 16)
    segments = make_segments([0], [12], [4], are_rounds=False)
    outputs = []
    for each in (Halves(open_device(CPU)), team_of(2)):
        cache = cache_of(2, 16, dtype)
        slots = cache.table.slots(torch.zeros_like(number), number)
        reads = []
        for index in range(2):
            angles = cos_sin(number, 16)
            query = each.write(cache, index, slots, heads[:, :6] * (1 + index), heads[:, 6:], angles)
            reads.append(query[12:16] / query[12:16].abs().amax())
        each.copy(cache, slots[None, 16:], slots[None, 10:14])  # an accepted path, brought to the front
        read = each.read(cache.table, segments, cache.kv)
        outputs.append(torch.stack([read(query, cache.layer(index)) for index, query in enumerate(reads)]))
    assert_near(outputs[0], outputs[1], steps=64 if dtype == FP32 else 4096)
