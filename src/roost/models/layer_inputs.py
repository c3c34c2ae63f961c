"""What tokens tell each layer by itself, beside the residual stream: the per-layer embeddings of Gemma 4.

Made once a pass, of the tokens and of what the first layer reads; a layer takes its part of it through a gate. Scales
that a norm takes out again, or could have in its weight and its epsilon, are put there. Called by the decoder.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from roost.layers.linear import Linear
from roost.layers.ops import Ops, Residual


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerInputs:
    """Makes them for all layers: rows of a table, and the norm of a projection of the embedding.

    They are sqrt(2 / input_len) times those that checkpoints were trained with, which `InputGate` allows for.
    """

    rows: Callable[[Tensor], Tensor]  # from tokens to [num_tokens, num_layers * input_len]
    project: Linear
    norm: Tensor  # [input_len]
    eps: float

    def of(self, tokens: Tensor, embedded: Tensor, ops: Ops) -> Tensor:
        """Of a flat batch: [num_tokens, num_layers, input_len]."""
        shape = -1, len(self.norm)
        projected = ops.linear(embedded, self.project).unflatten(1, shape)
        normed = ops.norm(projected, self.norm, self.eps).flatten(1)
        return ops.scaled_sum(Residual(normed, self.rows(tokens)), 1.0).unflatten(1, shape)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InputGate:
    """Adds to the residual stream what a layer was told."""

    gate: Linear  # from the hidden state to [num_tokens, input_len]
    out: Linear
    norm: Tensor  # [hidden_size]
    eps: float

    def add_to(self, stream: Residual, told: Tensor, ops: Ops, activation: str) -> Residual:
        """The stream, with `told` [num_tokens, input_len] by the gate added."""
        hidden = ops.scaled_sum(stream, 1.0)
        gated = ops.gate_by(ops.linear(hidden, self.gate), told, activation)
        return Residual(hidden, ops.norm(ops.linear(gated, self.out), self.norm, self.eps))
