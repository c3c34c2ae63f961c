"""Mistral: Llama with a sliding window in every layer, or in none where the config has no window.

Reads a config.json into a `DecoderConfig`; tensor names are the decoder's own. Called by the registry.
The window counts the current token, as transformers counts it.
"""

from roost.models.decoder import Decoder
from roost.models.decoder_layers import DecoderConfig
from roost.models.family import Family
from roost.models.fields import Fields
from roost.models.hf_config import plain_decoder, uniform_layers


def read_config(fields: Fields) -> DecoderConfig:
    """The decoder of a MistralForCausalLM."""
    fields.refuse_unless("attention_bias", False)
    window = fields.integer("sliding_window") if fields.has("sliding_window") else None
    return plain_decoder(fields, uniform_layers(fields, window=window))


FAMILY = Family(
    architectures=("MistralForCausalLM",),
    draft_hooks=True,
    read_config=read_config,
    load=Decoder,
)
