"""An EAGLE-3 head with gradients, and the forward passes of its training.

The same layer as `models.eagle.Eagle3`, with trainable weights, over rows of one length. Training-time test: step j
continues from the head's own hidden states of step j - 1, as drafting does; its queries attend to the target's features
up to their position, and for later steps only to what their own path wrote. Positions advance with the steps. Called by
the training loop.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, rms_norm, silu

from roost.layers.rotary import cos_sin_at, frequencies
from roost.models.decoder_layers import DecoderConfig

Path = list[tuple[Tensor, Tensor]]  # keys and values of each step so far: [num_rows, row_len, num_kv_heads, head_dim]
Function = TypeVar("Function", bound=Callable[..., object])


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head for a target."""

    layers: DecoderConfig  # one layer; the vocabulary is the target's
    num_features: int  # hidden states of the target that `fc` fuses
    num_tokens: int  # size of the draft vocabulary


class TrainableHead(nn.Module):
    """Weights of a head, in float32, by their names in checkpoints."""

    def __init__(self, shape: HeadShape, state: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(tensor.to(device, torch.float32)) for name, tensor in state.items()}
        )
        kind = shape.layers.layers[0]
        self._frequency = frequencies(kind.rope, shape.layers.head_dim, device)
        self._scale = shape.layers.heads_of(kind).scale

    def state(self) -> dict[str, Tensor]:
        """Its weights, by name."""
        return {name.replace("/", "."): tensor.detach() for name, tensor in self.weights.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Replace the weights."""
        for name, tensor in state.items():
            self.weights[name.replace(".", "/")].data.copy_(tensor)

    def unroll(self, embedded: Sequence[Tensor], features: Tensor, seen: Tensor) -> list[Tensor]:
        """Logits [num_rows, row_len, num_tokens] of every step; `embedded` are the tokens that each step reads.

        `features` [num_rows, row_len, num_features * hidden_size] are the target's; `seen` [num_rows, 1, row_len,
        row_len] says which places of the first step each place reads.
        """
        path: Path = []
        hidden, found = linear(features, self._weight("fc")), []
        for each in embedded:
            hidden = self._step(each, hidden, seen, path)
            found.append(linear(self._norm(hidden, "norm"), self._weight("lm_head")))
        return found

    def _step(self, embedded: Tensor, hidden: Tensor, seen: Tensor, path: Path) -> Tensor:
        """The next states [num_rows, row_len, hidden_size]; adds its keys and values to the path."""
        both = [self._norm(embedded, "midlayer.input_layernorm"), self._norm(hidden, "midlayer.hidden_norm")]
        mixed = self._attend(torch.cat(both, dim=-1), seen, path)
        hidden = hidden + linear(mixed, self._weight("midlayer.self_attn.o_proj"))
        normed = self._norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (linear(normed, self._weight(f"midlayer.mlp.{name}_proj")) for name in ("gate", "up"))
        return hidden + linear(silu(gate) * up, self._weight("midlayer.mlp.down_proj"))

    def _attend(self, both: Tensor, seen: Tensor, path: Path) -> Tensor:
        config = self.shape.layers
        num_rows, row_len, _ = both.shape
        heads = {
            name: linear(both, self._weight(f"midlayer.self_attn.{name}_proj")).view(
                num_rows, row_len, -1, config.head_dim
            )
            for name in "qkv"
        }
        at = torch.arange(row_len, device=both.device) + len(path)
        query, key = (_rotated(heads[name], at, self._frequency) for name in "qk")
        path.append((key, heads["v"]))
        shared = config.num_heads // config.num_kv_heads
        query = query.view(num_rows, row_len, config.num_kv_heads, shared, -1) * self._scale
        first_key, first_value = path[0]
        scores = torch.einsum("bqhgd,bkhd->bhgqk", query, first_key)
        own = [(query * each[:, :, :, None]).sum(-1) for each, _ in path[1:]]  # [num_rows, row_len, kv heads, shared]
        beside = torch.stack(own, dim=-1) if own else query.new_zeros((*query.shape[:-1], 0))
        first_shares, own_shares = _shares(scores, beside.permute(0, 2, 3, 1, 4), seen[:, :, None])
        mixed = torch.einsum("bhgqk,bkhd->bqhgd", first_shares, first_value)
        for number, (_, value) in enumerate(path[1:]):
            mixed = mixed + own_shares[..., number].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
        return mixed.flatten(2)

    def _norm(self, hidden: Tensor, name: str) -> Tensor:
        return rms_norm(hidden, (hidden.shape[-1],), self._weight(name), self.shape.layers.norm_eps)

    def _weight(self, name: str) -> Tensor:
        weight: Tensor = self.weights[f"{name}.weight".replace(".", "/")]
        return weight


def fused(function: Function, device: torch.device) -> Function:
    """The function, compiled on a GPU: uncompiled it makes many passes over large tensors."""
    return cast(Function, torch.compile(function, dynamic=False, fullgraph=True)) if device.type == "cuda" else function


def _shares(scores: Tensor, own: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Softmax over [..., row_len] positions of the first step and [..., num_own] steps of the own path together."""
    first = scores.to(torch.float32).masked_fill(~seen, -torch.inf)
    beside = own.to(torch.float32)
    most = first.amax(-1, keepdim=True).detach()
    if beside.shape[-1]:
        most = torch.maximum(most, beside.amax(-1, keepdim=True).detach())
    first, beside = (first - most).exp(), (beside - most).exp()
    total = first.sum(-1, keepdim=True) + beside.sum(-1, keepdim=True)
    return (first / total).to(scores.dtype), (beside / total).to(scores.dtype)


def _rotated(heads: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """`layers.rotary.rotate` of [num_rows, row_len, num_heads, head_dim], in a form that takes gradients."""
    cos, sin = cos_sin_at(positions, frequency, heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    cos = cos[..., : sin.shape[-1]]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)
