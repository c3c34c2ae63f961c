"""Qwen 2 (biased queries, keys and values), Qwen 3 (queries and keys normed head by head) and Qwen 3 with experts.

All may have a sliding window, in their upper layers or with experts in all, which released configs switch off. Reads a
config.json into a `DecoderConfig`; tensor names are the decoder's own. Called by the registry.
"""

from dataclasses import replace

from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.experts import read_experts
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import FULL, SLIDING, layer_types, plain_decoder, read_rope, uniform_layers


def read_qwen2(fields: Fields) -> DecoderConfig:
    """The decoder of a Qwen2ForCausalLM."""
    fields.refuse_unless("attention_bias", True)  # it has these biases, and no others
    return replace(plain_decoder(fields, _layers(fields)), qkv_bias=True)


def read_qwen3(fields: Fields) -> DecoderConfig:
    """The decoder of a Qwen3ForCausalLM."""
    biased = fields.flag("attention_bias", False)
    return replace(plain_decoder(fields, _layers(fields)), qk_norm=True, qkv_bias=biased, out_bias=biased)


def read_qwen3_moe(fields: Fields) -> DecoderConfig:
    """The decoder of a Qwen3MoeForCausalLM: experts in every layer, or in every n-th, but for those that are listed."""
    biased, sliding = fields.flag("attention_bias", False), fields.flag("use_sliding_window", False)
    layers = uniform_layers(fields, window=fields.integer("sliding_window") if sliding else None)
    plain = plain_decoder(fields, layers, reads=("num_experts", "num_local_experts"))
    plain = replace(plain, qk_norm=True, qkv_bias=biased, out_bias=biased)
    experts, period = read_experts(fields), fields.integer("decoder_sparse_step", 1)
    without = fields.integers("mlp_only_layers") if fields.has("mlp_only_layers") else ()
    has_experts = [number not in without and (number + 1) % period == 0 for number in range(len(layers))]
    return replace(
        plain,
        layers=tuple(
            replace(kind, feed_forward=experts if own else None) for kind, own in zip(layers, has_experts, strict=True)
        ),
        feeds=experts.feeds,
    )


def _layers(fields: Fields) -> tuple[LayerKind, ...]:
    num_layers, rope = fields.integer("num_hidden_layers"), read_rope(fields)
    sliding = fields.flag("use_sliding_window", False)
    first = fields.integer("max_window_layers", least=0) if sliding and not fields.has("layer_types") else num_layers
    types = layer_types(fields, tuple(SLIDING if number >= first else FULL for number in range(num_layers)))
    if SLIDING in types and not sliding:
        raise fields.wrong("layer_types", f"has {SLIDING}, but use_sliding_window is not true")
    window = fields.integer("sliding_window") if SLIDING in types else None
    return tuple(LayerKind(rope=rope, window=window if kind == SLIDING else None) for kind in types)


QWEN2 = Family(architectures=("Qwen2ForCausalLM",), draft_hooks=True, read_config=read_qwen2, load=Decoder)
QWEN3 = Family(architectures=("Qwen3ForCausalLM",), draft_hooks=True, read_config=read_qwen3, load=Decoder)
QWEN3_MOE = Family(architectures=("Qwen3MoeForCausalLM",), draft_hooks=True, read_config=read_qwen3_moe, load=Decoder)
