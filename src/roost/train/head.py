"""An EAGLE-3 head that can learn, and the passes of its training.

The same layer as `models.eagle.Eagle3`, with weights that take gradients, over rows of one length. Training-time test:
step j goes on from the head's own states of step j - 1, as drafting does; its queries read the true features up to
their place, and of later steps only what their own path wrote. Positions advance with the steps. Called by the loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from roost.layers.norm import rms_norm
from roost.layers.rotary import frequencies, turns_at
from roost.models.decoder import DecoderConfig

Path = list[tuple[Tensor, Tensor]]  # keys and values of each step so far: [num_rows, row_len, num_kv_heads, head_dim]


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadShape:
    """Sizes of a head for a target."""

    layers: DecoderConfig  # one layer; the vocabulary is the target's
    num_features: int  # hidden states of the target that are fused
    num_tokens: int  # of its own vocabulary


class TrainableHead(nn.Module):
    """Weights of a head, in float32, by the names that checkpoints have."""

    def __init__(self, shape: HeadShape, state: Mapping[str, Tensor], device: torch.device) -> None:
        super().__init__()
        self.shape = shape
        self.weights = nn.ParameterDict(
            {name.replace(".", "/"): nn.Parameter(tensor.to(device, torch.float32)) for name, tensor in state.items()}
        )
        self._frequency = frequencies(shape.layers.layers[0].rope, shape.layers.head_dim, device)

    def state(self) -> dict[str, Tensor]:
        """Its weights, by name."""
        return {name.replace("/", "."): tensor.detach() for name, tensor in self.weights.items()}

    def fuse(self, features: Tensor) -> Tensor:
        """One state of those of several layers: [..., num_features * hidden_size] -> [..., hidden_size]."""
        return linear(features, self._weight("fc"))

    def step(self, embedded: Tensor, hidden: Tensor, seen: Tensor, path: Path) -> Tensor:
        """The next states [num_rows, row_len, hidden_size]; adds its keys and values to the path.

        `seen` [num_rows, 1, row_len, row_len] says which places of the first step each place reads.
        """
        eps = self.shape.layers.norm_eps
        normed = rms_norm(hidden, self._weight("midlayer.hidden_norm"), eps)
        both = torch.cat([rms_norm(embedded, self._weight("midlayer.input_layernorm"), eps), normed], dim=-1)
        mixed = self._attend(both, seen, path)
        hidden = hidden + linear(mixed, self._weight("midlayer.self_attn.o_proj"))
        normed = rms_norm(hidden, self._weight("midlayer.post_attention_layernorm"), eps)
        gate, up = (linear(normed, self._weight(f"midlayer.mlp.{name}_proj")) for name in ("gate", "up"))
        return hidden + linear(silu(gate) * up, self._weight("midlayer.mlp.down_proj"))

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of its own vocabulary."""
        normed = rms_norm(hidden, self._weight("norm"), self.shape.layers.norm_eps)
        return linear(normed, self._weight("lm_head"))

    def _attend(self, both: Tensor, seen: Tensor, path: Path) -> Tensor:
        config = self.shape.layers
        row_len = both.shape[1]
        heads = {
            name: linear(both, self._weight(f"midlayer.self_attn.{name}_proj")).unflatten(-1, (-1, config.head_dim))
            for name in "qkv"
        }
        at = torch.arange(row_len, device=both.device) + len(path)
        query, key = (_turned(heads[name], at, self._frequency) for name in "qk")
        path.append((key, heads["v"]))
        shared = config.num_heads // config.num_kv_heads
        query = query.unflatten(2, (config.num_kv_heads, shared)) * config.scale  # [rows, len, kv heads, shared, dim]
        first_key, first_value = path[0]
        scores = torch.einsum("bqhgd,bkhd->bhgqk", query, first_key).flatten(1, 2)
        scores = scores.to(torch.float32).masked_fill(~seen, -torch.inf)
        own = [(query * each[:, :, :, None]).sum(-1).permute(0, 2, 3, 1).flatten(1, 2) for each, _ in path[1:]]
        scores = torch.cat([scores, *(each[..., None].to(torch.float32) for each in own)], dim=-1)
        weights = scores.softmax(dim=-1).to(both.dtype).unflatten(1, (config.num_kv_heads, shared))
        mixed = torch.einsum("bhgqk,bkhd->bqhgd", weights[..., :row_len], first_value)
        for number, (_, value) in enumerate(path[1:]):
            mixed = mixed + weights[..., row_len + number].permute(0, 3, 1, 2)[..., None] * value[:, :, :, None]
        return mixed.flatten(2)

    def _weight(self, name: str) -> Tensor:
        return self.weights[f"{name}.weight".replace(".", "/")]


def _turned(heads: Tensor, positions: Tensor, frequency: Tensor) -> Tensor:
    """`layers.rotary.rotate` of [num_rows, row_len, num_heads, head_dim], in a form that takes gradients."""
    cos, sin = turns_at(positions, frequency, heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    cos = cos[..., : sin.shape[-1]]
    return torch.cat([left * cos - right * sin, right * cos + left * sin], dim=-1)


def unroll(head: TrainableHead, embedded: Sequence[Tensor], fused: Tensor, seen: Tensor) -> list[Tensor]:
    """Logits of every step; `embedded` are the tokens that each step reads."""
    path: Path = []
    hidden, found = fused, []
    for each in embedded:
        hidden = head.step(each, hidden, seen, path)
        found.append(head.logits(hidden))
    return found
