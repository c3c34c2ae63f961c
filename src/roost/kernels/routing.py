"""Routing of a mixture of experts: the best experts of each token, and pairs of token and expert sorted by expert.

Shapes follow from the number of tokens, so steps can be captured. The reference is in `layers.experts`. Called through
`Ops`, and by the experts' kernel.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.layers.experts import Routed

_BLOCK = 1024  # pairs that are looked at together


def best_experts(scores: Tensor, num_active: int, is_normed: bool) -> Routed:
    """The experts with the highest of scores [num_tokens, num_experts], by their probabilities in float32."""
    num_tokens, num_experts = scores.shape
    assert scores.stride(1) == 1
    ids = torch.empty((num_tokens, num_active), dtype=torch.int64, device=scores.device)
    shares = scores.new_empty((num_tokens, num_active))
    if num_tokens:
        _best_experts[(num_tokens,)](
            *(scores, scores.stride(0), ids, shares),
            NUM_EXPERTS=num_experts,
            NUM_ACTIVE=num_active,
            IS_NORMED=is_normed,
            BLOCK=triton.next_power_of_2(num_experts),
            BLOCK_ACTIVE=triton.next_power_of_2(num_active),
            num_warps=1,
        )
    return Routed(ids=ids, shares=shares)


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Numbers of pairs [num_pairs] in the order of their experts, and where each expert's end [num_experts]."""
    pairs = torch.empty_like(ids)
    ends = ids.new_empty((num_experts,))
    _sort_by_expert[(num_experts,)](ids, pairs, ends, len(ids), BLOCK=_BLOCK, num_warps=4)
    return pairs, ends


@triton.jit
def _best_experts(
    scores,  # [num_tokens, NUM_EXPERTS]
    stride,
    ids,  # [num_tokens, NUM_ACTIVE]
    shares,  # [num_tokens, NUM_ACTIVE]
    NUM_EXPERTS: tl.constexpr,
    NUM_ACTIVE: tl.constexpr,
    IS_NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_ACTIVE: tl.constexpr,
):
    token, each, place = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK), tl.arange(0, BLOCK_ACTIVE)
    score = tl.load(scores + token * stride + each, mask=each < NUM_EXPERTS, other=float("-inf")).to(tl.float32)
    chance = tl.exp(score - tl.max(score))
    left = tl.where(each < NUM_EXPERTS, chance / tl.sum(chance), -1.0)
    found, share = tl.zeros((BLOCK_ACTIVE,), tl.int32), tl.zeros((BLOCK_ACTIVE,), tl.float32)
    for number in tl.static_range(NUM_ACTIVE):
        most = tl.max(left)
        best = tl.min(tl.where(left == most, each, BLOCK))  # the first of several
        found, share = tl.where(place == number, best, found), tl.where(place == number, most, share)
        left = tl.where(each == best, -1.0, left)
    if IS_NORMED:
        share /= tl.sum(share)
    tl.store(ids + token * NUM_ACTIVE + place, found.to(tl.int64), mask=place < NUM_ACTIVE)
    tl.store(shares + token * NUM_ACTIVE + place, share.to(shares.dtype.element_ty), mask=place < NUM_ACTIVE)


@triton.jit
def _sort_by_expert(ids, pairs, ends, num_pairs, BLOCK: tl.constexpr):
    """One expert's pairs go behind those of the experts before it."""
    expert, each = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros((BLOCK,), tl.int32)
    for start in tl.range(0, num_pairs, BLOCK):
        own = tl.load(ids + start + each, mask=start + each < num_pairs, other=0x7FFFFFFF)
        before += (own < expert).to(tl.int32)
    behind = tl.sum(before)
    for start in tl.range(0, num_pairs, BLOCK):
        own = tl.load(ids + start + each, mask=start + each < num_pairs, other=0x7FFFFFFF)
        is_own = own == expert
        place = behind + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + place, (start + each).to(tl.int64), mask=is_own)
        behind += tl.sum(is_own.to(tl.int32))
    tl.store(ends + expert, behind.to(tl.int64))
