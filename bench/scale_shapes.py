"""Shapes too large for one GPU, and what one rank of several has of a shape: `bench.scale_model` predicts them.

Sizes are those of published models. A rank's part is a config of its own, so that its tensors, its KV and its workspace
follow from the code that the engine uses for a whole model.
"""

import math
from dataclasses import replace

import torch

from bench.gpu_shapes import (
    WEIGHT_BYTES,
    RandomState,
    experts_of,
    layer_shapes,
    shape,
    with_delta_rules,
    with_experts,
    with_sinks,
)
from roost.config.options import EngineConfig
from roost.errors import ConfigError
from roost.layers.gated_delta import DeltaShape
from roost.layers.linear import head_form
from roost.models.decoder import Decoder, kv_shapes
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.experts import ExpertsFeed
from roost.models.gpt_oss import BiasedExperts
from roost.runner.memory import pool_tokens, workspace_bytes
from roost.startup import backend_of

META = torch.device("meta")
STATES_HELD = (
    3  # of a hybrid's session, and the tokens of inputs beside them: bench/results/recurrent_sessions_h200.json
)
INPUTS_HELD = 64


def _with_experts_beside(hybrid: DecoderConfig, experts: ExpertsFeed) -> DecoderConfig:
    """A hybrid with experts in every layer."""
    layers = tuple(replace(kind, feed_forward=experts) for kind in hybrid.layers)
    return replace(hybrid, layers=layers, feeds=experts.feeds)


LARGE = {
    "llama-70b": shape(80, 8192, 28672, 64, 8, 128256, False),
    "llama-405b": shape(126, 16384, 53248, 128, 8, 128256, False),
    "gpt-oss-120b": with_sinks(
        shape(36, 2880, 2880, 64, 8, 201088, False, head_dim=64),
        128,
        ExpertsFeed(num_experts=128, num_active=4, width=2880, is_normed=True),
    ),
    "qwen3-235b-a22b": with_experts(
        shape(94, 4096, 12288, 64, 4, 151936, False, head_dim=128),
        ExpertsFeed(num_experts=128, num_active=8, width=1536, is_normed=True),
    ),
    "qwen3.5-397b-a17b": _with_experts_beside(
        with_delta_rules(
            shape(60, 4096, 12288, 32, 2, 248320, False, head_dim=256),
            DeltaShape(num_key_heads=16, num_value_heads=64, key_dim=128, value_dim=128, conv_len=4),
        ),
        ExpertsFeed(num_experts=512, num_active=10, width=1024, is_normed=True, shared_width=1024),
    ),
}


def num_weights(config: DecoderConfig, *, is_active: bool = False) -> int:
    """Numbers in a model's matrices; only those that a token is multiplied with, but for the embedding."""
    embeddings = (not is_active and not config.tied) + 1
    return sum(layer_weights(config, kind, is_active=is_active) for kind in config.layers) + (
        embeddings * config.vocab_size * config.hidden_size
    )


def layer_weights(config: DecoderConfig, kind: LayerKind, *, is_active: bool = False) -> int:
    """Numbers in the matrices of a layer."""
    dense, one = dense_and_expert(config, kind)
    experts = experts_of(kind)
    return dense + (0 if experts is None else one * (experts.num_active if is_active else experts.num_experts))


def dense_and_expert(config: DecoderConfig, kind: LayerKind) -> tuple[int, int]:
    """Numbers in what every token of a layer reads, and in one of its experts."""
    sizes = {name: math.prod(size) for name, size in layer_shapes(config, kind).items()}
    all_experts = sum(size for name, size in sizes.items() if "experts." in name)
    experts = experts_of(kind)
    return sum(sizes.values()) - all_experts, 0 if experts is None else all_experts // experts.num_experts


def rank_part(config: DecoderConfig, ranks: int) -> DecoderConfig:
    """What one of so many ranks has: heads, feed-forward, experts' widths and vocabulary are split, KV heads copied."""

    def split(name: str, number: int) -> int:
        if number % ranks:
            raise ConfigError(f"--gpus: {ranks} ranks do not divide the model's {number} {name}")
        return number // ranks

    def copied(number: int) -> int:
        """Heads of a rank: copied where there are fewer of them than ranks."""
        if max(number, ranks) % min(number, ranks):
            raise ConfigError(f"--gpus: {ranks} ranks do not share {number} heads evenly")
        return max(1, number // ranks)

    def part_of(kind: LayerKind) -> LayerKind:
        experts, delta = experts_of(kind), kind.delta
        if experts is not None:
            shared = None if experts.shared_width is None else split("shared expert's outputs", experts.shared_width)
            experts = replace(experts, width=split("outputs of an expert", experts.width), shared_width=shared)
            is_woven = isinstance(kind.feed_forward, BiasedExperts)
            kind = replace(kind, feed_forward=BiasedExperts(sizes=experts) if is_woven else experts)
        if delta is not None:
            heads = split("value heads of a recurrence", delta.num_value_heads)
            delta = replace(delta, num_key_heads=copied(delta.num_key_heads), num_value_heads=heads)
        return replace(kind, delta=delta)

    layers = tuple(map(part_of, config.layers))
    experts = experts_of(layers[0])
    return replace(
        config,
        num_heads=split("heads", config.num_heads),
        num_kv_heads=copied(config.num_kv_heads),
        intermediate_size=split("outputs of a feed-forward", config.intermediate_size),
        vocab_size=math.ceil(config.vocab_size / ranks),
        layers=layers,
        feeds=() if experts is None else experts.feeds,
    )


def weight_bytes(part: DecoderConfig, form: str) -> float:
    """Bytes of a rank's weights; experts are never rounded, as the engine has it on a GPU."""
    dense = [dense_and_expert(part, kind)[0] for kind in part.layers]
    routed = sum(layer_weights(part, kind) for kind in part.layers) - sum(dense)
    vocab = part.vocab_size * part.hidden_size
    embedding = 0.0 if part.tied else vocab * WEIGHT_BYTES["bf16"]
    head = vocab * WEIGHT_BYTES[head_form(form)]
    return sum(dense) * WEIGHT_BYTES[form] + routed * WEIGHT_BYTES["bf16"] + embedding + head


def session_bytes(part: DecoderConfig, context: int, kv_cache_dtype: str) -> int:
    """Bytes that a session of a context holds on a rank: KV, states, and the inputs behind these."""
    total = 0
    for kv in kv_shapes(part, torch.bfloat16):
        if kv.recurs is not None:
            total += STATES_HELD * kv.recurs.state_bytes(kv.dtype) + INPUTS_HELD * kv.token_bytes
        else:
            total += kv.kept_as(kv_cache_dtype).token_bytes * min(context, kv.window or context)
    return total


def memory_left(part: DecoderConfig, vocab_size: int, weights: str, gpu_bytes: float) -> int:
    """Bytes that a rank has left for KV, by the engine's own arithmetic; 0: its weights do not fit."""
    config, whole = EngineConfig(), replace(part, vocab_size=vocab_size)  # logits are gathered
    workspace = workspace_bytes(config, on_no_device(whole), backend_of(config, torch.device("cuda")))
    free = int(gpu_bytes - weight_bytes(part, weights))
    try:
        return pool_tokens(None, free, int(gpu_bytes), workspace, 1)
    except ConfigError:
        return 0


def on_no_device(config: DecoderConfig) -> Decoder:
    """The engine's model of a config, without memory."""
    small = replace(config, layers=tuple(dict.fromkeys(config.layers)))  # a layer of each kind tells all sizes
    return Decoder(small, RandomState(small, META), "bf16", META)


# What one of eight ranks has, as shapes that one GPU can run: `bench.gpu_table` measures a rank's step, messages aside.
PARTS = {f"{name}-of-8": rank_part(LARGE[name], 8) for name in ("llama-70b", "gpt-oss-120b", "qwen3-235b-a22b")}
