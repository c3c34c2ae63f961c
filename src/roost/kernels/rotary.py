"""Rotary positions and the write of keys and values to their slots, in one pass over what a projection left.

left' = left * cos - right * sin, right' = right * cos + left * sin, for the halves of a head; in float32, rounded once.
Reads queries and keys side by side, and values, each once, and writes each of their numbers once: queries to the
result, keys and values to rows of [num_slots, num_kv_heads, head_dim]. The reference is the torch backend's write:
`layers.rotary.rotate`, then an assignment. Called by attention backends.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512  # pairs of numbers of a program


def rope_write(
    qk: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Rotated queries [num_tokens, num_heads, head_dim] of [num_tokens, num_heads + num_kv_heads, head_dim].

    Rotated keys, and values [num_tokens, num_kv_heads, head_dim] as they are, go to `slots`.
    """
    num_tokens, num_rotated, head_dim = qk.shape
    num_kv_heads = keys.shape[1]
    num_heads, num_all = num_rotated - num_kv_heads, num_rotated + num_kv_heads
    assert value.shape == (num_tokens, num_kv_heads, head_dim), (value.shape, qk.shape, keys.shape)
    assert qk.stride(2) == value.stride(2) == cos.stride(2) == sin.stride(2) == keys.stride(2) == 1
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    output = qk.new_empty((num_tokens, num_heads, head_dim)) if out is None else out
    assert output.is_contiguous() and slots.is_contiguous() and slots.dtype == torch.int64
    block_d = triton.next_power_of_2(head_dim // 2)
    block_h = min(triton.next_power_of_2(num_all), max(1, _BLOCK // block_d))
    if num_tokens:
        _rope_write[(num_tokens, triton.cdiv(num_all, block_h))](
            *(qk, value, cos, sin, slots, keys, values, output),
            *(qk.stride(0), qk.stride(1), value.stride(0), value.stride(1)),
            *(cos.stride(0), sin.stride(0), keys.stride(0), keys.stride(1)),
            NUM_HEADS=num_heads,
            NUM_KV_HEADS=num_kv_heads,
            HALF=head_dim // 2,
            BLOCK_H=block_h,
            BLOCK_D=block_d,
            num_warps=2,
        )
    return output


@triton.jit(do_not_specialize_on_alignment=["slots"])
def _rope_write(
    qk,
    value,
    cos,
    sin,
    slots,
    keys,
    values,
    output,
    token_stride,
    head_stride,
    value_token_stride,
    value_head_stride,
    cos_stride,
    sin_stride,
    slot_stride,
    kv_head_stride,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
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
    slot = tl.load(slots + token) * slot_stride
    key = head - NUM_HEADS
    cells = slot + key[:, None] * kv_head_stride + dims[None, :]
    is_key = ((key >= 0) & (key < NUM_KV_HEADS))[:, None] & is_in
    tl.store(keys + cells, rotated_left, mask=is_key)
    tl.store(keys + cells + HALF, rotated_right, mask=is_key)
    value_head = key - NUM_KV_HEADS
    is_value = ((value_head >= 0) & (value_head < NUM_KV_HEADS))[:, None] & is_dim[None, :]
    places = value + token * value_token_stride + value_head[:, None] * value_head_stride + dims[None, :]
    cells = slot + value_head[:, None] * kv_head_stride + dims[None, :]
    tl.store(values + cells, tl.load(places, mask=is_value), mask=is_value)
    tl.store(values + cells + HALF, tl.load(places + HALF, mask=is_value), mask=is_value)
