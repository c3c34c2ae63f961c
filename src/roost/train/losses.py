"""Losses of a draft head, and the noise that its draws share with the target's.

A token is drawn as the argmax of logits / T plus Gumbel noise, and a draft with the same noise: it is right where both
argmaxes agree. `kl` fits the distribution; `coupled` adds the cross-entropy of the perturbed logits to the token that
the target would draw; `match` adds the logarithm of the probability that both draw the same. Noise is a hash of where
it is used, so that it needs no memory and is the same on every device. Called by the training loop and the target.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

LOSSES = ("kl", "coupled", "match")
DRAWN_TEMPERATURES = (0.7, 1.0)  # positions are trained at these in turn, besides greedily
EVALUATED_TEMPERATURE = 0.7
EVALUATION_SEED = 1  # of the noise on held-out rows
NUM_MATCHED = 4  # most probable tokens of the target that `match` sums over
_EXPONENT_MAX = 60.0  # keeps float32 finite; such a token has no share in the loss
_MASK = 0xFFFFFFFF
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B))  # of a 32-bit integer hash with little bias ("lowbias32")
_PLACE_FACTOR, _SEED_FACTOR = 0x9E3779B1, 0x85EBCA6B


@dataclass(frozen=True, slots=True, kw_only=True)
class LossWeights:
    """How the parts of a loss other than `kl` are weighted."""

    divergence: float = 0.5  # forward KL over the draft vocabulary
    greedy: float = 0.2  # cross-entropy to the target's best token
    drawn: float = 0.3  # at a temperature


def gumbel(seed: Tensor | int, places: Tensor, tokens: Tensor) -> Tensor:
    """Gumbel noise [*places.shape, len(tokens)] in float32: a function of the seed, a position and a token's id."""
    mixed = _hashed(places.to(torch.int64) * _PLACE_FACTOR + seed * _SEED_FACTOR)
    return gumbel_of(_hashed(mixed[..., None] + tokens.to(torch.int64) * _PLACE_FACTOR))


def gumbel_of(bits: Tensor) -> Tensor:
    """Gumbel noise of 32 random bits; from 23 of them, with which a float32 stays strictly between 0 and 1."""
    uniform = ((bits >> 9).to(torch.float32) + 0.5) * 2**-23
    return -(-uniform.log()).log()


def drawn_tokens(logits: Tensor, temperature: float, places: Tensor, tokens: Tensor) -> Tensor:
    """Which of the tokens is drawn at each position, by its place in `tokens`, with the noise of evaluation."""
    noise = gumbel(EVALUATION_SEED, places, tokens)
    return (logits.to(torch.float32) / temperature + noise).argmax(dim=-1)


def _hashed(values: Tensor) -> Tensor:
    """A 32-bit hash of each number, in int64: torch has few operations on unsigned ones."""
    values = values & _MASK
    for shift, factor in _ROUNDS:
        values = ((values ^ (values >> shift)) * factor) & _MASK
    return values ^ (values >> 16)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """How the positions of one step are drawn."""

    seed: Tensor  # scalar
    places: Tensor  # [num_rows, row_len] of the predicted tokens, for the noise
    tokens: Tensor  # ids of the draft vocabulary
    top: Tensor  # [num_rows, row_len, number] the target's most probable tokens, by their places in `tokens`


def step_loss(
    kind: str, logits: Tensor, target_logits: Tensor, counts: Tensor, draw: Draw, weights: LossWeights
) -> Tensor:
    """The loss of one unrolled step: logits [num_rows, row_len, num_tokens], averaged where `counts` is 1."""
    logits, wanted = logits.to(torch.float32), target_logits.to(torch.float32)
    losses = divergence(logits, wanted)
    if kind != "kl":
        temperature = drawn_temperatures(draw)
        drawn = coupled if kind == "coupled" else mismatch
        losses = (
            weights.divergence * losses
            + weights.greedy * chosen(logits, draw.top[..., 0])
            + weights.drawn * drawn(logits, wanted, temperature, draw)
        )
    return (losses * counts).sum() / counts.sum().clamp(min=1)


def drawn_temperatures(draw: Draw) -> Tensor:
    """A temperature for each position, the same in every step: a hash of the seed and the position."""
    first = (_hashed(draw.places.to(torch.int64) + draw.seed * _SEED_FACTOR) & 1).to(torch.bool)
    return torch.where(first, *DRAWN_TEMPERATURES)


def divergence(logits: Tensor, wanted: Tensor) -> Tensor:
    """Cross-entropy to the target over the draft vocabulary: forward KL up to a constant."""
    return logits.logsumexp(dim=-1) - (wanted.softmax(dim=-1) * logits).sum(-1)


def chosen(logits: Tensor, tokens: Tensor) -> Tensor:
    """Cross-entropy to one token of the draft vocabulary at each position."""
    return logits.logsumexp(dim=-1) - _at(logits, tokens)


def coupled(logits: Tensor, wanted: Tensor, temperature: Tensor, draw: Draw) -> Tensor:
    """Cross-entropy of the head's perturbed logits to the token that the target draws with the same noise."""
    noise = gumbel(draw.seed, draw.places, draw.tokens)
    scale = (1 / temperature)[..., None]
    return chosen(logits * scale + noise, (wanted * scale + noise).argmax(dim=-1))


def mismatch(logits: Tensor, wanted: Tensor, temperature: Tensor, draw: Draw) -> Tensor:
    """Minus the logarithm of the probability that both draw the same token, over all noise.

    That both draw v has the probability 1 / sum over u of max(p_u / p_v, q_u / q_v). The sum over v is cut to the
    target's most probable tokens.
    """
    scale = (1 / temperature)[..., None]
    mine, theirs = logits * scale, wanted * scale
    total = torch.zeros_like(mine[..., 0])
    for number in range(draw.top.shape[-1]):
        token = draw.top[..., number]
        more = torch.maximum(mine - _at(mine, token)[..., None], theirs - _at(theirs, token)[..., None])
        total = total + 1 / more.clamp(max=_EXPONENT_MAX).exp().sum(dim=-1)
    return -total.clamp(min=1e-9).log()


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    """The value of one token at each position: a sum, since the gradient of a gather is a pass over memory."""
    number = torch.arange(values.shape[-1], device=values.device)
    return values.masked_fill(number != tokens[..., None], 0).sum(dim=-1)
