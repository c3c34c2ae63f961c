"""Qwen 3.5, text: a gated delta rule in most layers, gated attention in the others; dense, or with experts.

Attention rotates a quarter of each head, and a gate beside each query scales what its head reads. Published checkpoints
read images, too: of these the text part is taken, whose config is nested and whose tensors have names of their own.
Reads a config.json into a `DecoderConfig`. Called by the registry.
"""

from collections.abc import Iterable
from dataclasses import replace

from roost.layers.gated_delta import DeltaShape
from roost.layers.rotary import Rope
from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.eagle import HeadConfig
from roost.models.experts import read_experts
from roost.models.family import Family, HeadFamily
from roost.models.fields import Fields
from roost.models.hf_config import FULL, plain_decoder, read_rope
from roost.models.mtp import PREFIX, MtpHead
from roost.models.tensor_names import TensorNames

_LINEAR = "linear_attention"
_TEXT = TensorNames(others=(PREFIX,))
_BESIDE_IMAGES = TensorNames(root="model.language_model.", others=(PREFIX, "model.visual."))
_IMAGE_POSITIONS = ("mrope_section", "mrope_interleaved")  # of text they are those of its tokens


def read_dense(fields: Fields) -> DecoderConfig:
    """The decoder of a Qwen3_5ForCausalLM, or of a Qwen3_5ForConditionalGeneration."""
    text = _text_of(fields)
    return _hybrid(fields, plain_decoder(text, _layers(text), reads=("partial_rotary_factor",)))


def read_moe(fields: Fields) -> DecoderConfig:
    """The same with experts in every layer, and one that every token goes through."""
    text = _text_of(fields)
    experts = replace(read_experts(text), is_normed=True, shared_width=text.integer("shared_expert_intermediate_size"))
    reads = ("partial_rotary_factor", "num_experts", "num_local_experts")
    plain = plain_decoder(text, _layers(text), width=experts.shared_width, reads=reads)
    return replace(_hybrid(fields, plain), feed_forward=experts, feeds=experts.feeds)


def read_mtp(fields: Fields) -> HeadConfig:
    """The MTP head of either: a layer of attention, with the model's feed-forward."""
    readers = {name: family.read_config for family in (DENSE, MOE) for name in family.architectures}
    name = fields.choices("architectures", readers)[0] if fields.has("architectures") else None
    text = _text_of(fields)
    if name is None or not _says_mtp(fields):
        raise text.wrong("mtp_num_hidden_layers", "must be 1 for a checkpoint with an MTP head")
    text.refuse_unless("mtp_use_dedicated_embeddings", False)
    model = readers[name](fields)
    layers = replace(model, layers=(LayerKind(rope=_rope(text)),))
    return HeadConfig(layers=layers, target_hidden_size=model.hidden_size, num_tokens=model.vocab_size)


def _says_mtp(fields: Fields) -> bool:
    return _text_of(fields).integer("mtp_num_hidden_layers", 0, least=0) == 1


def _has_mtp(fields: Fields, names: Iterable[str]) -> bool:
    return _says_mtp(fields) and any(name.startswith(PREFIX) for name in names)


def _hybrid(fields: Fields, plain: DecoderConfig) -> DecoderConfig:
    """What both have in common."""
    text = _text_of(fields)
    biased = text.flag("attention_bias", False)
    text.refuse_unless("attn_output_gate", True)
    text.refuse_unless("output_gate_type", "swish", "silu")  # of the gated delta rule, as is the convolution's
    text.refuse_unless("hidden_act", "silu")
    return replace(
        plain,
        tied=fields.flag("tie_word_embeddings", plain.tied),  # of the whole model, where the text is a part of it
        qk_norm=True,
        out_gate=True,
        qkv_bias=biased,
        out_bias=biased,
        norm_offset=1.0,
        names=_BESIDE_IMAGES if fields.has("text_config") else _TEXT,
    )


def _text_of(fields: Fields) -> Fields:
    return fields.group("text_config") if fields.has("text_config") else fields


def _layers(text: Fields) -> tuple[LayerKind, ...]:
    number, period = text.integer("num_hidden_layers"), text.integer("full_attention_interval", 4)
    types = tuple(_LINEAR if (layer + 1) % period else FULL for layer in range(number))
    if text.has("layer_types"):
        types = text.choices("layer_types", (FULL, _LINEAR))
    if len(types) != number:
        raise text.wrong("layer_types", f"has {len(types)} entries for {number} layers")
    full = LayerKind(rope=_rope(text))
    linear = replace(full, delta=_delta(text))
    return tuple(full if kind == FULL else linear for kind in types)


def _rope(text: Fields) -> Rope:
    rope = read_rope(text, reads=("partial_rotary_factor", *_IMAGE_POSITIONS))
    group = text.group("rope_parameters" if text.has("rope_parameters") else "rope_scaling")
    share = group.number("partial_rotary_factor", text.number("partial_rotary_factor", 0.25))
    head_dim = text.integer("head_dim")
    rotated_len = int(head_dim * share)
    if not 0 < rotated_len <= head_dim or rotated_len % 2:
        raise group.wrong("partial_rotary_factor", f"is {share:g}: of {head_dim} dimensions an even number must rotate")
    return rope if rotated_len == head_dim else replace(rope, rotated_len=rotated_len)


def _delta(text: Fields) -> DeltaShape:
    num_key_heads, num_value_heads = text.integer("linear_num_key_heads"), text.integer("linear_num_value_heads")
    if num_value_heads % num_key_heads:
        raise text.wrong("linear_num_value_heads", f"is {num_value_heads}, not a multiple of {num_key_heads} key heads")
    return DeltaShape(
        num_key_heads=num_key_heads,
        num_value_heads=num_value_heads,
        key_dim=text.integer("linear_key_head_dim"),
        value_dim=text.integer("linear_value_head_dim"),
        conv_len=text.integer("linear_conv_kernel_dim", 4, least=2),
    )


DENSE = Family(
    architectures=("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    draft_hooks=True,
    read_config=read_dense,
    load=Decoder,
)
MOE = Family(
    architectures=("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
    draft_hooks=True,
    read_config=read_moe,
    load=Decoder,
)
MTP = HeadFamily(
    read_config=read_mtp,
    load=MtpHead,
    is_within=_has_mtp,
)
