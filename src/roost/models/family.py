"""A model family: which checkpoints are its own, what they may need of the engine, and how they become a model.

To add one, write one file in this folder that ends in a `Family`, and list it in the registry. A model whose layers
are those of `decoder` needs only a reader of its config.json; any other object that satisfies `Model` will do as well.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from roost.layers.ops import Ops
from roost.models.fields import Fields
from roost.models.model import Model


@dataclass(frozen=True, slots=True, kw_only=True)
class Capabilities:
    """What checkpoints of a family may ask of the engine, and offer it."""

    window: bool  # layers with a sliding window
    recurrent_state: bool = False  # a state per sequence besides its KV
    draft_hooks: bool  # hidden states at the inputs of layers, for a drafter


class Sizes(Protocol):
    """What a config must tell before any tensor is read: whether a draft head fits the model."""

    @property
    def vocab_size(self) -> int:
        """Tokens of its vocabulary."""
        ...

    @property
    def hidden_size(self) -> int:
        """Length of its hidden states."""
        ...

    @property
    def num_layers(self) -> int:
        """Layers that keep KV, in the order in which `attend` counts them."""
        ...


Config = TypeVar("Config", bound=Sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[Config]):
    """How the checkpoints of some architectures are read, and what they may need."""

    architectures: tuple[str, ...]  # as config.json names them
    capabilities: Capabilities
    # refuses what cannot work with a ConfigError that names the key; no tensor has been read by then
    read_config: Callable[[Fields], Config]
    # (config, tensors by Hugging Face's names, --weights, device, operations); a tensor is read when it is looked up
    load: Callable[[Config, Mapping[str, Tensor], str, torch.device, Ops], Model]
