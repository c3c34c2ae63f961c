"""A decoder's operations in Triton equal those in torch, whether projections are fused with their neighbours or not."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from roost.layers.linear import Linear, PlainLinear
from roost.layers.ops import TORCH_OPS, Ops, Residual
from tests.support.canaries import assert_near

ours = pytest.importorskip("roost.kernels.ops")
tilings = pytest.importorskip("roost.kernels.linear_tilings")

EPS, HIDDEN, WIDE = 1e-5, 16, 32
FEW, MANY = 3, tilings.TOKENS_MAX + 1


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Layer:
    """A layer without attention: a projection and a feed-forward."""

    def __init__(self, dtype: torch.dtype, device: torch.device, wrap: Callable[[Tensor], Linear]) -> None:
        def linear(out_len: int, in_len: int) -> Linear:
            return wrap((noise(out_len, in_len, seed=out_len) * in_len**-0.5).to(device, dtype))

        self.norm = torch.rand(HIDDEN, generator=torch.Generator().manual_seed(1)).to(device) + 0.5
        self.mix, self.out = linear(HIDDEN, HIDDEN), linear(HIDDEN, HIDDEN)
        self.gate_up, self.down = linear(2 * WIDE, HIDDEN), linear(HIDDEN, WIDE)

    def run(self, ops: Ops, stream: Residual) -> Tensor:
        """What comes out of it."""
        hidden, mixed = ops.norm_linear(stream, self.norm, EPS, self.mix)
        stream = ops.linear_add(ops.linear(mixed, self.out), self.mix, hidden, self.norm)
        hidden, gated = ops.norm_gate_up(stream, self.norm, EPS, self.gate_up, "silu")
        return ops.add_norm(ops.linear_add(gated, self.down, hidden, None), self.norm, EPS)[1]


def plain(weight: Tensor) -> Linear:
    return PlainLinear(weight, None)


def biased(weight: Tensor) -> Linear:
    return PlainLinear(weight, torch.ones_like(weight[:, 0]))


def of_another_form(weight: Tensor) -> Linear:
    return lambda x: x @ weight.T


@pytest.mark.parametrize(
    ("num_tokens", "wrap"), [(1, plain), (FEW, plain), (FEW, biased), (FEW, of_another_form), (MANY, plain)]
)
@pytest.mark.parametrize("is_sum", [False, True])
def test_a_stream_equals_the_reference(
    num_tokens: int, is_sum: bool, wrap: Callable[[Tensor], Linear], device: torch.device
) -> None:
    layer, wide = Layer(torch.bfloat16, device, wrap), Layer(torch.float32, device, wrap)
    hidden, added = (noise(num_tokens, HIDDEN, seed=seed).to(device, torch.bfloat16) for seed in (2, 3))
    stream = Residual(hidden, added if is_sum else None)
    exact = wide.run(TORCH_OPS, Residual((hidden + added if is_sum else hidden).to(torch.float32)))
    assert_near(layer.run(ours.TRITON_OPS, stream), exact.to(torch.bfloat16), steps=6.0)


def test_a_norm_that_was_half_done_for_another_weight_is_done_anew(device: torch.device) -> None:
    layer, wide = Layer(torch.bfloat16, device, plain), Layer(torch.float32, device, plain)
    hidden, other = noise(FEW, HIDDEN, seed=2).to(device, torch.bfloat16), torch.full_like(layer.norm, 3.0)
    results = []
    for ops, of, x in ((ours.TRITON_OPS, layer, hidden), (TORCH_OPS, wide, hidden.to(torch.float32))):
        stream = ops.linear_add(x, of.out, x, other)
        results.append(ops.norm_linear(stream, of.norm, EPS, of.mix)[1])
    assert_near(results[0], results[1].to(torch.bfloat16), steps=4.0)


@pytest.mark.parametrize(
    ("num_tokens", "in_len", "dtype", "wrap", "is_fused"),
    [
        (FEW, 32, torch.bfloat16, plain, True),
        (MANY - 1, 32, torch.bfloat16, plain, True),
        (MANY, 32, torch.bfloat16, plain, False),
        (FEW, 20, torch.bfloat16, plain, False),  # rows that do not begin at whole vectors
        (FEW, 32, torch.float32, plain, False),
        (FEW, 32, torch.bfloat16, biased, False),
        (FEW, 32, torch.bfloat16, of_another_form, False),
    ],
)
def test_only_few_tokens_of_a_plain_bfloat16_weight_are_fused(
    num_tokens: int,
    in_len: int,
    dtype: torch.dtype,
    wrap: Callable[[Tensor], Linear],
    is_fused: bool,
    device: torch.device,
) -> None:
    x, weight = (torch.zeros((rows, in_len), dtype=dtype, device=device) for rows in (num_tokens, 16))
    hidden = torch.zeros((num_tokens, 16), dtype=dtype, device=device)
    assert (ours.TRITON_OPS.linear_add(x, wrap(weight), hidden, None).added is None) == is_fused
