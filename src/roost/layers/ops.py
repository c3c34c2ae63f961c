"""Operations of a step that have a faster form on some devices, and the torch form of each.

A model is made with one `Ops`; it and the forward passes use it for all of these operations. Pure functions over a flat
batch; the torch forms here are the reference that every other form is tested against. Called by models; chosen at
start-up.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from roost.layers import host_gumbel, host_lookup, host_rounds
from roost.layers.experts import Experts, Routed, best_experts, mix_experts
from roost.layers.gated_delta import DeltaWeights, Recurrence, gated_delta
from roost.layers.group import ALONE, Group
from roost.layers.gumbel import RowDraws, best_drafts, draft_scores, draw
from roost.layers.linear import Linear
from roost.layers.lookup import Found, Texts, find_drafts
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
from roost.layers.soft_cap import soft_cap
from roost.layers.token_mask import mask_logits, mask_logits_on_host

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "gelu_pytorch_tanh": partial(gelu, approximate="tanh"),
}
CLAMPED = "clamped_swiglu"  # no activation of a config.json, but what the experts of gpt-oss do
CLAMP_LIMIT, CLAMP_ALPHA = 7.0, 1.702  # of its gate and up, and how steep its gate is


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scaled:
    """A norm half done by whoever summed the stream: what is left is one factor a token."""

    weight: Tensor  # the norm's
    rows: Tensor  # the sum times that weight
    squares: Tensor  # [num_tokens, num_parts] float32: of the sum, part by part


@dataclass(frozen=True, slots=True, eq=False)
class Residual:
    """The residual stream: `hidden`, plus what was left to be added by the operation that reads it next."""

    hidden: Tensor
    added: Tensor | None = None
    scaled: Scaled | None = None

    def total(self) -> Tensor:
        """The sum."""
        return self.hidden if self.added is None else self.hidden + self.added


PassFunction = Callable[[Sequence[Tensor]], Sequence[Tensor]]  # from tensors with a row for each token to others


class Pass(Protocol):
    """A forward pass that is run again and again: it may be recorded once and replayed."""

    def run(
        self, shape: Hashable, function: PassFunction, inputs: Sequence[Tensor], batch: object
    ) -> tuple[Tensor, ...]:
        """What `function` makes of `inputs`, tensors with a row for each token, beside what it knows of the `batch`.

        Calls of one `shape` do the same, but for the tokens and for what attention reads of the batch. What is returned
        may change when the pass runs again.
        """
        ...


class DirectPass:
    """One that is not recorded."""

    def run(
        self, shape: Hashable, function: PassFunction, inputs: Sequence[Tensor], batch: object
    ) -> tuple[Tensor, ...]:
        """Call the function."""
        return tuple(function(inputs))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ops:
    """One form of each operation.

    Those of the residual stream take a projection together with what stands around it in a layer, so that a form may
    fuse them. Whoever reads the stream through a norm also returns its sum.
    """

    new_pass: Callable[[], Pass]  # a pass of its own
    keep: Callable[[Linear, bool], Linear]  # (projection, is it gate and up stacked): as these operations read it
    look_up: Callable[[Tensor, Tensor], Tensor]  # (table, tokens): their rows, an embedding
    norm: Callable[[Tensor, Tensor, float], Tensor]  # (hidden, weight, eps): the root-mean-square norm
    add_norm: Callable[[Residual, Tensor, float], tuple[Tensor, Tensor]]  # (stream, weight, eps): sum and its norm
    norm_linear: Callable[[Residual, Tensor, float, Linear], tuple[Tensor, Tensor]]  # (…, projection): sum, projected
    norm_gate_up: Callable[[Residual, Tensor, float, Linear, str], tuple[Tensor, Tensor]]  # …: sum, activation(gate)*up
    linear_add: Callable[[Tensor, Linear, Tensor, Tensor | None], Residual]  # (x, projection, hidden, weight of the …
    # … norm through which the stream is read next, if that is known): hidden plus x projected
    linear: Callable[[Tensor, Linear], Tensor]  # (x, projection): x projected
    # (gate and up side by side, activation): activation(gate) * up, or what `CLAMPED` says
    gate_up: Callable[[Tensor, str], Tensor]
    gate_by: Callable[[Tensor, Tensor, str], Tensor]  # (gate, up, activation): the same of two that lie apart
    scaled_sum: Callable[[Residual, float], Tensor]  # (stream, factor): its sum times the factor
    best_experts: Callable[[Tensor, int, bool], Routed]  # (scores, how many, whether shares sum up to one): the best
    mix_experts: Callable[[Tensor, Routed, Experts], Tensor]  # (normed, whose experts, they): what they say together
    # (inputs, what is learned, inputs and states so far): what heads say
    gated_delta: Callable[[Tensor, DeltaWeights, Recurrence], Tensor]
    concat: Callable[[Sequence[Tensor]], Tensor]  # (rows of several widths): side by side
    # (logits): the id of the largest, the lowest of several; a pass that `new_pass` made may find it without making the
    # logits, so that nothing else in it may read them
    argmax: Callable[[Tensor], Tensor]
    soft_cap: Callable[[Tensor, float], None]  # (logits, cap): cap * tanh(logits / cap), in place
    # (logits, rows, positions, how rows are drawn): tokens drawn with Gumbel noise
    draw: Callable[[Tensor, Tensor, Tensor, RowDraws], Tensor]
    # (a head's logits, the target's ids of its tokens, rows, positions, how rows are drawn): scores of drafts
    draft_scores: Callable[[Tensor, Tensor, Tensor, Tensor, RowDraws], Tensor]
    # (the same): the head's ids of the largest of them
    best_drafts: Callable[[Tensor, Tensor, Tensor, Tensor, RowDraws], Tensor]
    # (texts of all rows, rows, positions of their last tokens, how many drafts): what followed such tokens before
    find_drafts: Callable[[Texts, Tensor, Tensor, int], Found]
    # (logits, nodes, masks): forbid tokens at some nodes, in place
    mask_logits: Callable[[Tensor, Tensor, Tensor], None]
    cos_sin: Callable[[Tensor, Tensor, torch.dtype], CosSin]  # (positions, frequency, dtype): of the rotary angles
    # (rows, row state, drafts, page tables): the target's batch of rounds that are chains
    chain_inputs: Callable[[Tensor, RowState, Tensor | None, tuple[Pages, ...]], ChainInputs]
    # (rows, start positions, number of steps, page table): where a draft head writes
    chain_places: Callable[[Tensor, Tensor, int, Pages], ChainPlaces]
    # (rows, row state, that batch, drawn tokens, padding row, page table): what they accept
    settle_chains: Callable[[Tensor, RowState, ChainInputs, Tensor, int, Pages], SettledChains]
    group: Group = ALONE  # the ranks that share the model


def _keep(project: Linear, is_gated: bool) -> Linear:
    return project


def _look_up(table: Tensor, tokens: Tensor) -> Tensor:
    return table[tokens]


def _add_norm(stream: Residual, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    hidden = stream.total()
    return hidden, rms_norm(hidden, weight, eps)


def _norm_linear(stream: Residual, weight: Tensor, eps: float, project: Linear) -> tuple[Tensor, Tensor]:
    hidden, normed = _add_norm(stream, weight, eps)
    return hidden, project(normed)


def _norm_gate_up(
    stream: Residual, weight: Tensor, eps: float, project: Linear, activation: str
) -> tuple[Tensor, Tensor]:
    hidden, both = _norm_linear(stream, weight, eps, project)
    return hidden, _gate_up(both, activation)


def _linear_add(x: Tensor, project: Linear, hidden: Tensor, next_norm: Tensor | None) -> Residual:
    return Residual(hidden, project(x))


def _linear(x: Tensor, project: Linear) -> Tensor:
    return project(x)


def _gate_up(both: Tensor, activation: str) -> Tensor:
    gate, up = both.chunk(2, dim=-1)
    if activation == CLAMPED:
        gate, up = gate.clamp(max=CLAMP_LIMIT), up.clamp(min=-CLAMP_LIMIT, max=CLAMP_LIMIT)
        return (up + 1) * (gate * (gate * CLAMP_ALPHA).sigmoid())
    return ACTIVATIONS[activation](gate) * up


def _gate_by(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    # side by side, a row is not followed by the next, and its bits do not depend on how many there are
    return _gate_up(_concat([gate, up]), activation)


def _scaled_sum(stream: Residual, factor: float) -> Tensor:
    total = stream.total()
    return total if factor == 1.0 else total * factor


def _concat(parts: Sequence[Tensor]) -> Tensor:
    return torch.cat(tuple(parts), dim=-1)


def _argmax(logits: Tensor) -> Tensor:
    return logits.argmax(dim=-1)


def argmax_on_host(logits: Tensor) -> Tensor:
    """The same in numpy, which takes a tenth of the time."""
    return torch.from_numpy(logits.numpy().argmax(axis=-1)) if logits.dtype == torch.float32 else _argmax(logits)


TORCH_OPS = Ops(
    new_pass=DirectPass,
    keep=_keep,
    look_up=_look_up,
    norm=rms_norm,
    add_norm=_add_norm,
    norm_linear=_norm_linear,
    norm_gate_up=_norm_gate_up,
    linear_add=_linear_add,
    linear=_linear,
    gate_up=_gate_up,
    gate_by=_gate_by,
    scaled_sum=_scaled_sum,
    best_experts=best_experts,
    mix_experts=partial(mix_experts, gate_up=_gate_up),
    gated_delta=gated_delta,
    concat=_concat,
    argmax=_argmax,
    soft_cap=soft_cap,
    draw=draw,
    draft_scores=draft_scores,
    best_drafts=best_drafts,
    find_drafts=find_drafts,
    mask_logits=mask_logits,
    cos_sin=cos_sin_at,
    chain_inputs=chain_inputs,
    chain_places=chain_places,
    settle_chains=settle_chains,
)


def on_host(ops: Ops) -> Ops:
    """The same where tensors are in the host's memory: what the host does better without torch, it does so."""
    return replace(
        ops,
        argmax=argmax_on_host if ops.argmax is TORCH_OPS.argmax else ops.argmax,
        draw=host_gumbel.draw,
        draft_scores=host_gumbel.draft_scores,
        best_drafts=host_gumbel.best_drafts,
        find_drafts=host_lookup.find_drafts,
        mask_logits=mask_logits_on_host,
        chain_inputs=host_rounds.chain_inputs if ops.chain_inputs is chain_inputs else ops.chain_inputs,
        chain_places=host_rounds.chain_places if ops.chain_places is chain_places else ops.chain_places,
        settle_chains=host_rounds.settle_chains if ops.settle_chains is settle_chains else ops.settle_chains,
    )
