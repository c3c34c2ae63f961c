"""Registry: the model families that there are. A new one is one more entry here.

The one place that knows every family. An architecture that is not here is refused with a list of those that are.
Called by roost.weights, and before a model is loaded by whoever wants to know what its family can do.
"""

from collections.abc import Mapping
from typing import Any

from roost.errors import ConfigError
from roost.models import gemma3, gemma4, gpt_oss, lfm2, llama, mistral, qwen, qwen3_5
from roost.models.decoder_layers import DecoderConfig
from roost.models.family import Family
from roost.models.fields import Fields

FAMILIES: tuple[Family[Any], ...] = (
    llama.FAMILY,
    qwen.QWEN2,
    qwen.QWEN3,
    qwen.QWEN3_MOE,
    mistral.FAMILY,
    gemma3.FAMILY,
    lfm2.FAMILY,
    qwen3_5.DENSE,
    qwen3_5.MOE,
    gemma4.FAMILY,
    gpt_oss.FAMILY,
)
_WITH_IMAGES = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")


def find_family(config: Mapping[str, object]) -> Family[Any]:
    """The family of a config.json, by its first architecture."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError("config.json: architectures is missing; it must name the model's architecture")
    by_name = {name: family for family in FAMILIES for name in family.architectures}
    known = ", ".join(by_name)
    if names[0] in _WITH_IMAGES:
        raise ConfigError(f"config.json: {names[0]} reads images, which is not supported; text models are: {known}")
    if names[0] not in by_name:
        raise ConfigError(f"config.json: the architecture {names[0]} is not known; known are {known}")
    return by_name[names[0]]


def decoder_config(config: Mapping[str, object]) -> DecoderConfig:
    """The decoder that a config.json describes; a model that is no `Decoder` is refused."""
    family = find_family(config)
    found = family.read_config(Fields(config))
    if not isinstance(found, DecoderConfig):
        raise ConfigError(f"config.json: {family.architectures[0]} is not a plain decoder, which is needed here")
    return found
