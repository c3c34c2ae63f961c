"""Truncation: which tokens top-k, top-p and min-p leave to draw from; and the order of tokens.

Probabilities are whole numbers: weights in units of 2**-40 of the largest, so that every sum is exact in any order, and
what a row keeps depends neither on the batch around it nor on how a device adds. The draw itself is `layers.gumbel`'s.
Pure functions over [n, vocab] tensors, without a host sync. Called by the sampler; logprobs shares the order of tokens.
"""

import torch
from torch import Tensor

WEIGHT_ONE = 2**40  # weight of the most likely token
VOCAB_SIZE_MAX = 2**22  # so that a sum of weights stays below 2**63
RANKED_FIRST = 1024  # tokens that nearly always hold what top-p wants


def sane(logits: Tensor) -> Tensor:
    """Logits without NaN (never chosen) and without +inf (as large as a float gets)."""
    return torch.nan_to_num(logits, nan=-torch.inf, posinf=torch.finfo(logits.dtype).max, neginf=-torch.inf)


def ranking_keys(logits: Tensor) -> Tensor:
    """Distinct int64 keys [n, vocab] of sane float32 logits: higher logits have higher ones, then lower ids."""
    vocab_size = logits.shape[-1]
    bits = (logits + 0.0).view(torch.int32)  # + 0.0: both zeros are one
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # a negative float's bits count down
    return (
        ordered.to(torch.int64).bitwise_left_shift_(32).add_(torch.arange(vocab_size - 1, -1, -1, device=logits.device))
    )


def weights_of(logits: Tensor, temperatures: Tensor) -> Tensor:
    """Weights [n, vocab], int64, of sane logits at the rows' temperatures; the largest of a row is WEIGHT_ONE."""
    best = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(logits.dtype).min)  # finite, if all is -inf too
    exponents = (logits.to(torch.float64) - best) / temperatures.unsqueeze(1)
    return (exponents.exp() * WEIGHT_ONE).round().to(torch.int64)


def truncated(logits: Tensor, weights: Tensor, top_k: Tensor, top_p: Tensor, k_max: int) -> Tensor:
    """The weights, 0 outside the row's `top_k` best tokens and the fewest of those that hold `top_p` of their sum.

    `top_k` is [n], at most `k_max`, which is at most vocab; equal logits are kept lowest ids first.
    """
    keys = ranking_keys(logits)
    if k_max < keys.shape[-1]:
        best_keys, ids = keys.topk(k_max, dim=-1)  # [n, k_max] best first
        in_top_k = torch.arange(k_max, device=logits.device) < top_k.unsqueeze(1)
        best = weights.gather(1, ids) * in_top_k
        sums = best.cumsum(dim=-1)
        total = sums[:, -1:]
    else:
        total = weights.sum(dim=-1, keepdim=True)
        best_keys, ids = _ranked(keys, weights, total, top_p)
        in_top_k = torch.ones_like(ids, dtype=torch.bool)
        best = weights.gather(1, ids)
        sums = best.cumsum(dim=-1)
    wanted = total.to(torch.float64) * top_p.unsqueeze(1)
    in_top_p = (sums - best).to(torch.float64) < wanted  # what comes before does not do
    num_kept = (in_top_k & in_top_p).sum(dim=-1, keepdim=True).clamp(min=1)
    return weights * (keys >= best_keys.gather(1, num_kept - 1))


def _ranked(keys: Tensor, weights: Tensor, total: Tensor, top_p: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and ids, best first: enough of them to hold `top_p` of every row, or all.

    To sort a vocabulary costs a CPU as much as a layer, and a few tokens nearly always do; there one can look.
    """
    if keys.device.type == "cpu" and keys.shape[-1] > RANKED_FIRST:
        best_keys, ids = keys.topk(RANKED_FIRST, dim=-1)
        held = weights.gather(1, ids).sum(dim=-1, keepdim=True).to(torch.float64)
        if bool((held >= total.to(torch.float64) * top_p.unsqueeze(1)).all()):
            return best_keys, ids
    return keys.sort(dim=-1, descending=True)


def above(weights: Tensor, min_p: Tensor) -> Tensor:
    """The weights, 0 where one is less than the row's `min_p` of the largest."""
    return weights * (weights >= min_p.unsqueeze(1) * WEIGHT_ONE)
