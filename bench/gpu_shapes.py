"""Shapes of models with random weights, for benchmarks on a GPU: configs, tensors, and what a step must read.

Sizes are those of published models; so are the families, but for names of tensors. Used by the benchmarks.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from roost.layers.gated_delta import DeltaShape
from roost.layers.linear import head_form
from roost.layers.rotary import Rope
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.experts import ExpertsFeed
from roost.models.gpt_oss import BiasedExperts

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BANDWIDTH = 4.8e12  # bytes a second, H200
FLOPS = 989e12  # bf16, dense
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}  # with the scales of groups


def shape(
    num_layers: int, hidden: int, wide: int, heads: int, kv_heads: int, vocab: int, tied: bool, head_dim: int = 0
) -> DecoderConfig:
    """A Llama of some size; its heads share the hidden size unless told otherwise."""
    head_dim = head_dim or hidden // heads
    return DecoderConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=wide,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        context_max=8192,
        layers=(LayerKind(rope=Rope(theta=500000.0)),) * num_layers,
        scale=head_dim**-0.5,
        norm_eps=1e-5,
        tied=tied,
    )


def with_experts(plain: DecoderConfig, experts: ExpertsFeed) -> DecoderConfig:
    """Qwen 3 of such sizes with experts in every layer."""
    return replace(
        plain,
        qk_norm=True,
        layers=tuple(replace(each, feed_forward=experts) for each in plain.layers),
        feeds=experts.feeds,
    )


def with_convolutions(plain: DecoderConfig, attending: tuple[int, ...]) -> DecoderConfig:
    """LFM2 of such sizes, with Llama's names: attention in a few layers."""
    kinds = (each if number in attending else replace(each, conv_len=3) for number, each in enumerate(plain.layers))
    return replace(plain, qk_norm=True, layers=tuple(kinds))


def with_delta_rules(plain: DecoderConfig, delta: DeltaShape) -> DecoderConfig:
    """Qwen 3.5 of such sizes: attention in every fourth layer, with a gate, and a quarter of each head rotates."""
    rope = replace(plain.layers[0].rope, rotated_len=plain.head_dim // 4)
    kinds = (
        replace(each, rope=rope, delta=None if number % 4 == 3 else delta) for number, each in enumerate(plain.layers)
    )
    return replace(plain, qk_norm=True, out_gate=True, layers=tuple(kinds))


def with_sinks(plain: DecoderConfig, window: int, experts: ExpertsFeed) -> DecoderConfig:
    """gpt-oss of such sizes: window layers and full ones in turn, sinks, biases, experts in every layer."""
    kinds = (replace(kind, window=None if number % 2 else window) for number, kind in enumerate(plain.layers))
    feed = BiasedExperts(sizes=experts)
    return replace(
        plain,
        qkv_bias=True,
        out_bias=True,
        sinks=True,
        layers=tuple(replace(kind, feed_forward=feed) for kind in kinds),
        feeds=experts.feeds,
    )


SHAPES = {
    "8b": shape(32, 4096, 14336, 32, 8, 128256, False),
    "135m": shape(30, 576, 1536, 9, 3, 49152, True),
    "30b-a3b": with_experts(
        shape(48, 2048, 6144, 32, 4, 151936, False, head_dim=128),
        ExpertsFeed(num_experts=128, num_active=8, width=768, is_normed=True),
    ),
    "gpt-oss-20b": with_sinks(
        shape(24, 2880, 2880, 64, 8, 201088, False, head_dim=64),
        128,
        ExpertsFeed(num_experts=32, num_active=4, width=2880, is_normed=True),
    ),
    "lfm2-1.2b": with_convolutions(shape(16, 2048, 8192, 32, 8, 65536, True), (2, 5, 8, 10, 12, 14)),
    "qwen3.5-9b": with_delta_rules(
        shape(32, 4096, 12288, 16, 4, 248320, False, head_dim=256),
        DeltaShape(num_key_heads=16, num_value_heads=32, key_dim=128, value_dim=128, conv_len=4),
    ),
    "tiny": shape(3, 96, 160, 6, 2, 512, True),
    "tiny-experts": with_experts(
        shape(2, 96, 160, 6, 2, 512, False), ExpertsFeed(num_experts=8, num_active=2, width=48, is_normed=True)
    ),
    "tiny-gpt-oss": with_sinks(
        shape(3, 96, 160, 6, 2, 512, False),
        24,
        ExpertsFeed(num_experts=8, num_active=2, width=48, is_normed=True),
    ),
    "tiny-qwen3.5": with_delta_rules(
        shape(4, 96, 160, 6, 2, 512, False),
        DeltaShape(num_key_heads=2, num_value_heads=4, key_dim=16, value_dim=16, conv_len=4),
    ),
    "tiny-lfm2": with_convolutions(shape(3, 96, 160, 6, 2, 512, True), (1,)),
}


def layer_shapes(config: DecoderConfig, kind: LayerKind) -> dict[str, tuple[int, ...]]:
    """The tensors of a layer."""
    hidden, wide = config.hidden_size, config.intermediate_size
    query, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    found: dict[str, tuple[int, ...]] = {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    if kind.delta is not None:
        found |= _delta_shapes(kind.delta, hidden)
    elif kind.conv_len is not None:
        found |= {"conv.in_proj": (3 * hidden, hidden), "conv.out_proj": (hidden, hidden)}
        found |= {"conv.conv": (hidden, 1, kind.conv_len)}
    else:
        found |= {"self_attn.q_proj": ((1 + config.out_gate) * query, hidden), "self_attn.o_proj": (hidden, query)}
        found |= {"self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden)}
    if kind.attends and config.qk_norm:
        found |= {"self_attn.q_norm": (config.head_dim,), "self_attn.k_norm": (config.head_dim,)}
    experts = experts_of(kind)
    if experts is None:
        found |= {"mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
    named = {f"{name}.weight": size for name, size in found.items()}
    if kind.attends and config.sinks:
        named["self_attn.sinks"] = (config.num_heads,)
    if kind.attends and config.qkv_bias:
        named |= {f"self_attn.{name}_proj.bias": (size,) for name, size in (("q", query), ("k", kv), ("v", kv))}
    if kind.attends and config.out_bias:
        named["self_attn.o_proj.bias"] = (hidden,)
    if experts is not None:
        named |= _expert_shapes(experts, hidden, is_woven=isinstance(kind.feed_forward, BiasedExperts))
    if kind.delta is not None:
        named |= {f"linear_attn.{name}": (kind.delta.num_value_heads,) for name in ("A_log", "dt_bias")}
    return named


def experts_of(kind: LayerKind) -> ExpertsFeed | None:
    """The sizes of a layer's experts; None: it has none."""
    feed = kind.feed_forward
    return feed.sizes if isinstance(feed, BiasedExperts) else feed if isinstance(feed, ExpertsFeed) else None


def _expert_shapes(experts: ExpertsFeed, hidden: int, *, is_woven: bool) -> dict[str, tuple[int, ...]]:
    """Of a layer's experts and their router: in Qwen's words, or in gpt-oss's."""
    number, width, shared = experts.num_experts, experts.width, experts.shared_width
    found: dict[str, tuple[int, ...]]
    if not is_woven:
        found = {"gate.weight": (number, hidden), "experts.gate_up_proj": (number, 2 * width, hidden)}
        found |= {"experts.down_proj": (number, hidden, width)}
        if shared is not None:
            found |= {f"shared_expert.{name}_proj.weight": (shared, hidden) for name in ("gate", "up")}
            found |= {"shared_expert.down_proj.weight": (hidden, shared), "shared_expert_gate.weight": (1, hidden)}
        return {f"mlp.{name}": size for name, size in found.items()}
    found = {"router.weight": (number, hidden), "router.bias": (number,)}
    found |= {"experts.gate_up_proj": (number, hidden, 2 * width), "experts.gate_up_proj_bias": (number, 2 * width)}
    found |= {"experts.down_proj": (number, width, hidden), "experts.down_proj_bias": (number, hidden)}
    return {f"mlp.{name}": size for name, size in found.items()}


def _delta_shapes(delta: DeltaShape, hidden: int) -> dict[str, tuple[int, ...]]:
    """Of a gated delta rule."""
    heads, value_len = delta.num_value_heads, delta.num_value_heads * delta.value_dim
    found: dict[str, tuple[int, ...]] = {"in_proj_qkv": (delta.num_channels, hidden), "in_proj_z": (value_len, hidden)}
    found |= {"in_proj_a": (heads, hidden), "in_proj_b": (heads, hidden), "out_proj": (hidden, value_len)}
    found |= {"conv1d": (delta.num_channels, 1, delta.conv_len), "norm": (delta.value_dim,)}
    return {f"linear_attn.{name}": size for name, size in found.items()}


class RandomState(Mapping[str, Tensor]):
    """A checkpoint of random weights that are made when they are read."""

    def __init__(self, config: DecoderConfig, device: torch.device = DEVICE) -> None:
        hidden = config.hidden_size
        self._device = device
        self._shapes: dict[str, tuple[int, ...]] = {
            f"model.layers.{number}.{name}": shape
            for number, kind in enumerate(config.layers)
            for name, shape in layer_shapes(config, kind).items()
        }
        self._shapes |= {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
        if not config.tied:
            self._shapes["lm_head.weight"] = (config.vocab_size, hidden)

    def __getitem__(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if name.endswith("bias") or name.endswith("sinks"):
            return torch.randn(shape, device=self._device, dtype=torch.bfloat16) * 0.02
        if len(shape) == 1:
            return torch.ones(shape, device=self._device)
        return torch.randn(shape, device=self._device, dtype=torch.bfloat16) * shape[-1] ** -0.5

    def __iter__(self) -> Iterator[str]:
        return iter(self._shapes)

    def __len__(self) -> int:
        return len(self._shapes)


def floor(config: DecoderConfig, form: str, batch: int, length: int) -> dict[str, float]:
    """Bytes and operations of a plain step, and the time they take at the ceiling."""
    layers = weights = 0.0  # numbers that are read, and those that a token is multiplied with
    lm_head = config.vocab_size * config.hidden_size
    for kind in config.layers:
        sizes = {name: math.prod(size) for name, size in layer_shapes(config, kind).items()}
        experts = sum(size for name, size in sizes.items() if "experts" in name)
        layers += sum(sizes.values()) - experts
        weights += sum(sizes.values()) - experts
        sizes_of_experts = experts_of(kind)
        if sizes_of_experts is not None:
            share = sizes_of_experts.num_active / sizes_of_experts.num_experts
            layers += experts * (1 - (1 - share) ** batch)  # those that are hit, where tokens spread evenly
            weights += experts * share
    weights += lm_head
    seen = sum(min(length, kind.window or length) for kind in config.layers if kind.attends)
    kv_bytes = batch * seen * 2 * config.num_kv_heads * config.head_dim * 2
    state_bytes = batch * sum(
        kind.delta.state_bytes(torch.bfloat16) for kind in config.layers if kind.delta is not None
    )
    weight_bytes = layers * WEIGHT_BYTES[form] + lm_head * WEIGHT_BYTES[head_form(form)]
    seconds = (weight_bytes + kv_bytes + state_bytes) / BANDWIDTH
    return {
        "weight_bytes": weight_bytes,
        "kv_bytes": kv_bytes,
        "state_bytes": state_bytes,  # read; written only now and then
        "operations": 2 * weights * batch,
        "ms_from_bytes": 1e3 * seconds,
        "ms_from_operations": 1e3 * 2 * weights * batch / FLOPS,
    }
