"""Qwen 2 (biased queries, keys and values) and Qwen 3 (queries and keys normed head by head).

Both may have a sliding window in their upper layers, which released configs switch off. Reads a config.json into a
`DecoderConfig`; tensor names are the decoder's own. Called by the registry.
"""

from dataclasses import replace

from roost.models.decoder import Decoder, DecoderConfig, LayerKind
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import FULL, SLIDING, layer_types, plain_decoder, read_rope


def read_qwen2(fields: Fields) -> DecoderConfig:
    """The decoder of a Qwen2ForCausalLM."""
    fields.refuse_unless("attention_bias", True)  # it has these biases, and no others
    return replace(plain_decoder(fields, _layers(fields)), qkv_bias=True)


def read_qwen3(fields: Fields) -> DecoderConfig:
    """The decoder of a Qwen3ForCausalLM."""
    biased = fields.flag("attention_bias", False)
    return replace(plain_decoder(fields, _layers(fields)), qk_norm=True, qkv_bias=biased, out_bias=biased)


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
