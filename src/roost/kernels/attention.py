"""Paged attention over segments: decode, extend, tree verify and draft branches in one kernel.

out[t] = sum over the keys j that t sees of softmax_j(scale * q[t] . k[j]) * v[j]; the reference is in layers.segments.
A program takes a tile of `tile_len` tokens and the query heads that share one KV head, and walks its share of the keys
in blocks; several shares (splits) of a tile are merged by a second kernel. Quantised keys and values are converted to
the queries' type as they are; scores are multiplied by the keys' scales, weights by those of the values. Bytes moved:
2 * num_keys * (head_dim * itemsize, and 4 with scales) per tile and KV head, queries and output once, splits 4 *
head_dim per row twice. Called by attention backends.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from roost.kernels.kv_blocks import column_dims, kv_block, scaled
from roost.layers.quantised_kv import CODE_MAX
from roost.layers.segments import Segments

_LOG2_E = 1.4426950408889634
_SPLITS_MAX = 32
_SPLIT_LEN_MIN = 64  # keys of the largest block
_BLOCK_M_MAX = 256  # rows of a program: a head of a token each
_INTERPRETED = knobs.runtime.interpret

# Device columns may be slices of larger buffers, and lengths change: neither may cause a compilation.
_SEGMENTS = ("rows", "offsets", "query_lens", "start_positions", "tile_segments", "tile_offsets")
_UNALIGNED = [*_SEGMENTS, "tree_of", "depths", "tree_mask", "bases", "shifts", "table"]
_UNSPECIALISED = ["num_nodes", "row_stride", "num_slots"]


def num_splits(num_tiles: int, num_kv_heads: int, num_processors: int, keys_max: int) -> int:
    """How many shares of each tile's keys give every multiprocessor about two programs."""
    wanted = 2 * num_processors // max(1, num_tiles * num_kv_heads)
    return max(1, min(wanted, _SPLITS_MAX, -(-keys_max // _SPLIT_LEN_MIN)))


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
    scales: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """What the heads [num_tokens, num_heads, head_dim] read from slots [num_slots, num_kv_heads, head_dim].

    Scales [num_kv_heads, 2, num_slots] are those of quantised keys and values. A tile whose segment is -1 is
    padding. Tokens that no tile holds keep what was in the output's memory. Where there are many tokens, tiles are
    best of 64 or 128 rows: tile_len times the heads that share a KV head.
    """
    group, num_kv_heads = query.shape[1] // keys.shape[1], keys.shape[1]
    parts = next(n for n in range(1, group + 1) if group % n == 0 and segments.tile_len * (group // n) <= _BLOCK_M_MAX)
    block_m = max(16, triton.next_power_of_2(segments.tile_len * (group // parts)))
    assert 1 <= num_splits <= _SPLITS_MAX, num_splits
    assert keys.stride() == values.stride(), (keys.stride(), values.stride())
    assert keys.stride(2) == query.stride(2) == table.stride(1) == 1
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device) if out is None else out
    assert output.is_contiguous()
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
    code_max = CODE_MAX.get(keys.dtype, 0.0)
    if code_max:
        keys, values = keys.view(torch.int16), values.view(torch.int16)  # two codes each
    sizes = {"TILE_LEN": segments.tile_len, "HEAD_DIM": head_dim, "BLOCK_D": max(16, triton.next_power_of_2(head_dim))}
    block_n, num_warps, num_stages = _blocks(query.dtype, head_dim, block_m, is_quantised=code_max > 0)
    if num_tiles:
        _attend[(num_tiles, num_kv_heads * parts, num_splits)](
            *(query, keys, values, scales, table, output, partials, sums),
            *(*tiles, *rows, *tree, *branches),
            *(scale * _LOG2_E, *query.stride()[:2], *keys.stride()[:2]),
            *(keys.shape[0], table.stride(0)),
            **sizes,
            **{"GROUP": group // parts, "PARTS": parts, "WINDOW": window or 0},
            **{"PAGE_SIZE": page_size, "CODE_MAX": code_max, "WIDE": _INTERPRETED},
            **{"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": num_warps, "num_stages": num_stages},
        )
    if num_tiles and num_splits > 1:
        _merge[(num_tiles * segments.tile_len, query.shape[1])](
            *(partials, sums, output, *tiles, num_splits),
            **sizes,
            **{"BLOCK_S": _SPLITS_MAX, "num_warps": 4},
        )
    return output


def _tree(segments: Segments) -> tuple[Tensor | None, Tensor | None, Tensor | None, int]:
    """Trees as the kernel takes them: which one a segment is, depths, mask in bytes, and nodes of each."""
    mask = segments.tree_mask
    if mask is None:
        return None, None, None, 0
    return segments.tree_of, segments.tree_depths, mask.view(torch.uint8), mask.shape[1]


def _blocks(dtype: torch.dtype, head_dim: int, block_m: int, *, is_quantised: bool) -> tuple[int, int, int]:
    """Keys of a block, warps, and stages: half of them look pages up, the others hold blocks in shared memory."""
    num_warps = 8 if block_m >= 128 else 4
    if dtype == torch.float32:
        return (32 if block_m < 64 and head_dim <= 128 else 16), num_warps, 2
    if is_quantised and block_m < 64:  # more warps would wait for one another when codes become numbers
        return (32 if head_dim > 128 else 64), 2, 2
    if head_dim > 128:
        return 32, num_warps, 5 if block_m < 64 else 3
    return 64, num_warps, 3 if block_m == 64 else 5  # of 64 rows, two programs share a multiprocessor


@triton.jit
def _slots(table, block, place, is_live, base, shift, PAGE_SIZE: tl.constexpr, BLOCK_N: tl.constexpr):
    """Slots of a block's positions, through the row's pages; int64."""
    if PAGE_SIZE % BLOCK_N == 0 and base is None:  # a block lies within a page
        slot = tl.load(table + block // PAGE_SIZE).to(tl.int64) * PAGE_SIZE + (place % PAGE_SIZE)
    else:
        kept = place if base is None else tl.where(place < base, place, place + shift)
        page = tl.load(table + kept // PAGE_SIZE, mask=is_live, other=0).to(tl.int64)
        slot = page * PAGE_SIZE + kept % PAGE_SIZE
    return slot


@triton.jit
def _positions(place, start, num_own, tree, depths, num_nodes):
    """Positions of keys, which for nodes of a tree are not their places."""
    of = place
    if depths is not None:
        is_own = (place >= start) & (place < start + num_own)
        depth = tl.load(depths + tree * num_nodes + (place - start), mask=is_own, other=0)
        of = tl.where(is_own, start + depth.to(tl.int32), place)
    return of


@triton.jit(do_not_specialize=_UNSPECIALISED, do_not_specialize_on_alignment=_UNALIGNED)
def _attend(
    query,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    keys,  # [num_slots, num_kv_heads, HEAD_DIM]
    values,
    scales,  # [num_kv_heads, 2, num_slots], of keys and of values; None: they are not quantised
    table,  # [num_rows, pages_per_row]
    output,  # [num_tokens, num_kv_heads * GROUP, HEAD_DIM]
    partials,  # [num_tokens, num_kv_heads * GROUP, num_splits, HEAD_DIM], or None
    sums,  # [num_tokens, num_kv_heads * GROUP, num_splits], or None
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
):
    part, split, num_splits = tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    kv_head = part // PARTS
    segment, first = tl.load(tile_segments + tl.program_id(0)), tl.load(tile_offsets + tl.program_id(0))
    if segment < 0:
        return
    width, start = tl.load(query_lens + segment), tl.load(start_positions + segment).to(tl.int32)  # all loads at once
    offset, row = tl.load(offsets + segment), tl.load(rows + segment)
    tree = -1 if tree_of is None else tl.load(tree_of + segment)
    num_own = 0 if tree_of is None else tl.where(tree >= 0, width, 0)  # keys that are nodes of the segment's tree
    base = None if bases is None else tl.load(bases + segment).to(tl.int32)
    shift = None if bases is None else tl.load(shifts + segment).to(tl.int32)
    if first >= width:
        return
    member, dims = tl.arange(0, BLOCK_M), column_dims(BLOCK_D, CODE_MAX)
    node = first + member // GROUP  # token within the segment
    is_row, is_dim = (member < TILE_LEN * GROUP) & (node < width), dims < HEAD_DIM
    token, head = (offset + node).to(tl.int64), part * GROUP + member % GROUP
    query_cells = token * query_token_stride + head * query_head_stride
    q = tl.load(query + query_cells[:, None] + dims[None, :], mask=is_row[:, None] & is_dim[None, :], other=0.0)
    q = q.to(tl.float32) if WIDE else q

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
    share = tl.cdiv(tl.cdiv(high - begin, BLOCK_N), num_splits) * BLOCK_N
    begin += split * share
    end = tl.minimum(begin + share, high)

    keys, values = keys + kv_head * kv_head_stride, values + kv_head * kv_head_stride
    scales = None if scales is None else scales + kv_head.to(tl.int64) * (2 * num_slots)
    table += row * row_stride
    peak, total = tl.full([BLOCK_M], float("-inf"), tl.float32), tl.zeros([BLOCK_M], tl.float32)
    mixed = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    # Large tiles first take the blocks that need no mask, in a phase 0 of their own.
    PHASE: tl.constexpr = 0 if BLOCK_M >= 64 and WINDOW == 0 else 1
    masked_from = begin if PHASE == 1 else tl.maximum(begin, tl.minimum(even // BLOCK_N * BLOCK_N, end))
    for phase in tl.static_range(PHASE, 2):
        for block in range(begin if phase == 0 else masked_from, masked_from if phase == 0 else end, BLOCK_N):
            place = block + tl.arange(0, BLOCK_N)
            is_live = (place >= low) & (place < high)
            slot = _slots(table, block, place, is_live, base, shift, PAGE_SIZE, BLOCK_N)
            is_read = is_live if phase == 1 else None
            key = kv_block(keys, slot * slot_stride, is_read, q.dtype, HEAD_DIM, BLOCK_D, CODE_MAX, WIDE)
            value = kv_block(values, slot * slot_stride, is_read, q.dtype, HEAD_DIM, BLOCK_D, CODE_MAX, WIDE)
            score = scaled(tl.dot(q, tl.trans(key), input_precision="ieee") * scale, scales, slot, is_read)
            if phase == 1:
                seen = place[None, :] <= reach[:, None]
                if tree_mask is not None:
                    edges = ((tree * num_nodes + node) * num_nodes - start)[:, None] + place[None, :]
                    is_own = (place >= start) & (place < start + num_own)
                    seen |= tl.load(tree_mask + edges, mask=is_row[:, None] & is_own[None, :], other=0) != 0
                if WINDOW:
                    of = _positions(place, start, num_own, tree, depths, num_nodes)
                    seen &= of[None, :] > at[:, None] - WINDOW
                score = tl.where(seen, score, float("-inf"))
            rise = tl.maximum(peak, tl.max(score, 1))
            level = tl.where(rise == float("-inf"), 0.0, rise)  # a row that has seen nothing yet
            weight, fade = tl.exp2(score - level[:, None]), tl.exp2(peak - level)
            peak, total = rise, total * fade + tl.sum(weight, 1)
            weight = scaled(weight, scales, num_slots + slot, is_read).to(value.dtype)
            mixed = tl.dot(weight, value, mixed * fade[:, None], input_precision="ieee")
    has_seen = total != 0  # some key, in this split
    total = tl.where(has_seen, total, 1.0)
    mixed = mixed / total[:, None]
    line = token * (tl.num_programs(1) * GROUP) + head
    is_out = is_row[:, None] & is_dim[None, :]
    if partials is None:
        tl.store(output + line[:, None] * HEAD_DIM + dims[None, :], mixed.to(output.dtype.element_ty), mask=is_out)
    else:
        line = line * num_splits + split
        tl.store(sums + line, tl.where(has_seen, peak + tl.log2(total), float("-inf")), mask=is_row)
        tl.store(partials + line[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_out & has_seen[:, None])


@triton.jit(do_not_specialize=["num_splits"], do_not_specialize_on_alignment=_UNALIGNED)
def _merge(
    partials,  # [num_tokens, num_heads, num_splits, HEAD_DIM]
    sums,  # [num_tokens, num_heads, num_splits]: log2 of what each split's weights came to
    output,
    offsets,
    query_lens,
    tile_segments,
    tile_offsets,
    num_splits,
    TILE_LEN: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    tile = tl.program_id(0) // TILE_LEN
    segment = tl.load(tile_segments + tile)
    if segment < 0:
        return
    node = tl.load(tile_offsets + tile) + tl.program_id(0) % TILE_LEN
    if node >= tl.load(query_lens + segment):
        return
    line = (tl.load(offsets + segment) + node).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    split, dims = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
    each = tl.load(sums + line * num_splits + split, mask=split < num_splits, other=float("-inf"))
    peak = tl.max(each, 0)
    share = tl.exp2(each - tl.where(peak == float("-inf"), 0.0, peak))
    is_part = (share > 0)[:, None] & (dims < HEAD_DIM)[None, :]  # where a split has seen no key, it has written nothing
    parts = tl.load(partials + (line * num_splits + split)[:, None] * HEAD_DIM + dims[None, :], mask=is_part, other=0.0)
    total = tl.sum(share, 0)
    mixed = tl.sum(parts * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    tl.store(output + line * HEAD_DIM + dims, mixed.to(output.dtype.element_ty), mask=dims < HEAD_DIM)
