"""Draft heads to measure and check with, where no trained one is at hand.

An untrained EAGLE head costs what a trained one costs and accepts next to nothing; the target as its own drafter
accepts nearly everything and costs what the target costs. Both are marked as such wherever numbers are reported.
"""

from dataclasses import replace

import torch
from torch import Tensor

from roost.layers.attention import Attend
from roost.models.decoder import Decoder
from roost.models.decoder_layers import LayerKind, NormNames, TensorNames
from roost.models.eagle import Eagle, Eagle3, HeadConfig
from roost.models.model import KvShape, PairHead


def untrained_head(kind: str, model: Decoder, weights: str, device: torch.device, num_tokens: int) -> PairHead:
    """A random head of a target's shape; an EAGLE-3 head knows the first `num_tokens` of its tokens."""
    target = model.config
    layers = replace(
        target,
        layers=(LayerKind(rope=replace(target.layers[0].rope, rotated_len=None)),),
        qkv_bias=False,
        out_bias=False,
        qk_norm=False,
        out_gate=False,
        sinks=False,
        names=TensorNames(),
        norms=NormNames(),
        norm_offset=0.0,
        tied=False,
    )
    config = HeadConfig(layers=layers, target_hidden_size=target.hidden_size, num_tokens=num_tokens)
    generator = torch.Generator(device).manual_seed(3)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5

    hidden, wide = layers.hidden_size, layers.intermediate_size
    query, kv = layers.num_heads * layers.head_dim, layers.num_kv_heads * layers.head_dim
    read = hidden if kind == "eagle" else 2 * hidden
    shapes: dict[str, tuple[int, ...]] = {
        "layers.0.self_attn.q_proj.weight": (query, read),
        "layers.0.self_attn.k_proj.weight": (kv, read),
        "layers.0.self_attn.v_proj.weight": (kv, read),
        "layers.0.self_attn.o_proj.weight": (hidden, query),
        "layers.0.mlp.gate_proj.weight": (wide, hidden),
        "layers.0.mlp.up_proj.weight": (wide, hidden),
        "layers.0.mlp.down_proj.weight": (hidden, wide),
        "fc.weight": (hidden, 2 * hidden if kind == "eagle" else 3 * hidden),
    }
    state = {name: random(*shape) for name, shape in shapes.items()}
    state["layers.0.post_attention_layernorm.weight"] = torch.ones(hidden)
    if kind == "eagle":
        return Eagle(config, state, model, weights, device)
    for name in ("layers.0.input_layernorm.weight", "layers.0.hidden_norm.weight", "norm.weight"):
        state[name] = torch.ones(hidden)
    state["lm_head.weight"] = random(num_tokens, hidden)
    state["d2t"] = torch.zeros(num_tokens, dtype=torch.int64)
    number = len(target.layers)
    aux_layers = (2, number // 2, number - 3) if number > 6 else (0, 1, 2)
    return Eagle3(config, aux_layers, state, model, weights, device)


class TargetHead:
    """The target as its own drafter: slot p holds token p + 1, so it sees all but the first token."""

    def __init__(self, model: Decoder) -> None:
        self.model = model

    @property
    def kv(self) -> tuple[KvShape, ...]:
        """The target's, in the full book."""
        return tuple(replace(kv, window=None) for kv in self.model.kv)

    @property
    def dtype(self) -> torch.dtype:
        """The target's."""
        return self.model.dtype

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """Nothing: it reads tokens."""
        return ()

    @property
    def hidden_size(self) -> int:
        """The target's."""
        return self.model.config.hidden_size

    @property
    def num_tokens(self) -> int:
        """The target's."""
        return self.model.config.vocab_size

    def fuse(self, last: Tensor, aux_hidden: tuple[Tensor, ...]) -> Tensor:
        """Of no interest."""
        return last

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """The target's pass."""
        return self.model.forward(tokens, positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """The target's, so sure of itself that its best path is in every tree."""
        return self.model.logits(hidden) * 100

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """Its own."""
        return draft_ids
