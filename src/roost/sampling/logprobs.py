"""Log-probabilities: what the model itself gave the chosen token and the best alternatives.

From raw logits, at temperature 1, before bias, penalties and truncation. Never chooses a token.
Called by the runner for the rows that ask for them.
"""

import torch
from torch import Tensor

from roost.sampling.draw import ranking_keys, sane


def log_probabilities(logits: Tensor, chosen: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities [n] of `chosen` [n], and ids and log-probabilities [n, num_top] of the best tokens, best first.

    `num_top` is the most that any row wants, 0 for none; equal logits are listed lowest ids first.
    """
    assert 0 <= num_top <= logits.shape[-1], (num_top, logits.shape)
    logits = sane(logits.to(torch.float32))
    best = logits.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    shifted = logits - best  # small where it matters, so that float32 does
    total = shifted.exp().sum(dim=-1, keepdim=True, dtype=torch.float64)
    log_total = total.log().clamp(min=torch.finfo(torch.float32).min).to(torch.float32)
    chosen_logprobs = shifted.gather(1, chosen.to(torch.int64).unsqueeze(1)) - log_total
    top_ids = ranking_keys(logits).topk(num_top, dim=-1).indices
    return chosen_logprobs.squeeze(1), top_ids, shifted.gather(1, top_ids) - log_total
