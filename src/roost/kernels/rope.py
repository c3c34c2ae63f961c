"""Rotary positions and the write of keys and values to their slots, in one pass over what a projection left.

left' = left * cos - right * sin, right' = right * cos + left * sin, for the halves of a head; in float32, rounded once.
Reads heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim] once and writes each of its numbers once: queries to
the result, keys and values to rows of [num_slots, num_kv_heads, head_dim]. The reference is `layers.rotary.rotate`,
then `exec.pool.Pool.write`. Called by exec and spec.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 512  # pairs of numbers of a program


def rope_write(
    heads: Tensor,
    cos: Tensor,
    sin: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    num_heads: int,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Turned queries [num_tokens, num_heads, head_dim]; turned keys and plain values go to `slots`."""
    num_tokens, num_all, head_dim = heads.shape
    num_kv_heads = keys.shape[1]
    assert num_all == num_heads + 2 * num_kv_heads, (num_all, num_heads, num_kv_heads)
    assert heads.stride(2) == cos.stride(2) == sin.stride(2) == keys.stride(2) == 1
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    output = heads.new_empty((num_tokens, num_heads, head_dim)) if out is None else out
    assert output.is_contiguous() and slots.is_contiguous() and slots.dtype == torch.int64
    block_d = triton.next_power_of_2(head_dim // 2)
    block_h = min(triton.next_power_of_2(num_all), max(1, _BLOCK // block_d))
    if num_tokens:
        _rope_write[(num_tokens, triton.cdiv(num_all, block_h))](
            *(heads, cos, sin, slots, keys, values, output),
            *(heads.stride(0), heads.stride(1), cos.stride(0), sin.stride(0), keys.stride(0), keys.stride(1)),
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
    heads,
    cos,
    sin,
    slots,
    keys,
    values,
    output,
    token_stride,
    head_stride,
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
    turn, swing = cos + token * cos_stride + dims, sin + token * sin_stride + dims
    c = tl.load(turn, mask=is_dim, other=0.0).to(tl.float32)[None, :]  # both halves have the same
    s = tl.load(swing, mask=is_dim, other=0.0).to(tl.float32)[None, :]
    is_in = (head < NUM_HEADS + 2 * NUM_KV_HEADS)[:, None] & is_dim[None, :]
    places = heads + token * token_stride + head[:, None] * head_stride + dims[None, :]
    left, right = tl.load(places, mask=is_in, other=0.0), tl.load(places + HALF, mask=is_in, other=0.0)
    wide_left, wide_right = left.to(tl.float32), right.to(tl.float32)
    turned_left = (wide_left * c - wide_right * s).to(left.dtype)
    turned_right = (wide_right * c + wide_left * s).to(left.dtype)

    asks = output + (token * NUM_HEADS + head)[:, None] * (2 * HALF) + dims[None, :]
    is_ask = (head < NUM_HEADS)[:, None] & is_in
    tl.store(asks, turned_left, mask=is_ask)
    tl.store(asks + HALF, turned_right, mask=is_ask)
    slot = tl.load(slots + token) * slot_stride
    key = head - NUM_HEADS
    cells = slot + key[:, None] * kv_head_stride + dims[None, :]
    is_key = ((key >= 0) & (key < NUM_KV_HEADS))[:, None] & is_in
    tl.store(keys + cells, turned_left, mask=is_key)
    tl.store(keys + cells + HALF, turned_right, mask=is_key)
    value = key - NUM_KV_HEADS
    cells = slot + value[:, None] * kv_head_stride + dims[None, :]
    is_value = (value >= 0)[:, None] & is_in
    tl.store(values + cells, left, mask=is_value)
    tl.store(values + cells + HALF, right, mask=is_value)
