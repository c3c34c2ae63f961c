"""What the executor asks of a model and of a draft head: traits, the shape of the KV, passes.

Both keep weights and nothing that grows with a sequence; their KV is behind `attend`. Implemented in this folder.
"""

from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from roost.config.resolved import ModelTraits
from roost.layers.attention import Attend
from roost.layers.gated_delta import DeltaShape
from roost.layers.ops import Ops
from roost.layers.quantised_kv import CODE_DTYPES, CODE_MAX, SCALE_DTYPE

KEPT_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, **CODE_DTYPES}  # --kv-cache-dtype -> type in slots


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token keeps in one layer, and how it is read. Layers with the same window must have the same shape."""

    window: int | None = None  # tokens that the layer sees, the current one included; None: all
    num_kv_heads: int
    head_dim: int
    scale: float  # of the products of queries and keys
    dtype: torch.dtype  # of keys and values in their slots; as a model declares it, of what it hands to `attend`
    # False: slots hold one vector a token, what a short convolution or a recurrence reads, always as it was computed
    has_values: bool = True
    recurs: DeltaShape | None = None  # the layer has a state, and its slots the inputs since the last one that was kept

    @property
    def is_quantised(self) -> bool:
        """Whether slots hold codes, with a scale for each KV head of keys and of values."""
        return self.dtype in CODE_MAX

    @property
    def token_bytes(self) -> int:
        """Bytes of keys and values, with their scales."""
        scale_bytes = SCALE_DTYPE.itemsize if self.is_quantised else 0
        return (1 + self.has_values) * self.num_kv_heads * (self.head_dim * self.dtype.itemsize + scale_bytes)

    def kept_as(self, kv_cache_dtype: str) -> "KvShape":
        """The same as --kv-cache-dtype has it kept; what names no type leaves the model's own."""
        return replace(self, dtype=KEPT_DTYPES.get(kv_cache_dtype, self.dtype)) if self.has_values else self


def traits_of(kv: tuple[KvShape, ...], *, vocab_size: int, context_max: int, sinks: bool = False) -> ModelTraits:
    """The traits of a model whose layers keep this KV, and of a sequence nothing else but states of recurrent ones."""
    windows = [each.window for each in kv if each.recurs is None]
    return ModelTraits(
        vocab_size=vocab_size,
        window=next((window for window in windows if window is not None), None),
        has_full_layers=None in windows,
        context_max=context_max,
        recurrent_state=any(each.recurs is not None for each in kv),
        sinks=sinks,
    )


class Model(Protocol):
    """A causal language model over a flat batch."""

    @property
    def ops(self) -> Ops:
        """The operations it was made with."""
        ...

    @property
    def traits(self) -> ModelTraits:
        """What its layers need of the KV plane."""
        ...

    @property
    def kv(self) -> tuple[KvShape, ...]:
        """The KV of each layer that keeps some, as `attend` counts them."""
        ...

    @property
    def num_layers(self) -> int:
        """How many layers it has, with those that keep no KV: a draft head reads what goes into them."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Type of its hidden states and logits."""
        ...

    @property
    def hidden_size(self) -> int:
        """Length of its hidden states."""
        ...

    @property
    def activation_width(self) -> int:
        """Length of the longest vector that a pass makes of one token; the memory of a step is counted by it."""
        ...

    def embed(self, tokens: Tensor) -> Tensor:
        """Inputs of the first layer: [num_tokens, hidden_size]."""
        ...

    def forward(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Last hidden states [num_tokens, hidden_size] of a flat batch."""
        ...

    def forward_with_aux(
        self, tokens: Tensor, positions: Tensor, attend: Attend, aux_layers: tuple[int, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Last hidden states, and those at the inputs of the layers in `aux_layers`, in its order.

        The number of layers stands for what the last one puts out, before the final norm.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token: [num_tokens, vocab_size]."""
        ...


class Head(Protocol):
    """Weights of a drafter; what else they offer is between them and their drafter."""

    @property
    def kv(self) -> tuple[KvShape, ...]:
        """The KV that each of its layers keeps, all of one shape, without a window; empty without any."""
        ...


@runtime_checkable
class PairHead(Head, Protocol):
    """An EAGLE head: passes over pairs (token p + 1, hidden p), each in slot p, which is also its position."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of its hidden states."""
        ...

    @property
    def aux_layers(self) -> tuple[int, ...]:
        """What it reads of the target, as `forward_with_aux` takes it; empty: the last hidden states."""
        ...

    @property
    def hidden_size(self) -> int:
        """Length of the hidden states it takes and gives."""
        ...

    @property
    def num_tokens(self) -> int:
        """Size of its own vocabulary."""
        ...

    def fuse(self, last: Tensor, aux_hidden: tuple[Tensor, ...]) -> Tensor:
        """What a pass reads of the target: [num_tokens, hidden_size]."""
        ...

    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states [num_tokens, hidden_size], which the next pass reads in place of the target's.

        Tokens are the target's, as they are everywhere but in `logits`.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of the next token in its own vocabulary, from what `forward` gave: [num_tokens, own vocabulary]."""
        ...

    def token_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of its own."""
        ...
