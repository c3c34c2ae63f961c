"""Noise is Gumbel's and shared; a head that equals its target is always right; each loss leads there."""

import pytest
import torch
from torch import Tensor

from roost.train.losses import (
    DRAWN_TEMPERATURES,
    LOSSES,
    Draw,
    LossWeights,
    coupled,
    drawn_temperatures,
    gumbel,
    gumbel_of,
    mismatch,
    step_loss,
)

ROWS, ROW_LEN, TOKENS = 3, 40, 12
WEIGHTS = LossWeights()


def draw_of(wanted: Tensor, seed: int = 7) -> Draw:
    places = torch.arange(wanted.shape[0] * wanted.shape[1]).view(wanted.shape[:2])
    top = wanted.topk(8, dim=-1).indices
    return Draw(seed=torch.tensor(seed), places=places, tokens=torch.arange(0, 2 * TOKENS, 2), top=top)


def logits(seed: int) -> Tensor:
    return 2 * torch.randn(ROWS, ROW_LEN, TOKENS, generator=torch.Generator().manual_seed(seed))


COUNTS = torch.ones(ROWS, ROW_LEN)


def test_noise_is_gumbels() -> None:
    noise = gumbel(3, torch.arange(2000), torch.arange(50))
    assert noise.isfinite().all() and noise.dtype is torch.float32
    assert abs(noise.mean().item() - 0.5772) < 0.02 and abs(noise.std().item() - 1.2825) < 0.02
    correlation = torch.corrcoef(
        torch.stack([noise[:-1].flatten(), noise[1:].flatten(), noise.roll(1, 1)[1:].flatten()])
    )
    assert (correlation - torch.eye(3)).abs().max() < 0.02


def test_noise_is_finite_whatever_the_bits() -> None:
    ends = gumbel_of(torch.tensor([0, 1, 511, 512, 2**31, 2**32 - 513, 2**32 - 512, 2**32 - 1]))
    assert ends.isfinite().all() and ends.tolist() == sorted(ends.tolist())


def test_noise_is_that_of_the_seed_the_place_and_the_token_whatever_else_there_is() -> None:
    noise = gumbel(3, torch.arange(10), torch.arange(30))
    assert torch.equal(gumbel(torch.tensor(3), torch.tensor([4, 2]), torch.tensor([7, 21])), noise[[4, 2]][:, [7, 21]])
    assert not torch.equal(gumbel(4, torch.arange(10), torch.arange(30)), noise)


def test_draws_with_noise_have_the_targets_distribution() -> None:
    wanted = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    drawn = (wanted + gumbel(1, torch.arange(40_000), torch.arange(4))).argmax(dim=-1)
    assert (torch.bincount(drawn, minlength=4) / 40_000 - wanted.exp()).abs().max() < 0.01


@pytest.mark.parametrize("temperature", [0.3, 0.7, 1.0])
def test_the_probability_of_a_match_is_how_often_both_draw_the_same(temperature: float) -> None:
    wanted, mine = (0.7 * torch.randn(8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    noise = gumbel(9, torch.arange(60_000), torch.arange(8))
    both = [(each / temperature + noise).argmax(dim=-1) for each in (wanted, mine)]
    found = (both[0] == both[1]).to(torch.float32).mean()
    draw = Draw(
        seed=torch.tensor(0), places=torch.zeros(1, 1), tokens=torch.arange(8), top=wanted.topk(8).indices[None, None]
    )
    expected = (-mismatch(mine[None, None], wanted[None, None], torch.full((1, 1), temperature), draw)).exp()
    assert abs(expected.item() - found.item()) < 0.01


def test_temperatures_are_those_in_use_and_differ_by_place() -> None:
    found = drawn_temperatures(draw_of(logits(0)))
    assert set(found.flatten().tolist()) == set(torch.tensor(DRAWN_TEMPERATURES).tolist())
    assert 0.25 < (found == found[0, 0]).to(torch.float32).mean() < 0.75


def test_kl_alone_is_forward_kl_up_to_a_constant() -> None:
    mine, wanted = logits(1), logits(2)
    found = step_loss("kl", mine, wanted, COUNTS, draw_of(wanted), WEIGHTS)
    entropy = -(wanted.softmax(-1) * wanted.log_softmax(-1)).sum(-1).mean()
    divergence = torch.nn.functional.kl_div(
        mine.log_softmax(-1).flatten(0, 1), wanted.log_softmax(-1).flatten(0, 1), log_target=True, reduction="batchmean"
    )
    torch.testing.assert_close(found, divergence + entropy)
    for loss in ("coupled", "match"):
        only = LossWeights(divergence=1.0, greedy=0.0, drawn=0.0)
        torch.testing.assert_close(step_loss(loss, mine, wanted, COUNTS, draw_of(wanted), only), found)


def test_the_coupled_part_is_cross_entropy_to_what_the_target_draws() -> None:
    mine, wanted = logits(1), logits(2)
    draw, temperature = draw_of(wanted), torch.full((ROWS, ROW_LEN), 0.7)
    noise = gumbel(7, draw.places, draw.tokens)
    winners = (wanted / 0.7 + noise).argmax(dim=-1)
    expected = torch.nn.functional.cross_entropy(
        (mine / 0.7 + noise).flatten(0, 1), winners.flatten(), reduction="none"
    )
    torch.testing.assert_close(coupled(mine, wanted, temperature, draw).flatten(), expected)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_does_not_count_has_no_gradient(loss: str) -> None:
    mine, wanted = logits(1).requires_grad_(), logits(2)
    counts = COUNTS.clone()
    counts[1] = 0
    step_loss(loss, mine, wanted, counts, draw_of(wanted), WEIGHTS).backward()
    assert mine.grad is not None and mine.grad.isfinite().all()
    assert not mine.grad[1].any() and mine.grad[0].any() and mine.grad[2].any()


@pytest.mark.parametrize("loss", LOSSES)
def test_descent_leads_to_a_head_that_draws_what_the_target_draws(loss: str) -> None:
    mine, wanted = logits(1).requires_grad_(), logits(2)
    optimizer = torch.optim.Adam([mine], lr=0.1)

    def right(temperature: float) -> float:
        noise = gumbel(99, draw_of(wanted).places, draw_of(wanted).tokens)
        both = [(each.detach() / temperature + noise).argmax(dim=-1) for each in (mine, wanted)]
        return float((both[0] == both[1]).to(torch.float32).mean())

    before = right(0.7)
    for seed in range(200):
        optimizer.zero_grad()
        step_loss(loss, mine, wanted, COUNTS, draw_of(wanted, seed), WEIGHTS).backward()
        optimizer.step()
    assert right(0.7) > max(0.85, before + 0.2), (before, right(0.7))
    assert (mine.argmax(-1) == wanted.argmax(-1)).to(torch.float32).mean() > 0.95


def test_the_largest_logits_stay_finite() -> None:
    mine, wanted = (logits(1) * 60).requires_grad_(), logits(2) * 60
    for loss in LOSSES:
        found = step_loss(loss, mine, wanted, COUNTS, draw_of(wanted), WEIGHTS)
        (gradient,) = torch.autograd.grad(found, mine)
        assert found.isfinite() and gradient.isfinite().all(), loss
