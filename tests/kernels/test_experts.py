"""A mixture of experts equals the reference, for few tokens and for many, however they spread over the experts."""

import pytest
import torch
from torch import Tensor

from roost.layers.experts import Experts, Routed, best_experts
from roost.layers.linear import PlainLinear
from roost.layers.ops import CLAMPED, TORCH_OPS

kernels = pytest.importorskip("roost.kernels.experts")
routing = pytest.importorskip("roost.kernels.routing")


def experts_of(
    number: int, hidden: int, width: int, activation: str, dtype: torch.dtype, *, biased: bool = False
) -> Experts:
    """Random ones."""
    generator = torch.Generator().manual_seed(number * hidden + width)
    gate_up = (torch.randn((number, 2 * width, hidden), generator=generator) / hidden**0.5).to(dtype)
    down = (torch.randn((number, hidden, width), generator=generator) / width**0.5).to(dtype)
    biases = None
    if biased:
        lengths = (2 * width, hidden)
        first, second = ((torch.randn((number, each), generator=generator) * 4).to(dtype) for each in lengths)
        biases = first, second
    return made_of((gate_up, down), biases, activation)


def made_of(matrices: tuple[Tensor, Tensor], biases: tuple[Tensor, Tensor] | None, activation: str) -> Experts:
    """Experts that stand side by side."""
    number = len(matrices[0])
    gate_up, down = (
        [PlainLinear(each, bias) for each, bias in zip(matrix, [None] * number if own is None else own, strict=True)]
        for matrix, own in zip(matrices, biases or (None, None), strict=True)
    )
    return Experts(gate_up=gate_up, down=down, activation=activation, stacked=matrices, biases=biases)


def on(device: torch.device, experts: Experts) -> Experts:
    """The same there."""
    assert experts.stacked is not None
    (gate_up, down), biases = (each.to(device) for each in experts.stacked), None
    if experts.biases is not None:
        biases = experts.biases[0].to(device), experts.biases[1].to(device)
    return made_of((gate_up, down), biases, experts.activation)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_tokens", "number", "num_active", "hidden", "width"),
    [(1, 8, 4, 48, 24), (7, 5, 2, 130, 70), (70, 6, 4, 48, 100), (300, 3, 1, 20, 12)],
)
def test_experts_with_biases_and_a_clamped_gate_say_what_the_reference_says(
    num_tokens: int, number: int, num_active: int, hidden: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    experts = on(device, experts_of(number, hidden, width, CLAMPED, torch.float32, biased=True))
    rounded = on(device, experts_of(number, hidden, width, CLAMPED, dtype, biased=True))
    normed = (torch.randn((num_tokens, hidden), generator=generator) * 3).to(device)  # gates on both sides of the limit
    routed = routed_by(torch.randn((num_tokens, number), generator=generator).to(device), num_active)
    theirs = TORCH_OPS.mix_experts(normed, routed, experts)
    ours = kernels.mix_experts(normed.to(dtype), Routed(ids=routed.ids, shares=routed.shares.to(dtype)), rounded)
    error = (ours.float() - theirs).abs() / theirs.abs().mean()
    assert error.max() < (1e-5 if dtype == torch.float32 else 0.2)
    assert error.mean() < (1e-6 if dtype == torch.float32 else 0.02)


@pytest.mark.parametrize("num_tokens", [3, 90])
def test_all_tokens_may_go_through_one_expert(num_tokens: int, device: torch.device) -> None:
    experts = on(device, experts_of(9, 32, 16, "silu", torch.float32))
    normed = torch.randn((num_tokens, 32), generator=torch.Generator().manual_seed(3)).to(device)
    for expert in (0, 8):
        ids = torch.tensor([[expert, 4]] * num_tokens, device=device)
        routed = Routed(ids=ids, shares=torch.full((num_tokens, 2), 0.5, device=device))
        ours, theirs = kernels.mix_experts(normed, routed, experts), TORCH_OPS.mix_experts(normed, routed, experts)
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("num_pairs", [1, 40, 3000])
def test_pairs_are_sorted_by_expert_and_stay_in_order(num_pairs: int, device: torch.device) -> None:
    ids = torch.randint(1, 6, (num_pairs,), generator=torch.Generator().manual_seed(num_pairs)).to(device)
    pairs, ends = routing.sort_by_expert(ids, 7)
    assert torch.equal(pairs, ids.sort(stable=True).indices)
    assert torch.equal(ends, torch.bincount(ids, minlength=7).cumsum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_normed", [True, False])
@pytest.mark.parametrize(("number", "num_active"), [(8, 2), (5, 5), (40, 6), (3, 1)])
def test_the_best_experts_are_those_of_the_reference(
    number: int, num_active: int, is_normed: bool, dtype: torch.dtype, device: torch.device
) -> None:
    scores = torch.randn((60, number + 3), generator=torch.Generator().manual_seed(number)).to(device, dtype)
    scores = (scores * 3).round()[:, 1 : number + 1]  # many are the same
    ours = routing.best_experts(scores, num_active, is_normed)
    theirs = TORCH_OPS.best_experts(scores, num_active, is_normed)
    assert torch.equal(ours.ids, theirs.ids)
    torch.testing.assert_close(ours.shares, theirs.shares, atol=1e-6 if dtype == torch.float32 else 4e-3, rtol=1e-5)


def test_no_tokens_say_nothing(device: torch.device) -> None:
    experts = on(device, experts_of(4, 32, 16, "silu", torch.float32))
    none = Routed(ids=torch.empty((0, 2), dtype=torch.int64, device=device), shares=torch.empty((0, 2), device=device))
    assert kernels.mix_experts(torch.empty((0, 32), device=device), none, experts).shape == (0, 32)
