"""FP8 weights: near the floats they are made of, and stacked so that every output keeps its own scale."""

import pytest
import torch
from torch import Tensor

from roost.layers.fp8 import FP8, Fp8Weight, quantise, round_tokens
from roost.layers.linear import Linear, make_linear, plain_form
from roost.layers.quantised import QuantisedWeight, stack


def drawn(out_len: int, in_len: int, block: tuple[int, int], seed: int = 0, *, rounds: bool = True) -> Fp8Weight:
    """A random weight with scales that differ a lot."""
    generator = torch.Generator().manual_seed(seed)
    scales = torch.rand((-(-out_len // block[0]), -(-in_len // block[1])), generator=generator) + 0.1
    values = (torch.randn((out_len, in_len), generator=generator) * 50).to(FP8)
    return Fp8Weight(values=values, scales=scales, block=block, rounds_tokens=rounds)


def test_weights_rounded_at_load_are_near_the_floats() -> None:
    weight = torch.randn(40, 96, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 40)[:, None]
    error = (quantise(weight).dequantise() - weight).norm(dim=1) / weight.norm(dim=1)
    assert error.max() < 0.03  # e4m3 has three bits behind the point: 2^-4 at most, each


def test_rows_of_zeros_stay_zero_and_the_largest_number_stays_finite() -> None:
    values, scales = round_tokens(torch.tensor([[0.0, 0.0], [3e38, -1.0], [1e-38, 0.0]]))
    assert values.float().isfinite().all() and scales.isfinite().all() and (scales > 0).all()
    assert torch.equal(values[0].float(), torch.zeros(2))


@pytest.mark.parametrize("block", [(1, 80), (16, 32), (16, 80), (1, 32)])
def test_a_stack_is_its_parts_one_below_the_other(block: tuple[int, int]) -> None:
    parts = [drawn(out_len, 80, block, seed) for seed, out_len in enumerate((48, 24, 24))]  # 24: not whole blocks
    whole = stack(parts)
    assert whole is not None and whole.shape == (96, 80)
    assert torch.equal(whole.dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_whole_blocks_are_stacked_as_they_are() -> None:
    whole = stack([drawn(32, 64, (16, 32), seed) for seed in range(3)])
    assert isinstance(whole, Fp8Weight) and whole.block == (16, 32) and whole.scales.shape == (6, 2)


def test_weights_that_cannot_share_scales_are_not_stacked() -> None:
    assert stack([drawn(32, 64, (16, 32)), drawn(32, 64, (16, 64))]) is None
    assert stack([drawn(32, 64, (1, 64)), drawn(32, 64, (1, 64), rounds=False)]) is None


class Halved(QuantisedWeight):
    """A made-up form: numbers that are kept at half their size."""

    form = "halved"

    def __init__(self, halves: Tensor) -> None:
        self.halves = halves

    @property
    def shape(self) -> tuple[int, int]:
        return self.halves.shape[0], self.halves.shape[1]

    def dequantise(self) -> Tensor:
        return self.halves * 2

    @classmethod
    def stack(cls, weights: "list[Halved]") -> "Halved":  # type: ignore[override]
        return Halved(torch.cat([each.halves for each in weights]))

    def linear(self, bias: Tensor | None) -> Linear:
        return lambda hidden: hidden @ self.dequantise().T


def test_a_made_up_form_becomes_floats_wherever_another_form_is_asked_for() -> None:
    halves, hidden = torch.randn(12, 16), torch.randn(3, 16)
    made = make_linear(Halved(halves), None, "fp32")
    assert torch.equal(made(hidden), make_linear(halves * 2, None, "fp32")(hidden))
    assert stack([Halved(halves), Halved(halves)]).shape == (24, 16)  # type: ignore[union-attr]
    assert stack([Halved(halves), drawn(12, 16, (1, 16))]) is None


@pytest.mark.parametrize(("weights", "plain"), [("fp8", "bf16"), ("bf16", "bf16"), ("int8", "int8"), ("fp32", "fp32")])
def test_what_a_checkpoint_leaves_in_floats_is_not_quantised(weights: str, plain: str) -> None:
    assert plain_form(weights) == plain


def test_a_projection_kept_as_fp8_adds_its_bias() -> None:
    weight, bias = quantise(torch.randn(24, 32)), torch.randn(24)
    hidden = torch.randn(5, 32).to(torch.bfloat16)
    expected = hidden.float() @ weight.dequantise().T + bias
    torch.testing.assert_close(make_linear(weight, bias, "fp8")(hidden).float(), expected, rtol=0.03, atol=0.1)
