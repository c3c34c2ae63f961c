"""Llama 1 to 3 and what shares their architecture, such as SmolLM2: full attention in every layer.

Reads a config.json into a `DecoderConfig`; tensor names are the decoder's own. Llama 3's rope scaling comes with the
rope. Called by the registry.
"""

from dataclasses import replace

from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import plain_decoder, uniform_layers


def read_config(fields: Fields) -> DecoderConfig:
    """The decoder of a LlamaForCausalLM."""
    biased = fields.flag("attention_bias", False)
    return replace(plain_decoder(fields, uniform_layers(fields, window=None)), qkv_bias=biased, out_bias=biased)


FAMILY = Family(
    architectures=("LlamaForCausalLM",),
    draft_hooks=True,
    read_config=read_config,
    load=Decoder,
)
