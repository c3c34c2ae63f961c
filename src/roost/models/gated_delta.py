"""A gated delta rule in place of attention, as most layers of Qwen 3.5 have it: what is around the recurrence.

A projection gives queries, keys and values for the recurrence, how much its heads forget and learn, and the gate behind
it. Where weights are quantised, what is forgotten and learned is projected by floats. The recurrence is an operation;
its inputs and states are behind `attend`. Called by the decoder.
"""

from dataclasses import dataclass

from torch import Tensor

from roost.layers.attention import Attend
from roost.layers.gated_delta import DeltaWeights, Recurs
from roost.layers.linear import Linear
from roost.layers.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DeltaMixer:
    """What a layer computes between its first projection and its last."""

    weights: DeltaWeights
    rates: Linear | None  # how much to forget and to learn, where the layer's first projection does not say it
    norm: Tensor  # [num_value_heads, value_dim]

    def project(self, normed: Tensor, project: Linear, ops: Ops) -> Tensor:
        """Inputs of the recurrence and the gate [num_tokens, …], where they are two projections."""
        assert self.rates is not None
        both, num_channels = ops.linear(normed, project), self.weights.shape.num_channels
        channels, gate = both[:, :num_channels], both[:, num_channels:]
        return ops.concat([channels, ops.linear(normed, self.rates).to(both.dtype), gate])

    def mixed(self, number: int, projected: Tensor, attend: Attend, ops: Ops, eps: float) -> Tensor:
        """What the heads of layer `number` say, through their norm and the gate: [num_tokens, …]."""
        assert isinstance(attend, Recurs), attend
        inputs, gate = projected.tensor_split((self.weights.shape.input_len,), dim=1)
        said = ops.gated_delta(inputs, self.weights, attend.recurrence(number, inputs))
        return ops.gate_by(gate, ops.norm(said, self.norm, eps).flatten(1), "silu")
