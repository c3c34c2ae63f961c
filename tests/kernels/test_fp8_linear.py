"""Products by FP8 weights equal the reference at odd shapes, however they are cut, with scales of every kind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roost.layers.fp8 import FP8, Fp8Weight, quantise
from roost.layers.fp8 import round_tokens as reference_tokens
from tests.support.canaries import Fenced

kernel = pytest.importorskip("roost.kernels.fp8_linear")
tilings = pytest.importorskip("roost.kernels.fp8_tilings")
tokens = pytest.importorskip("roost.kernels.fp8_tokens")

SHAPES = [(1, 48, 64), (3, 40, 100), (17, 64, 192), (33, 24, 80)]  # tokens, outputs, inputs
TILINGS = [
    tilings.Fp8Tiling(1, 8, 32),
    tilings.Fp8Tiling(1, 8, 32, num_splits=2),
    tilings.Fp8Tiling(16, 16, 32),
    tilings.Fp8Tiling(16, 32, 64, num_splits=3),
    tilings.Fp8Tiling(16, 64, 32, swapped=True),
    tilings.Fp8Tiling(16, 64, 32, num_splits=2, swapped=True),
]


def drawn(shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Fp8Weight]:
    """Tokens that lie further apart than they are long, and a weight with scales that differ."""
    num_tokens, out_len, in_len = shape
    generator = torch.Generator().manual_seed(sum(shape))
    wide = torch.randn((num_tokens, in_len + 24), generator=generator).to(device, torch.bfloat16)
    weight = torch.randn((out_len, in_len), generator=generator) * torch.logspace(-2, 1, out_len)[:, None]
    return wide[:, 8 : 8 + in_len], quantise(weight.to(device))


def check(found: Tensor, hidden: Tensor, weight: Fp8Weight, bias: Tensor | None = None, *, error: float = 1e-5) -> None:
    expected = hidden.float() @ weight.dequantise().T
    expected = expected if bias is None else expected + bias.float()
    size = (hidden.float().norm(dim=1)[:, None] * weight.dequantise().norm(dim=1)[None, :]).clamp_(min=1e-6)
    distance = (found.float() - expected).abs()
    assert (distance <= error * size + expected.abs() * 2.0**-7).all(), (distance / size).max()  # bfloat16's rounding


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tiling", TILINGS)
def test_products_of_bf16_tokens(shape: tuple[int, int, int], tiling: object, device: torch.device) -> None:
    hidden, weight = drawn(shape, device)
    bias = torch.randn(shape[1], device=device).to(torch.bfloat16)
    arrivals = torch.zeros(512, dtype=torch.int32, device=device)
    out = Fenced((shape[0], shape[1]), torch.bfloat16, device)
    kernel.fp8_linear(hidden, weight, tiling, bias=bias, arrivals=arrivals, out=out.tensor)
    out.check()
    check(out.tensor, hidden, weight, bias)
    assert not arrivals.any()  # as the next launch expects it
    again = kernel.fp8_linear(hidden, weight, tiling, bias=bias, arrivals=arrivals)
    assert torch.equal(again, out.tensor)


@pytest.mark.parametrize("block", [(16, 32), (1, 64), (64, 64), (16, 96)])
@pytest.mark.parametrize("tiling", [TILINGS[0], TILINGS[2], tilings.Fp8Tiling(16, 64, 32, num_splits=2, swapped=True)])
def test_products_with_scales_by_block(block: tuple[int, int], tiling: object, device: torch.device) -> None:
    out_len, in_len = 72, 200  # the last block is cut, in both directions
    generator = torch.Generator().manual_seed(0)
    scales = torch.rand((-(-out_len // block[0]), -(-in_len // block[1])), generator=generator) + 0.1
    values = (torch.randn((out_len, in_len), generator=generator) * 20).to(FP8)
    weight = Fp8Weight(values=values.to(device), scales=scales.to(device), block=block)
    hidden = torch.randn((5, in_len), generator=generator).to(device, torch.bfloat16)
    arrivals = torch.zeros(512, dtype=torch.int32, device=device)
    check(kernel.fp8_linear(hidden, weight, tiling, arrivals=arrivals), hidden, weight)


def test_every_e4m3_number_is_converted_exactly(device: torch.device) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 127) == 127] = 0  # the two that are no numbers
    values = codes.view(FP8).repeat(32, 1).to(device)
    weight = Fp8Weight(values=values, scales=torch.ones((32, 1), device=device), block=(1, 256))
    unit = torch.eye(256, device=device).to(torch.bfloat16)
    for tiling in (tilings.Fp8Tiling(16, 16, 64), tilings.Fp8Tiling(64, 64, 64, swapped=True)):
        assert torch.equal(kernel.fp8_linear(unit, weight, tiling).float(), values.float().T)


@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_rounded_each_with_its_own_scale(shape: tuple[int, int, int], device: torch.device) -> None:
    hidden, _ = drawn(shape, device)
    hidden = hidden * torch.logspace(-3, 3, len(hidden), device=device)[:, None].to(hidden.dtype)
    out = Fenced((len(hidden), hidden.shape[1] // 2), torch.bfloat16, device)  # two numbers to an element
    values, scales = tokens.round_tokens(hidden, out=out.tensor.view(FP8))
    out.check()
    expected, expected_scales = reference_tokens(hidden)
    torch.testing.assert_close(scales, expected_scales)
    assert torch.equal(values.float(), expected.float())


SIZES = [1, 5, tilings.ROUNDED_FROM - 1, tilings.ROUNDED_FROM, 40, tilings.SCALED_MM_FROM - 1, tilings.SCALED_MM_FROM]


@pytest.mark.parametrize("num_tokens", SIZES)
@pytest.mark.parametrize("rounds", [False, True])
def test_a_projection_of_any_number_of_tokens(num_tokens: int, rounds: bool, device: torch.device) -> None:
    hidden, weight = drawn((num_tokens, 48, 64), device)
    bias = torch.randn(48, device=device).to(torch.bfloat16)
    project = kernel.make_projection(replace(weight, rounds_tokens=rounds), bias)
    is_rounded = rounds and num_tokens >= tilings.ROUNDED_FROM  # then the tokens are e4m3, too
    check(project(hidden), hidden, weight, bias, error=0.02 if is_rounded else 1e-5)
    expected = hidden.float() @ weight.dequantise().T + bias.float()
    error = (project(hidden).float() - expected).norm() / expected.norm()
    assert (error > 0.01) == is_rounded, error


@pytest.mark.parametrize("shape", [(17, 36), (36, 20)])
@pytest.mark.parametrize("num_tokens", [3, tilings.ROUNDED_FROM, tilings.SCALED_MM_FROM + 1])
def test_a_projection_of_odd_sizes(shape: tuple[int, int], num_tokens: int, device: torch.device) -> None:
    hidden, weight = drawn((num_tokens, *shape), device)
    error = 0.03 if num_tokens >= tilings.ROUNDED_FROM else 1e-5
    check(kernel.make_projection(weight, None)(hidden), hidden, weight, error=error)


@pytest.mark.parametrize("block", [(16, 32), (16, 48), (16, 20)])  # what kernels read at once: all, a part, not at all
@pytest.mark.parametrize("num_tokens", [1, 20, 40, 70])
def test_a_projection_with_scales_by_block(num_tokens: int, block: tuple[int, int], device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    values = (torch.randn((48, 80), generator=generator) * 20).to(FP8)
    scales = torch.rand((3, -(-80 // block[1])), generator=generator) + 0.1
    weight = Fp8Weight(values=values.to(device), scales=scales.to(device), block=block)
    hidden = torch.randn((num_tokens, 80), generator=generator).to(device, torch.bfloat16)
    check(kernel.make_projection(weight, None)(hidden), hidden, weight, error=2.0**-8)


@pytest.mark.parametrize("num_tokens", [1, 2, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (960, 576), (576, 1536)])
def test_tilings_cover_the_weights_and_keep_multiprocessors_busy(num_tokens: int, shape: tuple[int, int]) -> None:
    out_len, in_len = shape
    for columns, is_rounded in ((in_len, False), (in_len, True), (128, False)):
        tiling = tilings.fp8_tiling(num_tokens, out_len, in_len, columns=columns, is_rounded=is_rounded)
        assert tiling.block_m >= min(num_tokens, 64)  # weights are read once
        assert columns == in_len or columns % tiling.block_k == 0
        assert tiling.num_splits == 1 or tiling.num_splits * tiling.block_k <= in_len
        assert 2 * tiling.stage_bytes(1 if is_rounded else 2) < 100_000  # two stages fit every GPU that has FP8
        assert out_len < 4096 or -(-out_len // tiling.block_n) * tiling.num_splits >= 64
