"""Paged attention over segments: decode, extend, tree verify and draft branches in one kernel.

out[t] = sum over the keys j that t sees of softmax_j(scale * q[t] . k[j]) * v[j], a sink being one more score in the
denominator; the reference is in layers.segments. A program takes a tile of `tile_len` tokens and the query heads that
share one KV head, and walks its share of the keys in blocks; of several shares (splits) of a tile, the last program to
arrive merges them, in order. Quantised keys and values are converted to the queries' type as they are; scores are
multiplied by the keys' scales, weights by those of the values. Bytes moved: 2 * num_keys * (head_dim * itemsize, and 4
with scales) per tile and KV head, queries and output once, splits 4 * head_dim per row twice. Called by backends.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from roost.kernels.capability import processors, shared_bytes
from roost.kernels.kv_blocks import column_dims, kv_block, scaled
from roost.layers.quantised_kv import CODE_MAX
from roost.layers.segments import Segments

_LOG2_E = 1.4426950408889634
ARRIVALS_MAX = 1 << 14  # tiles times heads of a launch that can be split
_SPLITS_MAX = 32
_SPLIT_LEN = 64  # keys that are worth a split
_TILE_CELLS_MAX = 256 * 128  # rows of a program times head_dim: what fits into registers
_INTERPRETED = knobs.runtime.interpret

# Device columns may be slices of larger buffers, and lengths change: neither may cause a compilation.
_SEGMENTS = ("rows", "offsets", "query_lens", "start_positions", "tile_segments", "tile_offsets")
_UNALIGNED = [*_SEGMENTS, "tree_of", "depths", "tree_mask", "bases", "shifts", "table"]
_UNSPECIALISED = ["num_nodes", "row_stride", "num_slots"]


class _Blocks(NamedTuple):
    """How a launch is cut."""

    parts: int  # programs that share the heads of a KV head
    rows: int  # of a program: a head of a token each
    keys: int  # read at a time
    num_warps: int
    num_stages: int  # of the loop over keys


def num_splits(segments: Segments, query: Tensor, num_kv_heads: int, num_processors: int, keys_max: int) -> int:
    """How many shares of each tile's keys give every multiprocessor two programs, or one of many rows.

    A graph has more tiles than are in use: as many as its tokens could need.
    """
    num_tokens, num_heads, _ = query.shape
    num_tiles, tile_len = len(segments.tile_segments), segments.tile_len
    if num_tiles * num_heads > ARRIVALS_MAX:
        return 1
    num_busy = min(num_tiles, -(-num_tokens // tile_len)) * num_kv_heads
    room = 1 if tile_len * num_heads >= 128 * num_kv_heads else 2
    wanted = room * num_processors // max(1, num_busy)
    return max(1, min(wanted, _SPLITS_MAX, -(-keys_max // _SPLIT_LEN)))


def paged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    segments: Segments,
    *,
    page_size: int,
    window: int | None,
    scale: float,
    num_splits: int = 1,
    arrivals: Tensor | None = None,
    scales: Tensor | None = None,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What the heads [num_tokens, num_heads, head_dim] read from slots [num_slots, num_kv_heads, head_dim].

    Scales [num_kv_heads, 2, num_slots] are those of quantised keys and values; sinks [num_heads] float32 are scores
    that join the sum of weights and stand for no key. A tile whose segment is -1 is padding.
    Tokens that no tile holds keep what was in the output's memory. Where there are many tokens, tiles are best of 128
    rows: tile_len times the heads that share a KV head. `arrivals` are zeros, as many as tiles times heads, and are
    zeros again afterwards; without splits they are not needed.
    """
    num_kv_heads = keys.shape[1]
    code_max = CODE_MAX.get(keys.dtype, 0.0)
    blocks = _blocks(query, num_kv_heads, segments, num_splits, is_quantised=code_max > 0)
    if code_max:
        keys, values = keys.view(torch.int16), values.view(torch.int16)  # two codes each
    assert 1 <= num_splits <= _SPLITS_MAX, num_splits
    assert num_splits == 1 or arrivals is not None, num_splits
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    assert keys.stride(2) == query.stride(2) == table.stride(1) == 1
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert output.is_contiguous() and (sinks is None or sinks.is_contiguous())
    partials = sums = None
    if num_splits > 1:
        shape = (*query.shape[:2], num_splits)
        partials = torch.empty((*shape, query.shape[2]), dtype=torch.float32, device=query.device)
        sums = torch.empty(shape, dtype=torch.float32, device=query.device)
    tiles = (segments.offsets, segments.query_lens, segments.tile_segments, segments.tile_offsets)
    rows, tree = (segments.rows, segments.start_positions), _tree(segments)
    branches = (segments.branch_bases, segments.branch_shifts)
    assert all(column is None or column.is_contiguous() for column in (*tiles, *rows, *tree[:3], *branches))
    num_tiles, head_dim = segments.tile_segments.shape[0], query.shape[2]
    sizes = {"TILE_LEN": segments.tile_len, "HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}
    if num_tiles:
        _attend[(num_tiles, num_kv_heads * blocks.parts, num_splits)](
            *(query, keys, values, scales, sinks, table, output, partials, sums),
            arrivals if num_splits > 1 else None,
            *(*tiles, *rows, *tree, *branches),
            *(scale * _LOG2_E, *query.stride()[:2], *keys.stride()[:2], keys.shape[0], table.stride(0)),
            **sizes,
            **{"GROUP": query.shape[1] // num_kv_heads // blocks.parts, "PARTS": blocks.parts, "WINDOW": window or 0},
            **{"PAGE_SIZE": page_size, "CODE_MAX": code_max, "WIDE": _INTERPRETED, "SPLIT_LEN": _SPLIT_LEN},
            **{"BLOCK_M": blocks.rows, "BLOCK_N": blocks.keys},
            **{"num_warps": blocks.num_warps, "num_stages": blocks.num_stages},
        )
    return output


def _tree(segments: Segments) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Trees as the kernel takes them: which one a segment is, depths, mask in bytes, and nodes of each."""
    mask = segments.tree_mask
    if mask is None:
        return None, None, None, 0
    return segments.tree_of, segments.tree_depths, mask.view(torch.uint8), mask.shape[1]


def _blocks(query: Tensor, num_kv_heads: int, segments: Segments, num_splits: int, *, is_quantised: bool) -> _Blocks:
    """The best blocks as measured, of those that fit into shared memory."""
    shared_memory, num_processors = shared_bytes(query.device), processors(query.device)
    head_dim, itemsize, has_trees = query.shape[2], query.dtype.itemsize, segments.tree_of is not None
    group, block_d = query.shape[1] // num_kv_heads, max(16, triton.next_power_of_2(head_dim))
    for parts in (number for number in range(1, group + 1) if group % number == 0):
        block_m = max(16, triton.next_power_of_2(segments.tile_len * (group // parts)))
        num_programs = len(segments.tile_segments) * num_kv_heads * parts * num_splits
        if block_m < 64:  # where a multiprocessor has four programs, they hide each other's loads
            wanted = [(64, 2 if num_programs > 3 * num_processors else 3), (32, 2)]
        else:
            has_registers = block_m == 128 and not has_trees and not is_quantised
            wanted = [(128, 3)] * has_registers + [(64, 3), (64, 2), (32, 2)]
        if is_quantised and block_m < 64:
            wanted = [(64, 2), (32, 2)]
        if query.dtype == torch.float32:
            wanted = [(32 if block_m < 64 and head_dim <= 128 else 16, 2)]
        for keys, num_stages in wanted:
            block_n = keys // 2 if head_dim > 128 and itemsize == 2 else keys
            reading = (block_m + 2 * block_n * num_stages) * block_d * itemsize
            reading += 4 * block_m * block_n * has_trees  # what a node sees of its tree is put into another layout
            needed = max(reading, 4 * block_m * block_d)  # so is the output
            if block_m * max(128, block_d) <= _TILE_CELLS_MAX and needed <= shared_memory:
                few = 2 if is_quantised else 4  # more would wait for one another when codes become numbers
                num_warps = few if block_m < 64 else max(4, block_m // 16)
                return _Blocks(parts, block_m, block_n, num_warps, num_stages)
    raise ValueError(f"tiles of {segments.tile_len} tokens with heads of {head_dim} do not fit into shared memory")


@triton.jit
def _kept(place, base, shift, BRANCHED: tl.constexpr):
    """Where positions are kept in their row."""
    return tl.where(place < base, place, place + shift) if BRANCHED else place


@triton.jit
def _pages(block, table, high, base, shift, BRANCHED: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Pages of a block's positions before `high`: one where a block lies within a page, else one for each position."""
    if PAGE_SIZE % BLOCK_N == 0 and not BRANCHED:
        page = tl.load(table + tl.minimum(block, high - 1) // PAGE_SIZE)
    else:
        place = block + tl.arange(0, BLOCK_N)
        page = tl.load(table + _kept(place, base, shift, BRANCHED) // PAGE_SIZE, mask=place < high, other=0)
    return page


@triton.jit
def _slots(page, place, base, shift, BRANCHED: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Slots of positions on their pages."""
    return page.to(tl.int64) * PAGE_SIZE + _kept(place, base, shift, BRANCHED) % PAGE_SIZE


@triton.jit
def _weigh(score, peak, total, scale, scales, slot, is_live, MASKED: tl.constexpr):
    """Weights of a block's keys, how much those before it fade, and the new peak and sum of weights."""
    rise = tl.maximum(peak, tl.max(score, 1) * scale)
    level = tl.where(rise == float("-inf"), 0.0, rise) if MASKED else rise  # of a row that sees nothing yet
    weight, fade = tl.exp2(score * scale - level[:, None]), tl.exp2(peak - level)
    return scaled(weight, scales, slot, is_live), fade, rise, total * fade + tl.sum(weight, 1)


@triton.jit
def _before_reading(sinks, head, num_splits):
    """Peak and sum of weights of rows that have read nothing but their sinks, and these; splits meet them later."""
    peak, total = tl.full(head.shape, float("-inf"), tl.float32), tl.zeros(head.shape, tl.float32)
    sink = peak
    if sinks is not None:
        sink = tl.load(sinks + head) * 1.4426950408889634  # log2(e): scores are exponents of two
        if num_splits == 1:
            peak, total = sink, total + 1.0
    return peak, total, sink


@triton.jit
def _read_all(
    scales,
    num_slots,
    peak,  # of what was read before
    total,
    q,
    keys,
    values,
    begin,
    end,
    dims,
    slot_stride,
    scale,
    table,
    high,
    base,
    shift,
    BRANCHED: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    CODE_MAX: tl.constexpr,
    WIDE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Read blocks of keys that every row sees."""
    mixed = tl.zeros([q.shape[0], dims.shape[0]], tl.float32)
    page = _pages(begin, table, high, base, shift, BRANCHED, PAGE_SIZE, BLOCK_N)
    for block in range(begin, end, BLOCK_N):
        slot = _slots(page, block + tl.arange(0, BLOCK_N), base, shift, BRANCHED, PAGE_SIZE)
        page = _pages(block + BLOCK_N, table, high, base, shift, BRANCHED, PAGE_SIZE, BLOCK_N)  # the next block's
        key = kv_block(keys, slot * slot_stride, None, q.dtype, HEAD_DIM, dims.shape[0], CODE_MAX, WIDE)
        value = kv_block(values, slot * slot_stride, None, q.dtype, HEAD_DIM, dims.shape[0], CODE_MAX, WIDE)
        score = scaled(tl.dot(q, tl.trans(key), input_precision="ieee"), scales, slot, None)
        weight, fade, peak, total = _weigh(score, peak, total, scale, scales, num_slots + slot, None, False)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
    return peak, total, mixed


@triton.jit
def _seen(place, node, at, reach, is_row, start, num_own, tree, depths, tree_mask, num_nodes, WINDOW: tl.constexpr):
    """Which keys each row reads: those up to its reach, the nodes of its tree that it sees; of them the window's."""
    seen = place[None, :] <= reach[:, None]
    is_own = (place >= start) & (place < start + num_own)
    if tree_mask is not None:
        edges = ((tree * num_nodes + node) * num_nodes - start)[:, None] + place[None, :]
        seen |= tl.load(tree_mask + edges, mask=is_row[:, None] & is_own[None, :], other=0) != 0
    if WINDOW:
        of = place
        if depths is not None:  # a node's position is not its place
            depth = tl.load(depths + tree * num_nodes + (place - start), mask=is_own, other=0)
            of = tl.where(is_own, start + depth.to(tl.int32), place)
        seen &= of[None, :] > at[:, None] - WINDOW
    return seen


@triton.jit
def _merged(partials, sums, line, is_row, dims, sink, num_splits, HEAD_DIM: tl.constexpr):
    """What the splits of some lines come to, added in their order. Other programs wrote them, so L1 is passed by."""
    AT_ONCE: tl.constexpr = 8 if line.shape[0] < 64 else 1  # loads that do not wait for one another
    peak, total = sink, tl.where(sink == float("-inf"), 0.0, 1.0)
    mixed = tl.zeros([line.shape[0], dims.shape[0]], tl.float32)
    for first in range(0, num_splits, AT_ONCE):
        for number in tl.static_range(AT_ONCE):
            at = line + first + number
            is_part = is_row & (at < line + num_splits)
            is_cell = is_part[:, None] & (dims < HEAD_DIM)[None, :]
            cells = partials + at[:, None] * HEAD_DIM + dims[None, :]
            each = tl.load(sums + at, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            part = tl.load(cells, mask=is_cell, other=0.0, cache_modifier=".cg")
            rise = tl.maximum(peak, each)
            level = tl.where(rise == float("-inf"), 0.0, rise)
            weight, fade = tl.exp2(each - level), tl.exp2(peak - level)
            peak, total = rise, total * fade + weight
            mixed = mixed * fade[:, None] + part * weight[:, None]
    return mixed / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(do_not_specialize=_UNSPECIALISED, do_not_specialize_on_alignment=_UNALIGNED)
def _attend(
    query,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    keys,  # [num_slots, num_kv_heads, HEAD_DIM]
    values,
    scales,  # [num_kv_heads, 2, num_slots], of keys and of values; None: they are not quantised
    sinks,  # [num_kv_heads * GROUP * PARTS]; None: there are none
    table,  # [num_rows, pages_per_row]
    output,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    partials,  # [num_tokens, num_kv_heads * GROUP, num_splits, HEAD_DIM], or None
    sums,  # [num_tokens, num_kv_heads * GROUP, num_splits], or None: log2 of what each split's weights come to
    arrivals,  # [num_tiles * num_kv_heads * PARTS], or None: splits of each that are done; zero between launches
    offsets,
    query_lens,
    tile_segments,
    tile_offsets,
    rows,
    start_positions,
    tree_of,
    depths,
    tree_mask,
    num_nodes,
    bases,
    shifts,
    scale,  # of exponents of two
    query_token_stride,
    query_head_stride,
    slot_stride,
    kv_head_stride,
    num_slots,
    row_stride,
    TILE_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,  # query heads of a program: those of a KV head, or one of PARTS of them
    PARTS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,  # 0: none
    CODE_MAX: tl.constexpr,  # 0: keys and values are not quantised
    WIDE: tl.constexpr,  # multiply in float32: the interpreter has no product of bfloat16
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SPLIT_LEN: tl.constexpr,  # keys that are worth one
):
    part, split = tl.program_id(1), tl.program_id(2)
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), part // PARTS  # a row's last tile has most to read
    segment, first = tl.load(tile_segments + tile), tl.load(tile_offsets + tile)
    if segment < 0:
        return
    width, start = tl.load(query_lens + segment), tl.load(start_positions + segment).to(tl.int32)  # all loads at once
    offset, row = tl.load(offsets + segment), tl.load(rows + segment)
    tree = -1 if tree_of is None else tl.load(tree_of + segment)
    num_own = 0 if tree_of is None else tl.where(tree >= 0, width, 0)  # keys that are nodes of the segment's tree
    base = 0 if bases is None else tl.load(bases + segment).to(tl.int32)
    shift = 0 if bases is None else tl.load(shifts + segment).to(tl.int32)
    BRANCHED: tl.constexpr = bases is not None
    if first >= width:
        return
    member, dims = tl.arange(0, BLOCK_M), column_dims(BLOCK_D, CODE_MAX)
    node = first + member // GROUP  # token within the segment
    is_row, is_dim = (member < TILE_LEN * GROUP) & (node < width), dims < HEAD_DIM
    token, head = (offset + node).to(tl.int64), part * GROUP + member % GROUP
    query_cells = token * query_token_stride + head * query_head_stride
    is_out = is_row[:, None] & is_dim[None, :]
    q = tl.load(query + query_cells[:, None] + dims[None, :], mask=is_out, other=0.0)

    # Some row reads keys [low, high), every row [low, even). A row at position `at` reads them in order up to `reach`;
    # a tree's prefix ends there, and the row goes on with the nodes it sees.
    at, reach, low, even = start + node, start + node, start + first, start + first + 1
    high = start + tl.minimum(first + TILE_LEN, width)
    if tree_of is not None:
        depth = tl.load(depths + tree * num_nodes + node, mask=is_row & (node < num_own), other=0)
        if tree >= 0:
            at, reach = start + depth.to(tl.int32), start - 1 + 0 * node
            low, even, high = start, start, start + width
    low = tl.maximum(low - WINDOW + 1, 0) if WINDOW else 0
    begin = low // BLOCK_N * BLOCK_N
    num_splits = tl.minimum(tl.num_programs(2), tl.cdiv(high - begin, SPLIT_LEN))
    if split >= num_splits:
        return
    share = tl.cdiv(tl.cdiv(high - begin, BLOCK_N), num_splits) * BLOCK_N
    begin += split * share
    end = tl.minimum(begin + share, high)
    keys, values = keys + kv_head * kv_head_stride, values + kv_head * kv_head_stride
    scales = None if scales is None else scales + kv_head.to(tl.int64) * (2 * num_slots)
    table += row * row_stride
    q = q.to(tl.float32) if WIDE else q
    peak, total, sink = _before_reading(sinks, head, num_splits)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    pages, masked_from = (table, high, base, shift), begin
    if BLOCK_M >= 64 and WINDOW == 0:  # large tiles first take the blocks that need no mask
        masked_from = tl.maximum(begin, tl.minimum(even // BLOCK_N * BLOCK_N, end))
        what = (num_slots, peak, total, q, keys, values, begin, masked_from, dims, slot_stride, scale)
        peak, total, mixed = _read_all(scales, *what, *pages, BRANCHED, HEAD_DIM, PAGE_SIZE, CODE_MAX, WIDE, BLOCK_N)
    own = (start, num_own, tree, depths, tree_mask, num_nodes)
    page = _pages(masked_from, *pages, BRANCHED, PAGE_SIZE, BLOCK_N)
    for block in range(masked_from, end, BLOCK_N):
        place = block + tl.arange(0, BLOCK_N)
        slot = _slots(page, place, base, shift, BRANCHED, PAGE_SIZE)
        page = _pages(block + BLOCK_N, *pages, BRANCHED, PAGE_SIZE, BLOCK_N)  # the next block's
        is_live = (place >= low) & (place < high)
        key = kv_block(keys, slot * slot_stride, is_live, q.dtype, HEAD_DIM, BLOCK_D, CODE_MAX, WIDE)
        value = kv_block(values, slot * slot_stride, is_live, q.dtype, HEAD_DIM, BLOCK_D, CODE_MAX, WIDE)
        score = scaled(tl.dot(q, tl.trans(key), input_precision="ieee"), scales, slot, is_live)
        score = tl.where(_seen(place, node, at, reach, is_row, *own, WINDOW), score, float("-inf"))
        weight, fade, peak, total = _weigh(score, peak, total, scale, scales, num_slots + slot, is_live, True)
        mixed = tl.dot(weight.to(value.dtype), value, mixed * fade[:, None], input_precision="ieee")
    has_seen = total != 0  # some key, in this split
    mixed = mixed / tl.where(has_seen, total, 1.0)[:, None]
    line = token * (tl.num_programs(1) * GROUP) + head
    if partials is not None and num_splits > 1:
        parts = line * tl.num_programs(2)
        tl.store(sums + parts + split, tl.where(has_seen, peak + tl.log2(total), float("-inf")), mask=is_row)
        tl.store(partials + (parts + split)[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_out)
        arrived = arrivals + tile * tl.num_programs(1) + part
        tl.debug_barrier()  # all of this program's stores come before its arrival
        if tl.atomic_add(arrived, 1) < num_splits - 1:
            return
        tl.store(arrived, 0)
        mixed = _merged(partials, sums, parts, is_row, dims, sink, num_splits, HEAD_DIM)
    tl.store(output + line[:, None] * HEAD_DIM + dims[None, :], mixed.to(output.dtype.element_ty), mask=is_out)
