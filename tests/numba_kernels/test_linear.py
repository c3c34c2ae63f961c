"""Products from packed weights: what torch computes, the same bits for a token in any batch and on any team."""

import numpy as np
import pytest
import torch
from torch import Tensor

from roost.layers.gguf_blocks import BLOCK_KINDS, GgufLinear, GgufWeight
from roost.layers.linear import Linear, make_linear
from roost.layers.ops import ACTIVATIONS, TORCH_OPS, Residual
from roost.numba_kernels.ops import NUMBA_OPS, PackedLinear

EPS = 1e-5
COUNTS = (1, 2, 3, 5, 8, 9, 64)  # of tokens: alone, tiles of each width, few, and many


def gguf(kind: str, out_len: int, in_len: int, bias: Tensor | None = None) -> GgufLinear:
    """A projection by random blocks."""
    layout, generator = BLOCK_KINDS[kind], torch.Generator().manual_seed(out_len + in_len)
    blocks = torch.randint(0, 256, (out_len, in_len // 32, layout.num_bytes), generator=generator, dtype=torch.uint8)
    floats = torch.randn((out_len, in_len // 32, layout.num_floats), generator=generator) * 0.1
    blocks[..., : 2 * layout.num_floats] = floats.to(torch.float16).view(torch.uint8)
    return GgufLinear(GgufWeight(blocks=blocks, kind=layout), bias)


def kept(project: Linear, *, is_gated: bool = False) -> PackedLinear:
    """The same as the operations keep it."""
    packed = NUMBA_OPS.keep(project, is_gated)
    assert isinstance(packed, PackedLinear)
    return packed


def tokens(count: int, length: int) -> Tensor:
    """Random tokens: the first ones are the same whatever the count."""
    return torch.from_numpy(np.random.default_rng(7).standard_normal((64, length)).astype(np.float32))[:count] * 3


def normed(x: Tensor, weight: Tensor) -> Tensor:
    """The norm by these operations: torch's may round a token at a tie to the other neighbour."""
    return NUMBA_OPS.norm(x, weight, EPS)


def check(found: Tensor, expected: Tensor) -> None:
    """Equal but for the order of sums."""
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", BLOCK_KINDS)
@pytest.mark.parametrize("shape", [(16, 32), (96, 192), (40, 64)])  # the last group of outputs is cut in the last
def test_products_from_blocks_are_those_of_rounded_tokens(kind: str, shape: tuple[int, int]) -> None:
    bias, residual, norm = torch.randn(shape[0]), torch.randn(64, shape[0]), torch.rand(shape[1]) + 0.5
    project = gguf(kind, *shape, bias)
    packed = kept(project)
    for count in COUNTS:
        x = tokens(count, shape[1])
        check(packed(x), project(x))
        hidden, found = NUMBA_OPS.norm_linear(Residual(x), norm, EPS, packed)
        assert hidden is x
        check(found, project(normed(x, norm)))
        added = NUMBA_OPS.linear_add(x, packed, residual[:count], None)
        check(added.total(), residual[:count] + project(x))


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "int8"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("wide", [32, 40])  # 40: too ragged to be woven, so that the activation is torch's
def test_gate_and_up_are_multiplied_by_whoever_computes_them(kind: str, activation: str, wide: int) -> None:
    project: Linear = gguf(kind, 2 * wide, 64) if kind != "int8" else make_linear(torch.randn(2 * wide, 64), None, kind)
    packed, norm = kept(project, is_gated=True), torch.rand(64) + 0.5
    assert packed.is_gated == (wide == 32)
    for count in COUNTS:
        x = tokens(count, 64)
        found = NUMBA_OPS.norm_gate_up(Residual(x), norm, EPS, packed, activation)[1]
        both = project(normed(x, norm))
        gate, up = both.chunk(2, dim=-1)
        check(found, ACTIVATIONS[activation](gate) * up)


@pytest.mark.parametrize("shape", [(16, 32), (100, 70), (7, 5), (33, 129)])
def test_int8_products_have_the_bits_of_torchs(shape: tuple[int, int]) -> None:
    project = make_linear(torch.randn(shape), torch.randn(shape[0]), "int8")
    packed = kept(project)
    for count in COUNTS:
        x = tokens(count, shape[1])
        assert torch.equal(packed(x), project(x)), count


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, "int8"])
def test_a_tokens_result_has_the_same_bits_in_any_batch(kind: str) -> None:
    project: Linear = gguf(kind, 48, 96) if kind != "int8" else make_linear(torch.randn(48, 96), None, kind)
    packed, norm = kept(project), torch.rand(96)
    x = tokens(64, 96)
    alone = torch.cat([NUMBA_OPS.norm_linear(Residual(x[n : n + 1]), norm, EPS, packed)[1] for n in range(64)])
    for count in COUNTS:
        for first in (0, 3):
            part = slice(first, first + count)
            found = NUMBA_OPS.norm_linear(Residual(x[part]), norm, EPS, packed)[1]
            assert torch.equal(found, alone[part]), (count, first)


@pytest.mark.parametrize("kind", [*BLOCK_KINDS, "int8"])
def test_rows_are_looked_up_as_the_floats_they_stand_for(kind: str) -> None:
    weight = torch.randn(50, 64)
    project: Linear = gguf(kind, 50, 64) if kind != "int8" else make_linear(weight, None, kind)
    ids = torch.tensor([0, 49, 17, 16, 15, 17])
    found = kept(project).rows(ids)
    if isinstance(project, GgufLinear):
        torch.testing.assert_close(found, project.rows(ids), rtol=1e-6, atol=1e-6)
    else:
        torch.testing.assert_close(found, weight[ids], rtol=0, atol=float(weight.abs().max()) / 127)


def test_a_token_of_zeros_or_of_none_is_no_trouble() -> None:
    packed = kept(gguf("Q4_1", 32, 64))
    assert torch.equal(packed(torch.zeros(2, 64)), torch.zeros(2, 32))
    assert packed(torch.zeros(0, 64)).shape == (0, 32)


def test_small_operations_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    for length in (5, 16, 70):
        x, y = (torch.randn((6, length), generator=generator) for _ in range(2))
        weight = torch.rand(length, generator=generator)
        check(NUMBA_OPS.norm(x, weight, EPS), TORCH_OPS.norm(x, weight, EPS))
        total, normed = NUMBA_OPS.add_norm(Residual(x, y), weight, EPS)
        assert torch.equal(total, x + y)
        check(normed, TORCH_OPS.norm(x + y, weight, EPS))
        assert torch.equal(NUMBA_OPS.concat([x, y[:, :3], x]), torch.cat([x, y[:, :3], x], dim=-1))
    heads, weights = torch.randn((6, 7, 24), generator=generator)[:, 1:5], torch.rand((4, 24), generator=generator)
    check(NUMBA_OPS.norm(heads, weights, EPS), TORCH_OPS.norm(heads, weights, EPS))
    table, ids = torch.randn((9, 37), generator=generator), torch.tensor([8, 0, 3, 3])
    assert torch.equal(NUMBA_OPS.look_up(table, ids), table[ids])
    positions, frequency = torch.tensor([0, 1, 77, 8191]), torch.rand(12)
    for found, expected in zip(
        NUMBA_OPS.cos_sin(positions, frequency, torch.float32),
        TORCH_OPS.cos_sin(positions, frequency, torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
