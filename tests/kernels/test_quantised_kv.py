"""Quantised KV in kernels equals the reference: written, copied with its scales, and read, whatever the shape."""

from dataclasses import replace
from random import Random

import pytest
import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, PageTable
from roost.attention.torch_backend import TorchAttention
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.device.open import open_device
from roost.layers.quantised_kv import CODE_DTYPES, dequantise, quantise
from roost.layers.rotary import CosSin, Rope, cos_sin_at, frequencies, rotate
from roost.layers.segments import segment_attention
from roost.models.model import KvShape
from tests.support.attention_batches import NOWHERE, Batch, Shape, make
from tests.support.canaries import SENTINEL, Fenced, assert_near
from tests.support.segments import make_segments
from tests.support.tiny_models import configure

attention = pytest.importorskip("roost.kernels.attention")
copy = pytest.importorskip("roost.kernels.copy")
rope = pytest.importorskip("roost.kernels.rotary")
backend = pytest.importorskip("roost.attention.triton_backend")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODES = pytest.mark.parametrize("codes", CODE_DTYPES.values(), ids=CODE_DTYPES)
SCALE = 0.21


def written(heads: Tensor, num_kv_heads: int, cos_sin: CosSin, codes: torch.dtype) -> dict[str, tuple[Tensor, Tensor]]:
    """Codes and scales that the kernel leaves in every other slot, and nothing in the rest."""
    num_tokens, num_all, head_dim = heads.shape
    slots = 1 + 2 * torch.randperm(num_tokens, generator=torch.Generator().manual_seed(3)).to(heads.device)
    num_slots = 2 * num_tokens + 2
    fences = [Fenced((num_slots, num_kv_heads, head_dim), torch.uint8, heads.device, 77) for _ in range(2)]
    lines = Fenced((num_kv_heads, 2, num_slots), FP32, heads.device)
    lines.tensor.fill_(SENTINEL)
    qk, value = heads.split((num_all - num_kv_heads, num_kv_heads), dim=1)
    buffers = [fence.tensor.view(codes) for fence in fences]
    rope.rope_write(qk, value, *cos_sin, slots, *buffers, lines.tensor)
    others = torch.ones(num_slots, dtype=torch.bool, device=heads.device)
    others[slots] = False
    lines.check()
    assert (lines.tensor[..., others] == SENTINEL).all()
    for fence in fences:
        fence.check()
        assert (fence.tensor[others] == 77).all()
    scales = lines.tensor[..., slots].unbind(1)
    return {name: (buffers[place][slots], scales[place].t()) for place, name in enumerate(("keys", "values"))}


def assert_same(ours: tuple[Tensor, Tensor], vectors: Tensor) -> None:
    """Codes and scales are those of the reference, whatever the sign of a zero."""
    codes, scales = quantise(vectors, ours[0].dtype)
    torch.testing.assert_close(ours[1], scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(ours[0].to(FP32), codes.to(FP32))


@CODES
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "num_kv_heads", "head_dim"),
    [(2, 32, 8, 128), (7, 9, 3, 64), (3, 4, 4, 80), (5, 3, 1, 22)],
)
def test_each_slot_gets_the_codes_and_scales_of_its_own_heads(
    num_tokens: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    codes: torch.dtype,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(head_dim)
    shape = (num_tokens, num_heads + 2 * num_kv_heads, head_dim)
    sizes = torch.randn(shape[:2], generator=generator).mul(4).exp()[..., None]  # heads of very different sizes
    heads = (torch.randn(shape, generator=generator) * sizes).to(device, dtype)
    frequency = frequencies(Rope(theta=10000.0), head_dim, device)
    ours = written(heads, num_kv_heads, cos_sin_at(torch.zeros(num_tokens, device=device), frequency, dtype), codes)
    assert_same(ours["keys"], heads[:, num_heads : num_heads + num_kv_heads])  # at position 0 nothing turns
    assert_same(ours["values"], heads[:, num_heads + num_kv_heads :])
    cos_sin = cos_sin_at(torch.arange(5, 5 + num_tokens, device=device), frequency, dtype)
    ours = written(heads, num_kv_heads, cos_sin, codes)
    turned = rotate(heads, cos_sin)[:, num_heads : num_heads + num_kv_heads]
    size = turned.to(FP32).abs().amax(dim=-1, keepdim=True)
    error = (dequantise(*ours["keys"], FP32) - turned.to(FP32)).abs() / size
    assert error.max() < (0.05 if codes == torch.float8_e4m3fn else 0.016)  # half a step, and two roundings of bf16
    assert_same(ours["values"], heads[:, num_heads + num_kv_heads :])


@CODES
def test_vectors_without_a_size_and_those_that_are_no_numbers_leave_scales_that_say_so(
    codes: torch.dtype, device: torch.device
) -> None:
    heads = torch.randn((6, 3, 16), generator=torch.Generator().manual_seed(1))
    heads[0], heads[1], heads[2] = 0.0, 1e-42, -0.0
    heads[3, :, 5], heads[4, :, 2], heads[5, :, 15] = torch.inf, torch.nan, -torch.inf
    heads = heads.to(device)
    cos_sin = cos_sin_at(torch.zeros(6, device=device), frequencies(Rope(theta=100.0), 16, device), FP32)
    ours = written(heads, 1, cos_sin, codes)["values"]
    assert_same(ours, heads[:, 2:])
    assert ours[1][:3].tolist() == [[0.0]] * 3 and ours[1][3:].isnan().all()
    assert not ours[0].to(FP32).any()


def quantised(batch: Batch, codes: torch.dtype) -> tuple[Batch, Tensor, Batch]:
    """A batch whose KV is codes, with their scales; and the same with what is read of them."""
    (keys, key_scales), (values, value_scales) = (quantise(each, codes) for each in (batch.keys, batch.values))
    scales = torch.stack([key_scales.t(), value_scales.t()], dim=1)
    read = {"keys": dequantise(keys, key_scales, FP32), "values": dequantise(values, value_scales, FP32)}
    return replace(batch, keys=keys, values=values), scales, replace(batch, **read)


def check(batch: Batch, shape: Shape, codes: torch.dtype, num_splits: int) -> None:
    """The kernel reads codes and scales as the reference reads numbers; slots that nobody may read are NaN."""
    coded, scales, plain = quantised(batch, codes)
    out = Fenced(batch.query.shape, shape.dtype, batch.query.device)
    how = {"page_size": shape.page_size, "window": shape.window, "scale": SCALE}
    arrivals = torch.zeros(attention.ARRIVALS_MAX, dtype=torch.int32, device=batch.query.device)
    ours = attention.paged_attention(
        *(coded.query, coded.keys, coded.values, coded.table, coded.segments),
        **{**how, "num_splits": num_splits, "scales": scales, "arrivals": arrivals},
        out=out.tensor,
    )
    out.check()
    assert not arrivals.any()
    table = plain.table.where(plain.table < NOWHERE, 0)
    keys, values = plain.keys.nan_to_num(), plain.values.nan_to_num()
    expected = segment_attention(plain.query, keys, values, table, plain.segments, **how)
    assert_near(ours, expected, steps=2)


@CODES
@pytest.mark.parametrize(
    ("shape", "num_splits"),
    [
        (Shape(num_kv_heads=2, group=4, head_dim=128, page_size=64, dtype=BF16), 2),
        (Shape(num_kv_heads=1, group=3, head_dim=64, page_size=16, dtype=FP16), 1),
        (Shape(num_kv_heads=2, group=1, head_dim=80, page_size=1, dtype=FP32, window=70), 3),
    ],
    ids=str,
)
def test_rows_that_decode_read_quantised_keys_and_values(
    shape: Shape, num_splits: int, codes: torch.dtype, device: torch.device
) -> None:
    check(make(shape, [(start, 1) for start in (0, 63, 200)], device), shape, codes, num_splits)


@CODES
@pytest.mark.parametrize(
    ("shape", "trees"),
    [
        (Shape(num_kv_heads=1, group=4, head_dim=64, page_size=64, dtype=BF16, tile_len=16), ()),
        (Shape(num_kv_heads=2, group=1, head_dim=80, page_size=1, dtype=FP32, tile_len=64, window=25), ()),
        (Shape(num_kv_heads=1, group=3, head_dim=32, page_size=16, dtype=BF16, tile_len=8), (0, 2)),
        (Shape(num_kv_heads=2, group=2, head_dim=16, page_size=1, dtype=FP32, tile_len=7, window=9), (1, 2)),
    ],
    ids=str,
)
def test_chunks_and_trees_read_quantised_keys_and_values(
    shape: Shape, trees: tuple[int, ...], codes: torch.dtype, device: torch.device
) -> None:
    check(make(shape, [(70, 8), (0, 17), (33, 5)], device, trees=trees), shape, codes, 2)


@CODES
def test_branches_read_quantised_keys_and_values(codes: torch.dtype, device: torch.device) -> None:
    shape = Shape(num_kv_heads=2, group=2, head_dim=16, page_size=4, dtype=FP32)
    batch = make(shape, [(14, 1)] * 3, device, shifts=[(11, 0), (11, 4), (11, 8)])
    check(batch, shape, codes, 1)


@CODES
@pytest.mark.parametrize(
    ("group_len", "num_layers", "num_kv_heads", "head_dim"), [(4, 3, 8, 128), (1, 1, 1, 16), (64, 2, 3, 80)]
)
def test_scales_go_where_their_slots_go(
    group_len: int, num_layers: int, num_kv_heads: int, head_dim: int, codes: torch.dtype, device: torch.device
) -> None:
    random, num_slots = Random(group_len), 400
    slots = torch.tensor(random.sample(range(1, num_slots), 4 * group_len)).view(2, -1)
    paths = [sorted(random.sample(range(2 * group_len), group_len)) for _ in range(2)]
    sources, dests = slots.gather(1, torch.tensor(paths)).to(device), slots[:, :group_len].contiguous().to(device)
    fences = [Fenced((num_layers, num_slots, num_kv_heads, head_dim), torch.uint8, device, 77) for _ in range(2)]
    fences.append(Fenced((num_layers, num_kv_heads, 2, num_slots), FP32, device))
    for seed, fence in enumerate(fences):
        generator = torch.Generator().manual_seed(seed)
        fence.tensor.copy_(torch.randint(0, 120, fence.tensor.shape, generator=generator))
    expected = [fence.tensor.clone() for fence in fences]
    for buffer in expected[:2]:
        buffer[:, dests.flatten()] = buffer[:, sources.flatten()]
    expected[2][..., dests.flatten()] = expected[2][..., sources.flatten()]
    keys, values, scales = (fence.tensor for fence in fences)
    copy.copy_slots(keys.view(codes), values.view(codes), sources, dests, scales)
    for fence, buffer in zip(fences, expected, strict=True):
        fence.check()
        assert torch.equal(fence.tensor, buffer)


@pytest.mark.parametrize("kv_cache_dtype", CODE_DTYPES)
def test_both_backends_read_the_same_after_the_same_writes_and_copies(
    kv_cache_dtype: str, device: torch.device
) -> None:
    resolved = resolve(configure(page_size=4, pool_tokens=256, context=32), ModelTraits(vocab_size=9))
    opened, generator = open_device(device), torch.Generator().manual_seed(2)
    table = PageTable(resolved, 0, opened)
    table.pages[0, :6] = torch.tensor([9, 3, 7, 1, 12, 5])
    layer = KvShape(num_kv_heads=2, head_dim=16, scale=SCALE, dtype=FP32).kept_as(kv_cache_dtype)
    number = torch.arange(20, device=device)
    slots = table.slots(torch.zeros_like(number), number)
    heads = torch.randn((20, 8, 16), generator=generator).to(device)
    cos_sin = cos_sin_at(number, frequencies(Rope(theta=100.0), 16, device), FP32)
    segments = make_segments([0], [12], [4], are_rounds=False, device=device)
    outputs = []
    for each in (TorchAttention(opened), backend.TritonAttention(opened)):
        cache = KvCache(table, [layer, layer])
        for index in range(2):
            query = each.write(cache, index, slots, heads[:, :6] * (1 + index), heads[:, 6:], cos_sin)
        each.copy(cache, slots[None, 16:], slots[None, 10:14])  # an accepted path, brought to the front
        read = each.read(table, segments, cache.kv)
        outputs.append(torch.stack([read(query[12:16], cache.layer(index)) for index in range(2)]))
    assert_near(outputs[0], outputs[1], steps=8)
