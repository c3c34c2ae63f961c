"""A mixture of experts equals the reference, for few tokens and for many, however they spread over the experts."""

from functools import partial

import pytest
import torch
from torch import Tensor

from roost.layers.experts import Experts, Routed, best_experts
from roost.layers.linear import PlainLinear
from roost.layers.ops import TORCH_OPS

kernels = pytest.importorskip("roost.kernels.experts")


def experts_of(number: int, hidden: int, width: int, activation: str, dtype: torch.dtype) -> Experts:
    """Random ones."""
    generator = torch.Generator().manual_seed(number * hidden + width)
    gate_up = (torch.randn((number, 2 * width, hidden), generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn((number, hidden, width), generator=generator) / width**0.5).to(dtype)
    return Experts(
        gate_up=[PlainLinear(each, None) for each in gate_up],
        down=[PlainLinear(each, None) for each in down],
        activation=activation,
        stacked=(gate_up, down),
    )


def on(device: torch.device, experts: Experts) -> Experts:
    """The same there."""
    assert experts.stacked is not None
    gate_up, down = (each.to(device) for each in experts.stacked)
    made = partial(PlainLinear, bias=None)
    return Experts(
        gate_up=[made(each) for each in gate_up],
        down=[made(each) for each in down],
        activation=experts.activation,
        stacked=(gate_up, down),
    )


def routed_by(scores: Tensor, num_active: int) -> Routed:
    """The best of them."""
    return best_experts(scores, num_active, is_normed=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
@pytest.mark.parametrize(
    ("num_tokens", "number", "num_active", "hidden", "width"),
    [(1, 8, 2, 48, 24), (5, 16, 4, 130, 70), (70, 6, 2, 48, 100), (33, 40, 8, 64, 33), (300, 3, 1, 20, 12)],
)
def test_experts_say_what_the_reference_says(
    num_tokens: int,
    number: int,
    num_active: int,
    hidden: int,
    width: int,
    activation: str,
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = on(device, experts_of(number, hidden, width, activation, dtype))
    normed = torch.randn((num_tokens, 2 * hidden), generator=generator).to(device, dtype)[:, 3 : 3 + hidden]
    routed = routed_by(torch.randn((num_tokens, number), generator=generator).to(device, dtype), num_active)
    ours, theirs = kernels.mix_experts(normed, routed, experts), TORCH_OPS.mix_experts(normed, routed, experts)
    if dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    else:
        torch.testing.assert_close(ours, theirs, atol=0.03, rtol=0.03)


@pytest.mark.parametrize("num_tokens", [3, 90])
def test_all_tokens_may_go_through_one_expert(num_tokens: int, device: torch.device) -> None:
    experts = on(device, experts_of(9, 32, 16, "silu", torch.float32))
    normed = torch.randn((num_tokens, 32), generator=torch.Generator().manual_seed(3)).to(device)
    for expert in (0, 8):
        ids = torch.tensor([[expert, 4]] * num_tokens, device=device)
        routed = Routed(ids=ids, shares=torch.full((num_tokens, 2), 0.5, device=device))
        ours, theirs = kernels.mix_experts(normed, routed, experts), TORCH_OPS.mix_experts(normed, routed, experts)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_tokens", [1, 40, 333])
def test_tiles_hold_every_pair_once_and_one_expert_each(num_tokens: int, device: torch.device) -> None:
    number, num_active = 7, 3
    scores = torch.randn((num_tokens, number), generator=torch.Generator().manual_seed(num_tokens))
    ids = routed_by(scores, num_active).ids.flatten().to(device)
    experts, firsts, pairs, ends = (each.tolist() for each in kernels._tiles(ids, number))
    found: list[int] = []
    for expert, first in zip(experts, firsts, strict=True):
        if expert < number:
            held = pairs[first : min(first + kernels._TILE_M, ends[expert])]
            assert held and all(int(ids[pair]) == expert for pair in held)
            found += held
    assert sorted(found) == list(range(len(ids)))


def test_no_tokens_say_nothing(device: torch.device) -> None:
    experts = on(device, experts_of(4, 32, 16, "silu", torch.float32))
    none = Routed(ids=torch.empty((0, 2), dtype=torch.int64, device=device), shares=torch.empty((0, 2), device=device))
    assert kernels.mix_experts(torch.empty((0, 32), device=device), none, experts).shape == (0, 32)
