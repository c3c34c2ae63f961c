"""What the executor asks of a model: its traits, the shape of its KV, and two passes.

A model keeps weights and nothing that grows with a sequence; its KV is behind `attend`. Implemented in this folder.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from roost.config import ModelTraits
from roost.layers.attention import Attend


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token keeps, layer by layer."""

    windows: tuple[int | None, ...]  # [num_layers] sliding window, None for a full layer
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype


class Model(Protocol):
    """A decoder."""

    @property
    def traits(self) -> ModelTraits:
        """What its layers need of the KV plane."""
        ...

    @property
    def kv(self) -> KvShape:
        """The KV its layers hand to `attend`."""
        ...

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [num_tokens, hidden_size] of a flat batch."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token: [num_tokens, vocab_size]."""
        ...
