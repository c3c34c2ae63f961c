"""Llama: grouped-query attention, rotary positions, gated feed-forward; optionally a sliding window in some layers.

Built from a state dict with Hugging Face's names; Mistral is the same with a window in every layer. A tensor that is
missing, misshapen or left over is refused, since output computed without it would be silently wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from roost.config import ModelTraits
from roost.errors import ConfigError
from roost.layers.attention import Attend
from roost.layers.norm import rms_norm
from roost.layers.rotary import rotary_angles, rotate
from roost.models.model import KvShape


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Sizes and constants of a checkpoint."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    window: int | None = None  # tokens a window layer sees, the current one included
    window_layers: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(f"the model's {self.num_heads} heads do not share {self.num_kv_heads} KV heads evenly")
        if not self.window_layers <= frozenset(range(self.num_layers)):
            raise ConfigError(
                f"the model's window layers {sorted(self.window_layers)} are not in [0, {self.num_layers})"
            )
        if self.window_layers and self.window is None:
            raise ConfigError(f"the model's window layers {sorted(self.window_layers)} have no window")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Layer:
    """Weights of one layer; a projection is [out, in]."""

    input_norm: Tensor
    q_proj: Tensor
    k_proj: Tensor
    v_proj: Tensor
    o_proj: Tensor
    post_norm: Tensor
    gate_proj: Tensor
    up_proj: Tensor
    down_proj: Tensor


class Llama:
    """A Llama checkpoint on a device."""

    def __init__(self, config: LlamaConfig, state: Mapping[str, Tensor], device: torch.device) -> None:
        self.config = config
        weights = _Weights(state, device)
        embedding = (config.vocab_size, config.hidden_size)
        self._embed = weights.take("model.embed_tokens.weight", *embedding)
        self._layers = [_layer(config, weights, f"model.layers.{number}.") for number in range(config.num_layers)]
        self._norm = weights.take("model.norm.weight", config.hidden_size)
        if config.tie_word_embeddings:
            weights.drop("lm_head.weight")  # a copy of the embedding, where a checkpoint has it
            self._head = self._embed
        else:
            self._head = weights.take("lm_head.weight", *embedding)
        weights.check_all_taken()

    @property
    def traits(self) -> ModelTraits:
        """What its layers need of the KV plane."""
        config = self.config
        return ModelTraits(
            vocab_size=config.vocab_size,
            window=config.window if config.window_layers else None,
            has_full_layers=len(config.window_layers) < config.num_layers,
        )

    @property
    def kv(self) -> KvShape:
        """The KV its layers hand to `attend`."""
        config = self.config
        return KvShape(
            windows=tuple(
                config.window if number in config.window_layers else None for number in range(config.num_layers)
            ),
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._embed.dtype,
        )

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [num_tokens, hidden_size] of a flat batch."""
        eps = self.config.rms_norm_eps
        angles = rotary_angles(positions, self.config.head_dim, self.config.rope_theta)
        hidden = self._embed[tokens]
        for number, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.input_norm, eps)
            query = rotate(self._heads(linear(normed, layer.q_proj)), angles)
            key = rotate(self._heads(linear(normed, layer.k_proj)), angles)
            value = self._heads(linear(normed, layer.v_proj))
            hidden = hidden + linear(attend(number, query, key, value).flatten(1), layer.o_proj)
            normed = rms_norm(hidden, layer.post_norm, eps)
            gated = silu(linear(normed, layer.gate_proj)) * linear(normed, layer.up_proj)
            hidden = hidden + linear(gated, layer.down_proj)
        return rms_norm(hidden, self._norm, eps)

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [num_tokens, vocab_size]."""
        return linear(hidden, self._head)

    def _heads(self, flat: Tensor) -> Tensor:
        return flat.unflatten(-1, (-1, self.config.head_dim))  # [num_tokens, num_heads, head_dim]


class _Weights:
    """A state dict that is taken apart by name."""

    def __init__(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        self._left = dict(state)
        self._device = device

    def take(self, name: str, *shape: int) -> Tensor:
        """The tensor of that name, on the device; it must be there, with that shape."""
        if name not in self._left:
            raise ConfigError(f"the checkpoint has no tensor {name}")
        tensor = self._left.pop(name)
        if tensor.shape != shape:
            raise ConfigError(f"the checkpoint's {name} is {list(tensor.shape)}, its config says {list(shape)}")
        return tensor.detach().to(self._device)

    def drop(self, name: str) -> None:
        """Leave out a tensor that says nothing new, if it is there."""
        self._left.pop(name, None)

    def check_all_taken(self) -> None:
        """Refuse what the model would ignore."""
        if self._left:
            raise ConfigError(f"the checkpoint has tensors that this model does not use: {sorted(self._left)}")


def _layer(config: LlamaConfig, weights: _Weights, prefix: str) -> _Layer:
    hidden, wide = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    return _Layer(
        input_norm=weights.take(prefix + "input_layernorm.weight", hidden),
        q_proj=weights.take(prefix + "self_attn.q_proj.weight", query, hidden),
        k_proj=weights.take(prefix + "self_attn.k_proj.weight", kv, hidden),
        v_proj=weights.take(prefix + "self_attn.v_proj.weight", kv, hidden),
        o_proj=weights.take(prefix + "self_attn.o_proj.weight", hidden, query),
        post_norm=weights.take(prefix + "post_attention_layernorm.weight", hidden),
        gate_proj=weights.take(prefix + "mlp.gate_proj.weight", wide, hidden),
        up_proj=weights.take(prefix + "mlp.up_proj.weight", wide, hidden),
        down_proj=weights.take(prefix + "mlp.down_proj.weight", hidden, wide),
    )
