"""Operations of a step that have a faster form on some devices, and the torch form of each.

A model is made with one `Ops`; it and the forward passes use it for all of these operations. Pure functions over a flat
batch; the torch forms here are the reference that every other form is tested against. Called by models; chosen at
start-up.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from roost.layers.norm import rms_norm
from roost.layers.rotary import CosSin, cos_sin_at
from roost.layers.rounds import (
    ChainInputs,
    ChainPlaces,
    Pages,
    RowState,
    SettledChains,
    chain_inputs,
    chain_places,
    settle_chains,
)

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
    cos_sin: Callable[[Tensor, Tensor, torch.dtype], CosSin]  # (positions, frequency, dtype): of the rotary angles
    # (rows, row state, drafts, page tables): the target's batch of rounds that are chains
    chain_inputs: Callable[[Tensor, RowState, Tensor | None, tuple[Pages, ...]], ChainInputs]
    # (rows, start positions, number of steps, page table): where a draft head writes
    chain_places: Callable[[Tensor, Tensor, int, Pages], ChainPlaces]
    # (rows, row state, that batch, drawn tokens, padding row, page table): what they accept
    settle_chains: Callable[[Tensor, RowState, ChainInputs, Tensor, int, Pages], SettledChains]


def _add_norm(hidden: Tensor, added: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = hidden + added
    return hidden, rms_norm(hidden, weight, eps)


def _gate_up(both: Tensor, activation: str) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    return ACTIVATIONS[activation](gate) * up


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


TORCH_OPS = Ops(
    norm=rms_norm,
    add_norm=_add_norm,
    gate_up=_gate_up,
    argmax=_argmax,
    cos_sin=cos_sin_at,
    chain_inputs=chain_inputs,
    chain_places=chain_places,
    settle_chains=settle_chains,
)
