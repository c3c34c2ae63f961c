"""The target as a teacher: hidden states and best tokens of packed rows, without pages and without gradients.

Attention is dense, within each answer. Called by the training loop.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from roost.layers.rotary import Turns, rotate
from roost.models.decoder import Decoder

_SCORED_MAX = 4096  # tokens whose scores over the vocabulary exist at one time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lesson:
    """What the target makes of some rows."""

    features: Tensor  # [num_rows, row_len, num_features * hidden_size]
    scores: Tensor  # [num_rows, row_len, num_tokens] of the next token, over the draft vocabulary
    best: Tensor  # [num_rows, row_len] the next token over the whole vocabulary
    seen: Tensor  # [num_rows, 1, row_len, row_len] bool: which places each reads


@torch.no_grad()
def teach(model: Decoder, tokens: Tensor, owners: Tensor, captures: tuple[int, ...], vocabulary: Tensor) -> Lesson:
    """Run the target over rows of tokens [num_rows, row_len]."""
    num_rows, row_len = tokens.shape
    number = torch.arange(row_len, device=tokens.device)
    seen = ((owners[:, :, None] == owners[:, None, :]) & (number <= number[:, None]))[:, None]
    bias = torch.zeros_like(seen, dtype=model.kv.dtype).masked_fill_(~seen, -torch.inf)
    positions = number.expand(num_rows, -1).flatten()
    kv = model.kv

    def attend(layer: int, turning: Tensor, value: Tensor, turns: Turns) -> Tensor:
        num_kv_heads = value.shape[1]
        query, key = rotate(turning, turns).split((turning.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        shared = query.shape[1] // num_kv_heads
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
        heads = [each.unflatten(0, (num_rows, row_len)).transpose(1, 2) for each in (query, key, value)]
        mask, window = bias, kv.windows[layer]
        if window is not None:
            mask = bias.masked_fill(number <= number[:, None] - window, -torch.inf)
        mixed = scaled_dot_product_attention(*heads, attn_mask=mask, scale=kv.scale)
        return mixed.transpose(1, 2).flatten(0, 1)

    last, captured = model.forward_captured(tokens.flatten(), positions, attend, captures)
    scores, best = [], []
    for part in last.split(_SCORED_MAX):
        logits = model.logits(part)
        scores.append(logits[:, vocabulary])
        best.append(logits.argmax(dim=-1))
    shape = (num_rows, row_len)
    return Lesson(
        features=torch.cat(captured, dim=-1).unflatten(0, shape),
        scores=torch.cat(scores).unflatten(0, shape),
        best=torch.cat(best).unflatten(0, shape),
        seen=seen,
    )
