"""Gemma 3, text only: most layers with a sliding window and a rope of their own, some with full attention.

Norms before and after attention and feed-forward, their weights kept as offsets from one; normed queries and keys; a
scaled embedding. Reads a config.json into a `DecoderConfig` and names its norms. Called by the registry.
"""

from dataclasses import replace

from roost.layers.rotary import Rope
from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import FULL, SLIDING, layer_types, plain_decoder, rope_of
from roost.models.tensor_names import NormNames

_NORMS = NormNames(
    after_attention="post_attention_layernorm",
    before_feed="pre_feedforward_layernorm",
    after_feed="post_feedforward_layernorm",
)


def read_config(fields: Fields) -> DecoderConfig:
    """The decoder of a Gemma3ForCausalLM."""
    fields.refuse_unless("attention_bias", False)
    plain = plain_decoder(fields, _layers(fields), activation_key="hidden_activation", tied=True)
    return replace(
        plain,
        scale=fields.number("query_pre_attn_scalar") ** -0.5,
        qk_norm=True,
        norms=_NORMS,
        norm_offset=1.0,
        embed_scale=plain.hidden_size**0.5,
    )


def _layers(fields: Fields) -> tuple[LayerKind, ...]:
    period = fields.integer("sliding_window_pattern", 6)  # every so many layers one is full
    numbers = range(1, fields.integer("num_hidden_layers") + 1)
    types = layer_types(fields, tuple(SLIDING if number % period else FULL for number in numbers))
    ropes, window = _ropes(fields), fields.integer("sliding_window")
    return tuple(LayerKind(rope=ropes[kind], window=window if kind == SLIDING else None) for kind in types)


def _ropes(fields: Fields) -> dict[str, Rope]:
    """A rope for each type of layer; the older style scales that of full layers alone."""
    theta, local = fields.number("rope_theta", 1000000.0), fields.number("rope_local_base_freq", 10000.0)
    if not fields.has("rope_parameters"):
        return {FULL: rope_of(fields.group("rope_scaling"), theta), SLIDING: Rope(theta=local)}
    fields.refuse_unless("rope_scaling")
    group = fields.group("rope_parameters")
    group.refuse_others((FULL, SLIDING))
    return {FULL: rope_of(group.group(FULL), theta), SLIDING: rope_of(group.group(SLIDING), local)}


FAMILY = Family(
    architectures=("Gemma3ForCausalLM",),
    draft_hooks=True,
    read_config=read_config,
    load=Decoder,
)
