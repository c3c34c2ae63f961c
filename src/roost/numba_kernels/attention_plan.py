"""What a pass reads, for the kernels of attention: its plan, cut into tiles, and the scratch of each thread.

A plan is a row of 64-bit numbers that all layers of a pass share; a layer's record has its address. `put_tiles` cuts
the segments into tiles, once a pass: some tokens of a segment, which share the keys that they read. A tile whose keys
lie in several spans is read in as many parts by different threads, as long as there is room for what each finds. Called
by attention backends and by programs, before `attend`.
"""

import numpy as np
from numba import njit

from roost.numba_kernels.simd import LANES, load_long, load_nth_int, load_nth_long, store_long
from roost.numba_kernels.simd import load_nth_long as field

BLOCK_LEN = 64  # positions whose keys are read together
SPAN_LEN = 256  # positions that are summed apart from others
TILE_ROWS = 64  # heads of tokens that share a block of keys; one token's, if they are more

# Of a plan. Tensors by their addresses, 0 where there is none.
(
    PAGES,  # int32 [num_rows, PAGES_PER_ROW]
    PAGES_PER_ROW,
    PAGE_SIZE,
    WINDOW,  # 0: none
    FACTOR,  # the scale of scores times log2(e), as the bits of a float32
    NUM_HEADS,
    NUM_KV_HEADS,
    HEAD_DIM,
    KIND,  # of the numbers in the cache
    NUM_SLOTS,
    NUM_SEGMENTS,  # the address of an int64
    ROWS,  # and what follows: columns of `Segments`
    START_POSITIONS,
    OFFSETS,
    QUERY_LENS,
    TREE_OF,
    TREE_DEPTHS,
    TREE_MASK,
    NUM_NODES,  # of each tree
    BRANCH_BASES,
    BRANCH_SHIFTS,
    TILES,  # room for TILES_MAX tiles
    TILES_MAX,
    PARTIALS,  # room for PARTIALS_MAX lines
    PARTIALS_MAX,
    SCRATCH,  # SCRATCH_BYTES for each thread
    # Written by `put_tiles`
    NUM_TILES,
    NUM_PARTS,
    NUM_MERGES,
    # Written by `lay_out`
    SCRATCH_BYTES,
    GROUP,  # heads of a KV head
    TILE_LEN,  # tokens, at most
    WIDTH_BYTES,  # of a head as floats, in whole vectors
    NODES_BYTES,  # of a float for each node, in whole blocks
    QUERIES,  # places within a thread's scratch: [TILE_ROWS, head_dim], scaled
    LINES,  # [TILE_ROWS] lines
    MERGED,  # the same
    SCORES,  # [TILE_ROWS, BLOCK_LEN]
    LOWS,  # [TILE_ROWS]: each row reads positions [low, high)
    HIGHS,
    SLOTS,  # [BLOCK_LEN]
    AHEAD,  # the same of the next block
    KEY_ADDRESSES,
    VALUE_ADDRESSES,
    KEY_SCALES,
    VALUE_SCALES,
    KEY_BLOCK,  # [head_dim, BLOCK_LEN]
    VALUE_BLOCK,  # [BLOCK_LEN, head_dim]
    NODE_SCORES,  # [TILE_ROWS, nodes]
    NODE_ADDRESSES,  # [nodes], and the same of their values
    NODE_SCALES,
    NODE_VALUES,  # [nodes, head_dim]
    PATH,  # [nodes]
    SPARE,
    NUM_PLAN_FIELDS,
) = range(55)

# Of a tile: tokens [FIRST, FIRST + NUM_TOKENS) of a segment, which read positions [LOW, HIGH).
SEGMENT, FIRST, NUM_TOKENS, NUM_ROWS, START, TREE, WIDTH, LOW, HIGH, PARTS, FIRST_PART, FIRST_MERGE, FIRST_LINE = range(
    13
)
TILE_BYTES = 128

_VECTOR = 4 * LANES


def lay_out(plan: np.ndarray) -> None:
    """Give each part of a thread's scratch its place; heads, dimensions and nodes are known."""
    group, dims = int(plan[NUM_HEADS] // plan[NUM_KV_HEADS]), -(-int(plan[HEAD_DIM]) // LANES) * LANES
    nodes = -(-int(plan[NUM_NODES]) // BLOCK_LEN) * BLOCK_LEN
    tile_len = max(TILE_ROWS // group, 1)
    rows = tile_len * group
    plan[GROUP], plan[TILE_LEN], plan[WIDTH_BYTES], plan[NODES_BYTES] = group, tile_len, 4 * dims, 4 * nodes
    sizes = {
        QUERIES: 4 * rows * dims,
        LINES: rows * line_bytes(dims),
        MERGED: rows * line_bytes(dims),
        SCORES: 4 * rows * BLOCK_LEN,
        LOWS: 8 * rows,
        HIGHS: 8 * rows,
        SLOTS: 8 * BLOCK_LEN,
        AHEAD: 8 * BLOCK_LEN,
        KEY_ADDRESSES: 8 * BLOCK_LEN,
        VALUE_ADDRESSES: 8 * BLOCK_LEN,
        KEY_SCALES: 4 * BLOCK_LEN,
        VALUE_SCALES: 4 * BLOCK_LEN,
        KEY_BLOCK: 4 * dims * BLOCK_LEN,
        VALUE_BLOCK: 4 * dims * BLOCK_LEN,
        NODE_SCORES: 4 * rows * nodes,
        NODE_ADDRESSES: 8 * nodes,
        NODE_SCALES: 4 * nodes,
        NODE_VALUES: 4 * dims * nodes,
        PATH: 8 * nodes,
        SPARE: 128 * LANES,
    }
    place = 0
    for part, size in sizes.items():
        plan[part] = place
        place += -(-size // _VECTOR) * _VECTOR
    plan[SCRATCH_BYTES] = place


def line_bytes(head_dim: int) -> int:
    """Bytes of a line: what a row has read. Weighted values, then the largest score and the sum of weights."""
    return 4 * (-(-head_dim // LANES) * LANES + LANES)


@njit(nogil=True)
def put_tiles(record, piece, num_pieces):
    """Cut the segments of a plan, the record's first number, into tiles: the work of one thread."""
    plan = field(record, 1)
    tile_len, group, window = field(plan, TILE_LEN), field(plan, GROUP), field(plan, WINDOW)
    num_kv_heads, num_nodes, tree = field(plan, NUM_KV_HEADS), field(plan, NUM_NODES), -1
    tile, num_parts, num_merges, num_lines = field(plan, TILES), 0, 0, 0
    for segment in range(load_long(field(plan, NUM_SEGMENTS))):
        width, start = (
            load_nth_int(field(plan, QUERY_LENS), segment),
            load_nth_long(field(plan, START_POSITIONS), segment),
        )
        if field(plan, TREE_OF) != 0:
            tree = load_nth_int(field(plan, TREE_OF), segment)
        for first in range((width - 1) // tile_len * tile_len, -1, -tile_len):  # a row's last tile has most to read
            num_tokens = min(tile_len, width - first)
            low, high = start + first, start + first + num_tokens
            if tree >= 0:
                low, high = start, start
                for node in range(first, first + num_tokens):
                    high = max(high, start + 1 + load_nth_long(field(plan, TREE_DEPTHS), tree * num_nodes + node))
            low = max(low - window + 1, 0) if window > 0 else 0
            parts = (high - 1) // SPAN_LEN - low // SPAN_LEN + 1
            if parts > 1 and num_lines + parts * num_tokens * group * num_kv_heads > field(plan, PARTIALS_MAX):
                parts = 1
            store_long(tile + 8 * SEGMENT, segment)
            store_long(tile + 8 * FIRST, first)
            store_long(tile + 8 * NUM_TOKENS, num_tokens)
            store_long(tile + 8 * NUM_ROWS, num_tokens * group)
            store_long(tile + 8 * START, start)
            store_long(tile + 8 * TREE, tree)
            store_long(tile + 8 * WIDTH, width)
            store_long(tile + 8 * LOW, low)
            store_long(tile + 8 * HIGH, high)
            store_long(tile + 8 * PARTS, parts)
            store_long(tile + 8 * FIRST_PART, num_parts)
            store_long(tile + 8 * FIRST_MERGE, num_merges)
            store_long(tile + 8 * FIRST_LINE, num_lines)
            num_parts += parts * num_kv_heads
            if parts > 1:
                num_merges += num_kv_heads
                num_lines += parts * num_tokens * group * num_kv_heads
            tile += TILE_BYTES
    store_long(plan + 8 * NUM_TILES, (tile - field(plan, TILES)) // TILE_BYTES)
    store_long(plan + 8 * NUM_PARTS, num_parts)
    store_long(plan + 8 * NUM_MERGES, num_merges)


@njit(nogil=True)
def find_tile(plan, number, piece):
    """The last tile whose number at this place is `piece` at most."""
    low, high = 0, field(plan, NUM_TILES)
    while high - low > 1:
        middle = (low + high) // 2
        if field(field(plan, TILES) + middle * TILE_BYTES, number) <= piece:
            low = middle
        else:
            high = middle
    return field(plan, TILES) + low * TILE_BYTES
