"""The target as a teacher: features and logits of packed rows, without KV pages and without gradients.

Attention is dense, within each answer. Called by the training loop.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from roost.layers.convolution import convolution
from roost.layers.gated_delta import Recurrence, whole_sequences
from roost.layers.rotary import CosSin, rotate
from roost.models.decoder import Decoder
from roost.models.model import KvShape
from roost.train.head import fused
from roost.train.losses import drawn_tokens

_LOGITS_TOKENS_MAX = 4096  # tokens whose full logits are in memory at one time


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TargetOutputs:
    """The target's forward pass over packed rows."""

    embedded: Tensor  # [num_rows, row_len, hidden_size] inputs of its first layer
    features: Tensor  # [num_rows, row_len, num_features * hidden_size]
    logits: Tensor  # [num_rows, row_len, num_tokens] of the next token, over the draft vocabulary
    best: Tensor  # [num_rows, row_len] argmax over the whole vocabulary
    drawn: Tensor | None  # [num_rows, row_len] what it draws from the whole vocabulary, if it was asked to
    seen: Tensor  # [num_rows, 1, row_len, row_len] bool: which positions each attends to


class _DenseRows:
    """Attention, convolutions and recurrences of rows of tokens, each of which sees what is before it of its own."""

    def __init__(
        self, shapes: tuple[KvShape, ...], read: tuple[int, ...], owners: Tensor, seen: Tensor, dtype: torch.dtype
    ) -> None:
        """Layers keep KV of these shapes; `read` has a number among them for each layer that reads it."""
        self._shapes, self._owners = shapes, owners
        self._number = torch.arange(owners.shape[1], device=owners.device)
        self._bias = torch.zeros_like(seen, dtype=dtype).masked_fill_(~seen, -torch.inf)
        self._spread = fused(_spread, owners.device)
        self._shared = {number for number in read if read.count(number) > 1}
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}  # keys and values that further layers read

    def __call__(
        self, layer: int, qk: Tensor, value: Tensor | None, cos_sin: CosSin, sinks: Tensor | None = None
    ) -> Tensor:
        """What the heads of a layer read."""
        kv, mask = self._shapes[layer], self._bias
        if value is None:
            keys, value = self._kept[layer]
            qk = torch.cat([qk, keys], dim=1)
        elif layer in self._shared:
            self._kept[layer] = qk[:, -kv.num_kv_heads :], value
        if kv.window is not None:
            mask = mask.masked_fill(self._number <= self._number[:, None] - kv.window, -torch.inf)
        query, key, value = self._spread(qk, value, cos_sin, len(self._owners))
        if sinks is not None:  # each is the score of one more key, whose value is zero
            column = sinks.to(mask.dtype)[None, :, None, None].expand(*query.shape[:3], 1)
            mask = torch.cat([mask.expand(*query.shape[:3], -1), column], dim=-1)
            key, value = pad(key, (0, 0, 0, 1)), pad(value, (0, 0, 0, 1))
        return scaled_dot_product_attention(query, key, value, mask, scale=kv.scale).transpose(1, 2).flatten(0, 1)

    def convolve(self, layer: int, inputs: Tensor, weight: Tensor) -> Tensor:
        """The inputs of a layer, convolved with those before."""
        rows, before = inputs.view(*self._owners.shape, -1), list[Tensor]()
        for back in range(weight.shape[1] - 1, 0, -1):
            is_own = (self._owners == self._owners.roll(back, dims=1)) & (self._number >= back)
            before.append(rows.roll(back, dims=1).masked_fill(~is_own[..., None], 0.0).flatten(0, 1))
        return convolution(inputs, torch.stack(before, dim=1), weight)

    def recurrence(self, layer: int, inputs: Tensor) -> Recurrence:
        """Nothing has happened before a sequence."""
        shape = self._shapes[layer].recurs
        assert shape is not None
        is_first = self._owners != self._owners.roll(1, dims=1)
        is_first[:, 0] = True
        starts = is_first.flatten().nonzero()[:, 0]
        lengths = torch.cat([starts[1:], starts.new_tensor([len(inputs)])]) - starts
        return whole_sequences(lengths, shape, inputs.dtype)


@torch.no_grad()
def run_target(
    model: Decoder,
    tokens: Tensor,
    owners: Tensor,
    aux_layers: tuple[int, ...],
    vocabulary: Tensor,
    temperature: float | None = None,
) -> TargetOutputs:
    """Run the target over rows of tokens [num_rows, row_len]; draw the next ones too if there is a temperature."""
    num_rows, row_len = tokens.shape
    number = torch.arange(row_len, device=tokens.device)
    seen = ((owners[:, :, None] == owners[:, None, :]) & (number <= number[:, None]))[:, None]
    attend = _DenseRows(model.kv, model.config.kv_numbers, owners, seen, model.dtype)
    last, aux_hidden = model.forward_with_aux(tokens.flatten(), number.repeat(num_rows), attend, aux_layers)
    kept, best, drawn = [], [], []
    for first in range(0, len(last), _LOGITS_TOKENS_MAX):
        logits = model.logits(last[first : first + _LOGITS_TOKENS_MAX])
        kept.append(logits[:, vocabulary])
        best.append(logits.argmax(dim=-1))
        if temperature is not None:
            places = torch.arange(first, first + len(logits), device=logits.device)
            every = torch.arange(logits.shape[-1], device=logits.device)
            drawn.append(fused(drawn_tokens, tokens.device)(logits, temperature, places, every))
    return TargetOutputs(
        embedded=model.embed(tokens),
        features=torch.cat(aux_hidden, dim=-1).view(num_rows, row_len, -1),
        logits=torch.cat(kept).view(num_rows, row_len, -1),
        best=torch.cat(best).view(num_rows, row_len),
        drawn=torch.cat(drawn).view(num_rows, row_len) if drawn else None,
        seen=seen,
    )


def _spread(qk: Tensor, value: Tensor, cos_sin: CosSin, num_rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values [num_rows, num_heads, row_len, head_dim] of a flat batch, each head with its own."""
    num_kv_heads = value.shape[1]
    num_heads = qk.shape[1] - num_kv_heads
    cos, sin = cos_sin
    if cos.shape[-1] == sin.shape[-1]:  # kernels have each angle once
        cos = torch.cat([cos, cos], dim=-1)
    rotated, shape = rotate(qk, (cos, sin)), (num_heads, value.shape[-1])
    query, key, value = (
        each.repeat_interleave(num_heads // each.shape[1], dim=1).view(num_rows, -1, *shape).transpose(1, 2)
        for each in (rotated[:, :num_heads], rotated[:, num_heads:], value)
    )
    return query, key, value
