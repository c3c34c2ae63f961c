"""Copies of whole slots, keys and values of all layers in one launch: accepted paths to the front, beams to branches.

slot dests[g, i] = what slot sources[g, i] held before, for every group g; a slot copied to itself is not touched. A
group is one program's, for some of the numbers of each slot, so every source is read before any destination is
written; a group may write nothing that another reads. The scales of quantised KV go with their slots. Bytes moved: 4 *
num_layers * num_kv_heads * (head_dim * itemsize, and 4 with scales) per copied slot. The reference is the torch
backend's. Called by attention backends.
"""

import triton
import triton.language as tl
from torch import Tensor

_GROUP_LEN_MAX = 1024
_CELLS = 4096  # numbers of keys, and as many of values, of a program


def copy_slots(
    keys: Tensor,
    values: Tensor,
    sources: Tensor,
    dests: Tensor,
    scales: Tensor | None = None,
) -> None:
    """Copy slots [num_groups, group_len] of buffers [num_layers, num_slots, num_kv_heads, head_dim].

    Scales are [num_layers, num_kv_heads, 2, num_slots].
    """
    num_layers, _, num_kv_heads, head_dim = keys.shape
    num_groups, group_len = sources.shape
    assert keys.stride() == values.stride() and keys.stride()[2:] == (head_dim, 1), (keys.stride(), values.stride())
    assert scales is None or scales.is_contiguous()
    sources, dests = sources.contiguous(), dests.contiguous()  # groups that copy from one place may be one in memory
    assert sources.shape == dests.shape, (sources.shape, dests.shape)
    assert group_len <= _GROUP_LEN_MAX, f"a group of {group_len} slots does not fit a program"
    slot_len = num_kv_heads * head_dim
    block_g = triton.next_power_of_2(max(1, group_len))
    block_c = min(triton.next_power_of_2(slot_len), _CELLS // block_g)
    if num_groups * group_len * num_layers == 0:
        return
    _copy[(num_groups, triton.cdiv(slot_len, block_c), num_layers)](
        *(keys, values, scales, sources, dests, keys.stride(0), keys.stride(1), keys.shape[1]),
        GROUP_LEN=group_len,
        SLOT_LEN=slot_len,
        NUM_SCALES=2 * num_kv_heads,
        BLOCK_G=block_g,
        BLOCK_C=block_c,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["num_slots"], do_not_specialize_on_alignment=["sources", "dests"])
def _copy(
    keys,
    values,
    scales,
    sources,
    dests,
    layer_stride,
    slot_stride,
    num_slots,
    GROUP_LEN: tl.constexpr,
    SLOT_LEN: tl.constexpr,
    NUM_SCALES: tl.constexpr,  # of a slot
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    group, member = tl.program_id(0), tl.arange(0, BLOCK_G)
    column = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    index = group.to(tl.int64) * GROUP_LEN + member
    source = tl.load(sources + index, mask=member < GROUP_LEN, other=0)
    dest = tl.load(dests + index, mask=member < GROUP_LEN, other=0)
    number = tl.program_id(2).to(tl.int64)
    layer = number * layer_stride
    is_cell = (source != dest)[:, None] & (column < SLOT_LEN)[None, :]
    at = layer + source[:, None] * slot_stride + column[None, :]
    to = layer + dest[:, None] * slot_stride + column[None, :]
    key, value = tl.load(keys + at, mask=is_cell), tl.load(values + at, mask=is_cell)
    tl.debug_barrier()  # another thread of the program may write what this one reads
    tl.store(keys + to, key, mask=is_cell)
    tl.store(values + to, value, mask=is_cell)
    if scales is not None and tl.program_id(1) == 0:
        for each in range(NUM_SCALES):
            line = scales + (number * NUM_SCALES + each) * num_slots
            scale = tl.load(line + source, mask=source != dest)
            tl.debug_barrier()
            tl.store(line + dest, scale, mask=source != dest)
