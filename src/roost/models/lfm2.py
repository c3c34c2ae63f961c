"""LFM2: short convolutions in most layers, full attention with normed queries and keys in the others.

Tensor names of its own. The width of the feed-forward follows from three numbers of a config.json, which is read into a
`DecoderConfig`. Called by the registry.
"""

from dataclasses import replace

from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig, LayerKind
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import FULL, plain_decoder, read_rope
from roost.models.tensor_names import NormNames, TensorNames

_CONV = "conv"
_NAMES = TensorNames(
    out="self_attn.out_proj",
    query_norm="self_attn.q_layernorm",
    key_norm="self_attn.k_layernorm",
    gate="feed_forward.w1",
    up="feed_forward.w3",
    down="feed_forward.w2",
    last_norm="embedding_norm",
)


def read_config(fields: Fields) -> DecoderConfig:
    """The decoder of an Lfm2ForCausalLM."""
    rope, conv_len = read_rope(fields, theta=1000000.0), fields.integer("conv_L_cache", 3, least=2)
    layers = tuple(LayerKind(rope=rope, conv_len=None if kind == FULL else conv_len) for kind in _layer_types(fields))
    plain = plain_decoder(fields, layers, norm_eps_key="norm_eps", activation="silu", tied=True, width=_width(fields))
    return replace(
        plain,
        tied=fields.flag("tie_embedding", plain.tied),  # where both are there, the older name counts
        qk_norm=True,
        conv_bias=fields.flag("conv_bias", False),
        names=_NAMES,
        norms=NormNames(before_attention="operator_norm", before_feed="ffn_norm"),
    )


def _layer_types(fields: Fields) -> tuple[str, ...]:
    number = fields.integer("num_hidden_layers")
    if fields.has("layer_types"):
        types = fields.choices("layer_types", (FULL, _CONV))
        if len(types) != number:
            raise fields.wrong("layer_types", f"has {len(types)} entries for {number} layers")
        return types
    full = fields.integers("full_attn_idxs") if fields.has("full_attn_idxs") else tuple(range(number))
    return tuple(FULL if layer in full else _CONV for layer in range(number))


def _width(fields: Fields) -> int:
    """Of the feed-forward."""
    width = fields.integer("block_ff_dim" if fields.has("block_ff_dim") else "intermediate_size")
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return width
    width = int(fields.number("block_ffn_dim_multiplier", 1.0) * int(2 * width / 3))
    multiple = fields.integer("block_multiple_of", 256)
    return -(-width // multiple) * multiple


FAMILY = Family(architectures=("Lfm2ForCausalLM",), draft_hooks=True, read_config=read_config, load=Decoder)
