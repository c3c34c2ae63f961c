"""Registry: which architectures there are, what each declares, and how its config.json is read.

The one place that knows every family. An architecture that is not here is refused with a list of those that are.
Called by roost.weights and by whoever wants to know what a family can do before it is loaded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from roost.errors import ConfigError
from roost.models import gemma3, llama, mistral, qwen
from roost.models.decoder import DecoderConfig
from roost.models.fields import Fields
from roost.models.model import Capabilities


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """How the checkpoints of one architecture are read, and what they may need."""

    capabilities: Capabilities
    read_config: Callable[[Fields], DecoderConfig]


FAMILIES: Mapping[str, Family] = {
    "LlamaForCausalLM": Family(capabilities=llama.CAPABILITIES, read_config=llama.read_config),
    "Qwen2ForCausalLM": Family(capabilities=qwen.CAPABILITIES, read_config=qwen.read_qwen2),
    "Qwen3ForCausalLM": Family(capabilities=qwen.CAPABILITIES, read_config=qwen.read_qwen3),
    "MistralForCausalLM": Family(capabilities=mistral.CAPABILITIES, read_config=mistral.read_config),
    "Gemma3ForCausalLM": Family(capabilities=gemma3.CAPABILITIES, read_config=gemma3.read_config),
}
_WITH_IMAGES = ("Gemma3ForConditionalGeneration", "Mistral3ForConditionalGeneration")


def find_family(config: Mapping[str, object]) -> Family:
    """The family of a config.json, by its first architecture."""
    names = config.get("architectures")
    if not isinstance(names, list) or not names:
        raise ConfigError("config.json: architectures is missing; it must name the model's architecture")
    known = ", ".join(FAMILIES)
    if names[0] in _WITH_IMAGES:
        raise ConfigError(f"config.json: {names[0]} reads images, which is not supported; text models are: {known}")
    if names[0] not in FAMILIES:
        raise ConfigError(f"config.json: the architecture {names[0]} is not known; known are {known}")
    return FAMILIES[names[0]]


def decoder_config(config: Mapping[str, object]) -> DecoderConfig:
    """The decoder that a config.json describes."""
    return find_family(config).read_config(Fields(config))
