"""Rotary positions and the write of keys and values to their slots, in one pass over what a projection left.

left' = left * cos - right * sin, right' = right * cos + left * sin, for the halves of a head; in float32, rounded once.
Reads queries and keys side by side, and values, each once, and writes each of their numbers once: queries to the
result, keys and values to rows of [num_slots, num_kv_heads, head_dim], quantised if those hold codes. The reference is
the torch backend's write: `layers.rotary.rotate`, `layers.quantised_kv.quantise`, then an assignment. Called by
attention backends.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from roost.layers.quantised_kv import CODE_MAX, SCALE_LEAST

_BLOCK = 512  # pairs of numbers of a program


def rope_write(
    qk: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    scales: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotated queries [num_tokens, num_heads, head_dim] of [num_tokens, num_heads + num_kv_heads, head_dim].

    Rotated keys, and values [num_tokens, num_kv_heads, head_dim] as they are, go to `slots`; if they are quantised,
    their scales go to [num_kv_heads, 2, num_slots].
    """
    num_tokens, num_rotated, head_dim = qk.shape
    num_kv_heads = keys.shape[1]
    num_heads, num_all = num_rotated - num_kv_heads, num_rotated + num_kv_heads
    assert value.shape == (num_tokens, num_kv_heads, head_dim), (value.shape, qk.shape, keys.shape)
    assert qk.stride(2) == value.stride(2) == cos.stride(2) == sin.stride(2) == keys.stride(2) == 1
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    assert (scales is not None) == (keys.dtype in CODE_MAX) and (scales is None or scales.is_contiguous())
    output = qk.new_empty((num_tokens, num_heads, head_dim)) if out is None else out
    assert output.is_contiguous() and slots.is_contiguous() and slots.dtype == torch.int64
    block_d = triton.next_power_of_2(head_dim // 2)
    block_h = min(triton.next_power_of_2(num_all), max(1, _BLOCK // block_d))
    if num_tokens:
        _rope_write[(num_tokens, triton.cdiv(num_all, block_h))](
            *(qk, value, cos, sin, slots, keys, values, scales, output),
            *(qk.stride(0), qk.stride(1), value.stride(0), value.stride(1)),
            *(cos.stride(0), sin.stride(0), keys.stride(0), keys.stride(1), keys.shape[0]),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            CODE_MAX=CODE_MAX.get(keys.dtype, 0.0),
            SCALE_LEAST=SCALE_LEAST,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=2,
        )
    return output


def rope(query: Tensor, cos: Tensor, sin: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Rotated queries [num_tokens, num_heads, head_dim], without keys and values beside them."""
    none = torch.empty((0, 0, query.shape[2]), dtype=query.dtype, device=query.device)
    slots = torch.empty(0, dtype=torch.int64, device=query.device)
    return rope_write(query, query[:, :0], cos, sin, slots, none, none, out=out)


@triton.jit
def _code(wide, inverse, CODE_MAX: tl.constexpr):
    """The nearest code, ties to even, as a float32 whose conversion to the codes' type does not round any more."""
    near = tl.minimum(tl.maximum(wide * inverse[:, None], -CODE_MAX), CODE_MAX)
    step = tl.full(near.shape, 1.0, tl.float32)  # between codes there: those of int8 are whole numbers
    if CODE_MAX == 448.0:  # e4m3: eight steps in a power of two, from 2^-6 on
        power = (near.to(tl.uint32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
        step = tl.maximum(power, 0.015625) * 0.125
    shift = step * 12582912.0  # 1.5 * 2^23: where numbers of float32 are a step apart
    return (near + shift) - shift


@triton.jit
def _put(buffer, scales, cells, scale_cells, left, right, is_cell, HALF, CODE_MAX: tl.constexpr, LEAST: tl.constexpr):
    """Write heads, given by their halves [BLOCK_H, BLOCK_D]: as they are, or as codes with a scale for each head."""
    if CODE_MAX == 0.0:
        tl.store(buffer + cells, left, mask=is_cell)
        tl.store(buffer + cells + HALF, right, mask=is_cell)
    else:
        left, right = tl.where(is_cell, left, 0.0).to(tl.float32), tl.where(is_cell, right, 0.0).to(tl.float32)
        size = tl.maximum(_finite_size(left), _finite_size(right))
        scale = size * (1.0 / CODE_MAX)
        is_finite = size < float("inf")
        is_coded = (scale >= LEAST) & is_finite
        inverse = tl.div_rn(1.0, tl.where(is_coded, scale, 1.0))
        left, right = tl.where(is_coded[:, None], left, 0.0), tl.where(is_coded[:, None], right, 0.0)
        tl.store(buffer + cells, _code(left, inverse, CODE_MAX).to(buffer.dtype.element_ty), mask=is_cell)
        tl.store(buffer + cells + HALF, _code(right, inverse, CODE_MAX).to(buffer.dtype.element_ty), mask=is_cell)
        scale = tl.where(is_coded, scale, tl.where(is_finite, 0.0, float("nan")))
        tl.store(scales + scale_cells, scale, mask=tl.max(is_cell.to(tl.int32), 1) > 0)


@triton.jit
def _finite_size(half):
    """The largest magnitude of each line; infinite if there is a NaN."""
    size = tl.abs(half)
    return tl.max(tl.where(size < float("inf"), size, float("inf")), 1)


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["slots"])
def _rope_write(
    qk,
    value,
    cos,
    sin,
    slots,
    keys,
    values,
    scales,  # [NUM_KV_HEADS, 2, num_slots], of keys and of values; None: they are not quantised
    output,
    token_stride,
    head_stride,
    value_token_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    slot_stride,
    kv_head_stride,
    num_slots,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    CODE_MAX: tl.constexpr,  # 0: keys and values are not quantised
    SCALE_LEAST: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HALF
    cos_cells, sin_cells = cos + token * cos_stride + dims, sin + token * sin_stride + dims
    c = tl.load(cos_cells, mask=is_dim, other=0.0).to(tl.float32)[None, :]  # both halves have the same
    s = tl.load(sin_cells, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    is_in = (head < NUM_HEADS + NUM_KV_HEADS)[:, None] & is_dim[None, :]
    places = qk + token * token_stride + head[:, None] * head_stride + dims[None, :]
    left, right = tl.load(places, mask=is_in, other=0.0), tl.load(places + HALF, mask=is_in, other=0.0)
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    rotated_left = (wide_left * c - wide_right * s).to(left.dtype)
    rotated_right = (wide_right * c + wide_left * s).to(left.dtype)

    query_cells = output + (token * NUM_HEADS + head)[:, None] * (2 * HALF) + dims[None, :]
    is_query = (head < NUM_HEADS)[:, None] & is_in
    tl.store(query_cells, rotated_left, mask=is_query)
    tl.store(query_cells + HALF, rotated_right, mask=is_query)
    if NUM_KV_HEADS > 0:
        slot = tl.load(slots + token)
        key = head - NUM_HEADS
        cells = slot * slot_stride + key[:, None] * kv_head_stride + dims[None, :]
        is_key = ((key >= 0) & (key < NUM_KV_HEADS))[:, None] & is_in
        line = slot + 2 * key * num_slots
        _put(keys, scales, cells, line, rotated_left, rotated_right, is_key, HALF, CODE_MAX, SCALE_LEAST)
        value_head = key - NUM_KV_HEADS
        is_value = ((value_head >= 0) & (value_head < NUM_KV_HEADS))[:, None] & is_dim[None, :]
        places = value + token * value_token_stride + value_head[:, None] * value_head_stride + dims[None, :]
        cells = slot * slot_stride + value_head[:, None] * kv_head_stride + dims[None, :]
        left, right = tl.load(places, mask=is_value), tl.load(places + HALF, mask=is_value)
        line = slot + (2 * value_head + 1) * num_slots
        _put(values, scales, cells, line, left, right, is_value, HALF, CODE_MAX, SCALE_LEAST)
