"""Products by FP8 weights equal the reference at odd shapes, however they are cut, with scales of every kind."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roost.layers.fp8 import FP8, Fp8Weight, quantise
from roost.layers.fp8 import round_tokens as reference_tokens
from tests.support.canaries import Fenced

kernel = pytest.importorskip("roost.kernels.fp8_linear")
tokens = pytest.importorskip("roost.kernels.fp8_tokens")

SHAPES = [(1, 48, 64), (3, 40, 100), (17, 64, 192), (33, 24, 80)]  # tokens, outputs, inputs
TILINGS = [
    kernel.Tiling(1, 8, 32),
    kernel.Tiling(1, 8, 32, num_splits=2),
    kernel.Tiling(16, 16, 32),
    kernel.Tiling(16, 32, 64, num_splits=3),
    kernel.Tiling(16, 64, 32, swapped=True),
    kernel.Tiling(16, 64, 32, num_splits=2, swapped=True),
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
@pytest.mark.parametrize("tiling", [TILINGS[0], TILINGS[2], kernel.Tiling(16, 64, 32, num_splits=2, swapped=True)])
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
    for tiling in (kernel.Tiling(16, 16, 64), kernel.Tiling(64, 64, 64, swapped=True)):
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


@pytest.mark.parametrize("num_tokens", [1, 5, 33, kernel.ROUNDED_FROM - 1, kernel.ROUNDED_FROM])
@pytest.mark.parametrize("rounds", [False, True])
def test_a_projection_of_any_number_of_tokens(num_tokens: int, rounds: bool, device: torch.device) -> None:
    hidden, weight = drawn((num_tokens, 48, 64), device)
    bias = torch.randn(48, device=device).to(torch.bfloat16)
    weight = replace(weight, rounds_tokens=rounds)
    project = kernel.make_projection(weight, bias)
    is_rounded = rounds and num_tokens >= kernel.ROUNDED_FROM  # then the tokens are e4m3, too
    check(project(hidden), hidden, weight, bias, error=0.02 if is_rounded else 1e-5)
    expected = hidden.float() @ weight.dequantise().T + bias.float()
    error = (project(hidden).float() - expected).norm() / expected.norm()
    assert (error > 0.01) == is_rounded, error


@pytest.mark.parametrize("shape", [(17, 36), (36, 20)])
@pytest.mark.parametrize("num_tokens", [3, kernel.ROUNDED_FROM + 1])
def test_a_projection_of_odd_sizes(shape: tuple[int, int], num_tokens: int, device: torch.device) -> None:
    hidden, weight = drawn((num_tokens, *shape), device)
    check(kernel.make_projection(weight, None)(hidden), hidden, weight)


@pytest.mark.parametrize("block", [(16, 32), (16, 20)])  # a multiple of what a kernel reads at once, and none
def test_a_projection_with_scales_by_block(block: tuple[int, int], device: torch.device) -> None:
    values = (torch.randn((48, 80), generator=torch.Generator().manual_seed(0)) * 20).to(device, FP8)
    scales = torch.rand((3, -(-80 // block[1])), device=device) + 0.1
    weight = Fp8Weight(values=values, scales=scales, block=block)
    for num_tokens in (1, 40):
        hidden = torch.randn((num_tokens, 80), device=device).to(torch.bfloat16)
        check(kernel.make_projection(weight, None)(hidden), hidden, weight, error=2.0**-8)
