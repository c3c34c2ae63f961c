"""Mixtures of experts: which experts each token goes through, and what they say together; the torch reference.

A router scores all experts; the few best of each token are run, and what they say is summed in the order of their
scores, weighted by their shares. An expert's products are those of any other projection, so a token's bits do not
depend on the batch where theirs do not. Called by feed-forwards, through `Ops`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from roost.layers.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Experts:
    """The experts of one layer, each a gated feed-forward."""

    gate_up: Sequence[Linear]  # gate and up stacked
    down: Sequence[Linear]
    activation: str  # as `Ops.gate_up` takes it
    # the same matrices side by side, [num_experts, out, in], of which the projections are views; None: they are not
    stacked: tuple[Tensor, Tensor] | None
    biases: tuple[Tensor, Tensor] | None = None  # [num_experts, out] of both, which the projections add


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routed:
    """The experts of each token, best first."""

    ids: Tensor  # [num_tokens, num_active] int64
    shares: Tensor  # [num_tokens, num_active] what each counts for


def best_experts(scores: Tensor, num_active: int, is_normed: bool) -> Routed:
    """The experts with the highest of scores [num_tokens, num_experts], by their probabilities in float32.

    Of several with the same score the first ones; `is_normed`: the shares of a token's experts sum up to one.
    """
    chances = scores.to(torch.float32).softmax(dim=-1)
    shares, ids = (each[:, :num_active] for each in chances.sort(dim=-1, descending=True, stable=True))
    if is_normed:
        shares = shares / shares.sum(dim=-1, keepdim=True)
    return Routed(ids=ids, shares=shares.to(scores.dtype))


def mix_experts(normed: Tensor, routed: Routed, experts: Experts, gate_up: Callable[[Tensor, str], Tensor]) -> Tensor:
    """What the experts of each token say of normed hidden states [num_tokens, hidden_size]: one after the other.

    `gate_up` is the operation of that name.
    """
    said = normed.new_empty((*routed.ids.shape, normed.shape[1]))  # [num_tokens, num_active, hidden_size]
    for expert in routed.ids.unique().tolist():
        tokens, places = torch.where(routed.ids == expert)
        gated = gate_up(experts.gate_up[expert](normed[tokens]), experts.activation)
        said[tokens, places] = experts.down[expert](gated)
    return weighted_sum(said, routed.shares)


def weighted_sum(said: Tensor, shares: Tensor) -> Tensor:
    """The sum [num_tokens, hidden_size] of what a token's experts say, from the first to the last."""
    weighted = said * shares[:, :, None]
    total = weighted[:, 0]
    for place in range(1, weighted.shape[1]):
        total = total + weighted[:, place]
    return total
