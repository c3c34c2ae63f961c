"""Operations of a decoder that have a faster form on some devices, and the torch form of each.

A model is made with one `Ops` and uses it for all of these operations. Pure functions over a flat batch; the torch
forms here are the reference that every other form is tested against. Called by models; chosen at start-up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor
from torch.nn.functional import gelu, silu

from roost.layers.norm import rms_norm

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One form of each operation."""

    norm: Callable[[Tensor, Tensor, float], Tensor]  # (hidden, weight, eps): the root-mean-square norm
    add_norm: Callable[[Tensor, Tensor, Tensor, float], tuple[Tensor, Tensor]]  # (hidden, added, …): sum and its norm
    gate_up: Callable[[Tensor, str], Tensor]  # (gate and up side by side, activation): activation(gate) * up
    argmax: Callable[[Tensor], Tensor]  # (logits): the id of the largest, the lowest of several


def _add_norm(hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = hidden + added
    return hidden, rms_norm(hidden, weight, eps)


def _gate_up(both: Tensor, activation: str) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


TORCH_OPS = Ops(norm=rms_norm, add_norm=_add_norm, gate_up=_gate_up, argmax=_argmax)
