"""The operations of a decoder in Triton: one form for all of them, as `layers.ops` has one in torch.

A projection of few tokens by a plain weight takes in the norm in front of it and the gate or the sum behind it; every
other one stands between kernels of their own. Chosen at start-up, beside the attention backend of the same name. Called
by models.
"""

import torch
from torch import Tensor

from roost.kernels.argmax import argmax
from roost.kernels.capability import can_overlap, shared_bytes
from roost.kernels.cos_sin import cos_sin
from roost.kernels.experts import mix_experts
from roost.kernels.few_token_linear import few_token_linear, new_scaled
from roost.kernels.gated_activation import gate_by, gate_up
from roost.kernels.gated_delta import gated_delta
from roost.kernels.gumbel import best_drafts, draft_scores, draw
from roost.kernels.linear_tilings import BlockTiling, RowTiling, Tiling, linear_tiling
from roost.kernels.lookup import find_drafts
from roost.kernels.norm import add_rms_norm, rms_norm
from roost.kernels.one_token_linear import one_token_linear
from roost.kernels.rounds import chain_inputs, chain_places, settle_chains
from roost.kernels.routing import best_experts
from roost.kernels.scaled_sum import scaled_sum
from roost.kernels.soft_cap import soft_cap
from roost.kernels.token_mask import mask_logits
from roost.layers.linear import Linear, PlainLinear
from roost.layers.ops import TORCH_OPS, Ops, Residual

_ALIGNED = 8  # numbers between whole vectors


def _add_norm(stream: Residual, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    if stream.added is None:
        return stream.hidden, rms_norm(stream.hidden, weight, eps)
    return add_rms_norm(stream.hidden, stream.added, weight, eps)


def _norm_linear(stream: Residual, weight: Tensor, eps: float, project: Linear) -> tuple[Tensor, Tensor]:
    return _norm_project(stream, weight, eps, project, None)


def _norm_gate_up(
    stream: Residual, weight: Tensor, eps: float, project: Linear, activation: str
) -> tuple[Tensor, Tensor]:
    return _norm_project(stream, weight, eps, project, activation)


def _norm_project(
    stream: Residual, weight: Tensor, eps: float, project: Linear, activation: str | None
) -> tuple[Tensor, Tensor]:
    """The stream's sum, and its norm projected and gated: all in one kernel, or the norm before it, or each alone."""
    plain, scaled = _plain(stream.hidden, project, is_gated=activation is not None), stream.scaled
    if plain is not None and stream.added is None:
        matrix, tiling = plain
        if isinstance(tiling, BlockTiling) and scaled is not None and scaled.weight is weight:
            return stream.hidden, few_token_linear(
                scaled.rows, matrix, tiling, squares=scaled.squares, eps=eps, activation=activation
            )
        if isinstance(tiling, RowTiling) and tiling.block_k >= matrix.shape[1]:
            return stream.hidden, one_token_linear(
                stream.hidden, matrix, tiling, norm_weight=weight, eps=eps, activation=activation
            )
    hidden, normed = _add_norm(stream, weight, eps)
    if activation is None:
        return hidden, _linear(normed, project)
    if plain is None:
        return hidden, gate_up(_linear(normed, project), activation)
    return hidden, _project(normed, *plain, activation=activation)


def _linear_add(x: Tensor, project: Linear, hidden: Tensor, next_norm: Tensor | None) -> Residual:
    plain = _plain(x, project)
    if plain is None:
        return Residual(hidden, project(x))
    matrix, tiling = plain
    if isinstance(tiling, RowTiling):
        return Residual(one_token_linear(x, matrix, tiling, residual=hidden))
    scaled = None if next_norm is None else new_scaled(x.shape[0], matrix, tiling, next_norm)
    return Residual(few_token_linear(x, matrix, tiling, residual=hidden, scaled=scaled), scaled=scaled)


def _linear(x: Tensor, project: Linear) -> Tensor:
    plain = _plain(x, project)
    return project(x) if plain is None else _project(x, *plain)


def _project(x: Tensor, matrix: Tensor, tiling: Tiling, activation: str | None = None) -> Tensor:
    if isinstance(tiling, RowTiling):
        return one_token_linear(x, matrix, tiling, activation=activation)
    return few_token_linear(x, matrix, tiling, activation=activation)


def _scaled_sum(stream: Residual, factor: float) -> Tensor:
    if stream.added is None and factor == 1.0:
        return stream.hidden
    return scaled_sum(stream.hidden, stream.added, factor)


def _plain(x: Tensor, project: Linear, *, is_gated: bool = False) -> tuple[Tensor, Tiling] | None:
    """Weight and tiling of a projection that the kernels for few tokens take; None: they do not."""
    if not isinstance(project, PlainLinear) or project.bias is not None:
        return None
    if not x.dtype == project.weight.dtype == torch.bfloat16 or x.stride(0) % _ALIGNED:
        return None
    tiling = linear_tiling(
        x.shape[0],
        *project.weight.shape,
        is_gated=is_gated,
        has_tma=can_overlap(x.device),
        shared_bytes=shared_bytes(x.device),
    )
    return None if tiling is None else (project.weight, tiling)


TRITON_OPS = Ops(
    new_pass=TORCH_OPS.new_pass,
    keep=TORCH_OPS.keep,
    look_up=TORCH_OPS.look_up,
    norm=rms_norm,
    add_norm=_add_norm,
    norm_linear=_norm_linear,
    norm_gate_up=_norm_gate_up,
    linear_add=_linear_add,
    linear=_linear,
    gate_up=gate_up,
    gate_by=gate_by,
    scaled_sum=_scaled_sum,
    best_experts=best_experts,
    mix_experts=mix_experts,
    gated_delta=gated_delta,
    concat=TORCH_OPS.concat,
    argmax=argmax,
    soft_cap=soft_cap,
    draw=draw,
    draft_scores=draft_scores,
    best_drafts=best_drafts,
    find_drafts=find_drafts,
    mask_logits=mask_logits,
    cos_sin=cos_sin,
    chain_inputs=chain_inputs,
    chain_places=chain_places,
    settle_chains=settle_chains,
)
