"""Families of models and of draft heads: which checkpoints are theirs, and how they are loaded.

To add a model, write one file in this folder that ends in a `Family`, and list it in the registry. If its layers are
those of `decoder`, a reader of its config.json is enough; any other object that satisfies `Model` will do as well. A
drafter with weights names its `HeadFamily` in `drafters.registry`.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from roost.layers.ops import Ops
from roost.models.fields import Fields
from roost.models.model import Head, Model


class ModelSizes(Protocol):
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
        """How many layers it has."""
        ...


Config = TypeVar("Config", bound=ModelSizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family(Generic[Config]):
    """How the checkpoints of some architectures become models; what these need of the engine, `Model.traits` says."""

    architectures: tuple[str, ...]  # as config.json names them
    draft_hooks: bool  # its models offer draft heads their embedding and the inputs of their layers
    # refuses what cannot work with a ConfigError that names the key; no tensor has been read by then
    read_config: Callable[[Fields], Config]
    # (config, tensors by Hugging Face's names, --weights, device, operations); a tensor is read when it is looked up
    load: Callable[[Config, Mapping[str, Tensor], str, torch.device, Ops], Model]


class HeadSizes(Protocol):
    """What a head's config must tell before any tensor is read: which target it fits."""

    @property
    def vocab_size(self) -> int:
        """Tokens of the target's vocabulary."""
        ...

    @property
    def num_tokens(self) -> int:
        """Tokens that it can propose."""
        ...

    @property
    def target_hidden_size(self) -> int:
        """Length of the target's hidden states."""
        ...

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Layers of the target that it reads, counted as --draft-layer-ids says; empty: it does not say which."""
        ...


HeadConfig = TypeVar("HeadConfig", bound=HeadSizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFamily(Generic[HeadConfig]):
    """How draft heads of one kind are read."""

    read_config: Callable[[Fields], HeadConfig]  # as that of a `Family`
    # (config, layers of the target whose inputs it reads, tensors, target, --weights, device)
    load: Callable[[HeadConfig, tuple[int, ...], Mapping[str, Tensor], Model, str, torch.device], Head]
    # whether a model's own checkpoint has one, by its config and the names of its tensors; None: heads have folders of
    # their own
    is_within: Callable[[Fields, Iterable[str]], bool] | None = None
