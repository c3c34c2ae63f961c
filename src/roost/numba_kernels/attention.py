"""Attention over paged KV: pages are read in place, and a token's sums have one order.

score(query, key) is a chain of fma over the dimensions, with int8 keys a sum of whole numbers. A token reads its keys
by position: a block at a time, with an online softmax that begins anew with every span; then spans are folded in their
order. Blocks and spans begin at multiples of their lengths, and keys that a token does not see leave its sums as they
are. So its result has the same bits in any chunk, round, tree or branch, on pages of any size, by any number of
threads. `put_tiles` goes before `attend`, `merge_spans` behind it. Kernels of the `numba` backend.
"""

import numpy as np
from numba import njit

from roost.numba_kernels import attention_plan as of
from roost.numba_kernels.attention_plan import BLOCK_LEN, SPAN_LEN, find_tile
from roost.numba_kernels.kv_blocks import INT8S, put_addresses, put_keys, put_scales, put_slots, put_values
from roost.numba_kernels.query_bytes import put_query
from roost.numba_kernels.simd import (
    HAS_WIDE_REGISTERS,
    LANES,
    add,
    div,
    exp2,
    first_of,
    fma,
    largest_of,
    load_float,
    load_floats,
    load_int8,
    load_nth_int,
    load_nth_long,
    maximum,
    mul,
    prefetch,
    splat_float,
    store_float,
    store_floats,
    store_long,
    sub,
    sum_of,
    where_between,
    zero_floats,
)
from roost.numba_kernels.simd import load_nth_long as field
from roost.numba_kernels.sums import byte_sums, sums_apart, sums_of

# Of a record, besides its kind: one layer. Addresses; strides are in bytes.
PLAN, QUERY, QUERY_STRIDE, OUTPUT, OUTPUT_STRIDE, KEYS, VALUES, SCALES, SINKS = range(1, 10)

_LOG2_E = np.float32(1.4426950408889634)
_NOTHING = np.float32(-3e38)  # the largest score of a row that has seen no key
_VECTOR = 4 * LANES
_ZERO, _ONE = np.int64(0), np.int64(1)
_SCORES_BYTES = np.int64(4 * BLOCK_LEN)  # of a row; numbers without a type would have functions compiled for each
_FEW = 4 if HAS_WIDE_REGISTERS else 6  # rows whose sums are in registers at a time, with `_PIECE` bytes of each
_PIECE = 4 * _VECTOR if HAS_WIDE_REGISTERS else _VECTOR
_score_1, _score_3, _score_few = (sums_of(number, _PIECE // _VECTOR) for number in (1, 3, _FEW))
_mix_1, _mix_3, _mix_few = (sums_apart(number, _PIECE // _VECTOR) for number in (1, 3, _FEW))
_mix_vector = sums_apart(1, 1)
_mix_bytes_1, _mix_bytes_3 = (sums_apart(number, _PIECE // _VECTOR, are_bytes=True) for number in (1, 3))
_ROWS_IN_PLACE = 8  # that read int8 values where they are; more of them read floats that are made once
_FEW_BYTES = 3  # the same of rows whose scores are sums of bytes, which take two registers each
_score_bytes_1, _score_bytes_3 = (byte_sums(number, _PIECE // _VECTOR) for number in (1, _FEW_BYTES))


# --- lines: what rows have read ---------------------------------------------------------------------------------


@njit(nogil=True)
def _clear(lines, num_rows, width):
    """Lines of rows that have read nothing; `width` is in bytes, here and below."""
    for place in range(0, num_rows * (width + _VECTOR), _VECTOR):
        store_floats(lines + place, zero_floats())
    for row in range(num_rows):
        store_float(lines + row * (width + _VECTOR) + width, _NOTHING)


@njit(nogil=True)
def _fold(target, line, width):
    """Add what a row has read of a span to what it has read of those before it."""
    peak, more = load_float(target + width), load_float(line + width)
    if more == _NOTHING:
        return
    rise = peak if peak > more else more
    fade, weight = exp2(splat_float(peak - rise)), exp2(splat_float(more - rise))
    for place in range(0, width, _VECTOR):
        faded = mul(load_floats(target + place), fade)
        store_floats(target + place, fma(load_floats(line + place), weight, faded))
    total, added = load_float(target + width + 4), load_float(line + width + 4)
    store_float(target + width, rise)
    store_float(target + width + 4, added * first_of(weight) + total * first_of(fade))


@njit(nogil=True)
def _write(record, plan, tile, kv_head, row, line):
    """Write what a row has read: its weighted values over the sum of weights, which its head's sink joins."""
    head_dim, group, width = field(plan, of.HEAD_DIM), field(plan, of.GROUP), field(plan, of.WIDTH_BYTES)
    token = load_nth_int(field(plan, of.OFFSETS), field(tile, of.SEGMENT)) + field(tile, of.FIRST) + row // group
    output = (
        field(record, OUTPUT) + token * field(record, OUTPUT_STRIDE) + 4 * (kv_head * group + row % group) * head_dim
    )
    if field(record, SINKS) != 0:
        sink = load_float(field(record, SINKS) + 4 * (kv_head * group + row % group)) * _LOG2_E
        peak, total = load_float(line + width), load_float(line + width + 4)
        rise = peak if peak > sink else sink
        fade, weight = exp2(splat_float(peak - rise)), exp2(splat_float(sink - rise))
        for place in range(0, width, _VECTOR):
            store_floats(line + place, mul(load_floats(line + place), fade))
        store_float(line + width + 4, total * first_of(fade) + first_of(weight))
    total, whole = load_float(line + width + 4), head_dim // LANES * LANES
    for dim in range(0, whole, LANES):
        store_floats(output + 4 * dim, div(load_floats(line + 4 * dim), splat_float(total)))
    for dim in range(whole, head_dim):
        store_float(output + 4 * dim, load_float(line + 4 * dim) / total)


# --- sums of a few rows -----------------------------------------------------------------------------------------


@njit(nogil=True)
def _score_bytes(scores, stride, queries, width, num_rows, keys, head_dim, scales):
    """Scores of a few rows with a block of int8 keys, whose scales are given."""
    num_words = (head_dim + 3) // 4
    for place in range(0, _SCORES_BYTES, _PIECE):
        row = 0
        while row < num_rows:
            target, query = scores + row * stride + place, queries + row * width
            if row + _FEW_BYTES <= num_rows:
                _score_bytes_3(target, stride, query, width // 4, keys + place, _SCORES_BYTES, num_words)
                row += _FEW_BYTES
            else:
                _score_bytes_1(target, stride, query, width // 4, keys + place, _SCORES_BYTES, num_words)
                row += 1
    for row in range(num_rows):
        for place in range(0, _SCORES_BYTES, _VECTOR):
            at = scores + row * stride + place
            store_floats(at, mul(load_floats(at), load_floats(scales + place)))


@njit(nogil=True)
def _score(scores, stride, queries, width, num_rows, keys, head_dim):
    """Scores of a few rows with a block of keys."""
    for place in range(0, _SCORES_BYTES, _PIECE):
        if num_rows == _FEW:
            _score_few(scores + place, stride, queries, width, keys + place, _SCORES_BYTES, head_dim)
            continue
        row = 0
        while row < num_rows:
            target, query = scores + row * stride + place, queries + row * width
            if row + 3 <= num_rows:
                _score_3(target, stride, query, width, keys + place, _SCORES_BYTES, head_dim)
                row += 3
            else:
                _score_1(target, stride, query, width, keys + place, _SCORES_BYTES, head_dim)
                row += 1


@njit(nogil=True)
def _weigh(scores, line, width, first, last, scales):
    """Turn scores of lanes [first, last) of a block into weights, with the values' scales; what was read fades."""
    one = where_between(first, last, load_floats(scores))
    two = where_between(first - LANES, last - LANES, load_floats(scores + _VECTOR))
    three = where_between(first - 2 * LANES, last - 2 * LANES, load_floats(scores + 2 * _VECTOR))
    four = where_between(first - 3 * LANES, last - 3 * LANES, load_floats(scores + 3 * _VECTOR))
    peak, most = load_float(line + width), largest_of(maximum(maximum(one, two), maximum(three, four)))
    rise = peak if peak > most else most
    total, added = load_float(line + width + 4), zero_floats()
    for place in range(0, _SCORES_BYTES, _VECTOR):
        lane = place // 4
        score = where_between(first - lane, last - lane, load_floats(scores + place))
        weight = exp2(sub(score, splat_float(rise)))
        added = add(added, weight)
        store_floats(scores + place, weight if scales == 0 else mul(weight, load_floats(scales + place)))
    if rise != peak:
        fade = exp2(splat_float(peak - rise))
        total *= first_of(fade)
        for place in range(0, width, _VECTOR):
            store_floats(line + place, mul(load_floats(line + place), fade))
        store_float(line + width, rise)
    store_float(line + width + 4, total + sum_of(added))


@njit(nogil=True)
def _mix(lines, width, weights, num_rows, addresses, count):
    """Add `count` weighted values to the lines of a few rows."""
    stride, whole = width + _VECTOR, width // _PIECE * _PIECE
    for place in range(0, whole, _PIECE):
        if num_rows == _FEW:
            _mix_few(lines + place, stride, weights, _SCORES_BYTES, addresses, place, count)
            continue
        row = 0
        while row < num_rows:
            line, own = lines + row * stride + place, weights + row * _SCORES_BYTES
            if row + 3 <= num_rows:
                _mix_3(line, stride, own, _SCORES_BYTES, addresses, place, count)
                row += 3
            else:
                _mix_1(line, stride, own, _SCORES_BYTES, addresses, place, count)
                row += 1
    for row in range(num_rows):
        for place in range(whole, width, _VECTOR):
            line, own = lines + row * stride + place, weights + row * _SCORES_BYTES
            _mix_vector(line, stride, own, _SCORES_BYTES, addresses, place, count)


@njit(nogil=True)
def _mix_bytes(lines, width, weights, num_rows, addresses, count):
    """The same with values of int8."""
    stride = width + _VECTOR
    for place in range(0, width, _PIECE):
        row = 0
        while row < num_rows:
            line, own = lines + row * stride + place, weights + row * _SCORES_BYTES
            if row + 3 <= num_rows:
                _mix_bytes_3(line, stride, own, _SCORES_BYTES, addresses, place // 4, count)
                row += 3
            else:
                _mix_bytes_1(line, stride, own, _SCORES_BYTES, addresses, place // 4, count)
                row += 1


@njit(nogil=True, inline="always")
def _in_place(plan, num_rows):
    """Whether the values of so many rows are read as bytes, where they are."""
    width, kind = field(plan, of.WIDTH_BYTES), field(plan, of.KIND)
    is_whole = width == 4 * field(plan, of.HEAD_DIM) and width % _PIECE == 0
    return kind == INT8S and is_whole and num_rows <= _ROWS_IN_PLACE


@njit(nogil=True)
def _mix_seen(lines, width, weights, num_rows, addresses, lows, highs, block, in_place):
    """Add a block's values to a few rows: those that all of them see at once, others row by row, in their order."""
    first_all, last_all = 0, BLOCK_LEN
    for row in range(num_rows):
        first_all = max(first_all, load_nth_long(lows, row) - block)
        last_all = min(last_all, load_nth_long(highs, row) - block)
    last_all = max(first_all, last_all)
    for turn in range(3):
        for row in range(num_rows if turn != 1 else 1):
            first, last, count = first_all, last_all, num_rows
            if turn != 1:
                first, last = (
                    max(load_nth_long(lows, row) - block, 0),
                    min(load_nth_long(highs, row) - block, BLOCK_LEN),
                )
                first, last = (first, min(last, first_all)) if turn == 0 else (max(first, last_all), last)
                count = 1
            if first < last:
                own, line = weights + row * _SCORES_BYTES + 4 * first, lines + row * (width + _VECTOR)
                if in_place:
                    _mix_bytes(line, width, own, count, addresses + 8 * first, last - first)
                else:
                    _mix(line, width, own, count, addresses + 8 * first, last - first)


# --- reading ----------------------------------------------------------------------------------------------------


@njit(nogil=True)
def _put_rows(record, plan, tile, scratch, kv_head):
    """Copy the queries of a tile, scaled so that scores are exponents of two, and say what each row reads."""
    group, head_dim, width = field(plan, of.GROUP), field(plan, of.HEAD_DIM), field(plan, of.WIDTH_BYTES)
    offset = load_nth_int(field(plan, of.OFFSETS), field(tile, of.SEGMENT))
    factor, whole = load_float(plan + 8 * of.FACTOR), head_dim // LANES * LANES
    window, tree = field(plan, of.WINDOW), field(tile, of.TREE)
    for row in range(field(tile, of.NUM_ROWS)):
        token, head = field(tile, of.FIRST) + row // group, kv_head * group + row % group
        source = field(record, QUERY) + (offset + token) * field(record, QUERY_STRIDE) + 4 * head * head_dim
        own = scratch + field(plan, of.QUERIES) + row * width
        target = scratch + field(plan, of.MERGED) if field(plan, of.KIND) == INT8S else own
        for dim in range(0, whole, LANES):
            store_floats(target + 4 * dim, mul(load_floats(source + 4 * dim), splat_float(factor)))
        if whole < head_dim:
            store_floats(target + 4 * whole, zero_floats())
        for dim in range(whole, head_dim):
            store_float(target + 4 * dim, load_float(source + 4 * dim) * factor)
        if target != own:
            put_query(own, target, width // 4)
        if tree >= 0:
            token = load_nth_long(field(plan, of.TREE_DEPTHS), tree * field(plan, of.NUM_NODES) + token)
        at = field(tile, of.START) + token
        store_long(scratch + field(plan, of.LOWS) + 8 * row, max(at - window + 1, 0) if window > 0 else 0)
        store_long(scratch + field(plan, of.HIGHS) + 8 * row, at + 1)


@njit(nogil=True)
def _find(plan, tile, slots, position, count):
    """Write the slots of so many positions of a tile's row."""
    segment, base, shift = field(tile, of.SEGMENT), np.int64(1 << 62), _ZERO
    pages = field(plan, of.PAGES) + 4 * field(plan, of.PAGES_PER_ROW) * load_nth_long(field(plan, of.ROWS), segment)
    if field(plan, of.BRANCH_BASES) != 0:
        base = load_nth_long(field(plan, of.BRANCH_BASES), segment)
        shift = load_nth_long(field(plan, of.BRANCH_SHIFTS), segment)
    put_slots(slots, pages, field(plan, of.PAGE_SIZE), position, count, base, shift)


@njit(nogil=True)
def _prefetch(record, plan, slots, kv_head, count):
    """Have keys and values of some slots brought near, while others are worked on."""
    head_bytes = field(plan, of.HEAD_DIM) * (4 >> field(plan, of.KIND))
    for number in range(count):
        place = (load_nth_long(slots, number) * field(plan, of.NUM_KV_HEADS) + kv_head) * head_bytes
        for line in range(place, place + head_bytes, 64):
            prefetch(field(record, KEYS) + line)
            prefetch(field(record, VALUES) + line)


@njit(nogil=True)
def _score_rows(record, plan, tile, scratch, kv_head, lanes, value_rows, scores, stride, num_ahead):
    """Lay out keys and values, and score the keys with a tile's rows, while others are brought near.

    `lanes` are the position of lane 0, and the first and last of those that are read.
    """
    block, first, last = lanes
    kind, head_dim, width = field(plan, of.KIND), field(plan, of.HEAD_DIM), field(plan, of.WIDTH_BYTES)
    slots, key_block = scratch + field(plan, of.SLOTS), scratch + field(plan, of.KEY_BLOCK)
    keys, values = scratch + field(plan, of.KEY_ADDRESSES), scratch + field(plan, of.VALUE_ADDRESSES)
    head_bytes, num_rows = head_dim * (4 >> kind), field(tile, of.NUM_ROWS)
    slot_bytes, spare, scales = field(plan, of.NUM_KV_HEADS) * head_bytes, scratch + field(plan, of.SPARE), _ZERO
    _find(plan, tile, slots + 8 * first, block + first, last - first)
    put_addresses(keys, slots, first, last, field(record, KEYS) + kv_head * head_bytes, slot_bytes)
    put_addresses(values, slots, first, last, field(record, VALUES) + kv_head * head_bytes, slot_bytes)
    num_first, ahead = num_ahead * _FEW // (num_rows + _FEW), scratch + field(plan, of.AHEAD)
    _prefetch(record, plan, ahead, kv_head, num_first)
    put_keys(key_block, keys, first, last, kind, head_dim, spare)
    if not _in_place(plan, num_rows):
        put_values(value_rows, values, first, last, kind, head_dim, spare)
    if kind == INT8S:
        scales, line_bytes = scratch + field(plan, of.KEY_SCALES), 4 * field(plan, of.NUM_SLOTS)
        source = field(record, SCALES) + 2 * kv_head * line_bytes
        put_scales(scales, slots, first, last, source)
        put_scales(scratch + field(plan, of.VALUE_SCALES), slots, first, last, source + line_bytes)
    step = _FEW_BYTES if kind == INT8S else _FEW
    for row in range(0, num_rows, step):
        queries, few = scratch + field(plan, of.QUERIES) + row * width, min(step, num_rows - row)
        if kind == INT8S:
            _score_bytes(scores + row * stride, stride, queries, width, few, key_block, head_dim, scales)
        else:
            _score(scores + row * stride, stride, queries, width, few, key_block, head_dim)
        done = num_first + (num_ahead - num_first) * row // num_rows
        count = num_first + (num_ahead - num_first) * (row + few) // num_rows - done
        _prefetch(record, plan, ahead + 8 * done, kv_head, count)


@njit(nogil=True)
def _keep_nodes(plan, scratch, node, count):
    """Keep where the values of some nodes of a tree are, and their scales, until all nodes are scored."""
    for lane in range(count):
        address = load_nth_long(scratch + field(plan, of.VALUE_ADDRESSES), lane)
        store_long(scratch + field(plan, of.NODE_ADDRESSES) + 8 * (node + lane), address)
        scale = load_float(scratch + field(plan, of.VALUE_SCALES) + 4 * lane)
        store_float(scratch + field(plan, of.NODE_SCALES) + 4 * (node + lane), scale)


@njit(nogil=True)
def _put_nodes(plan, tile, scratch, row, block):
    """Put the nodes that a row reads into the lanes of their positions: scores, scales and addresses of values."""
    num_nodes, start, tree = field(plan, of.NUM_NODES), field(tile, of.START), field(tile, of.TREE)
    node, path = field(tile, of.FIRST) + row // field(plan, of.GROUP), scratch + field(plan, of.PATH)
    mask = field(plan, of.TREE_MASK) + (tree * num_nodes + node) * num_nodes
    for other in range(field(tile, of.WIDTH)):
        if load_int8(mask + other) != 0:
            store_long(path + 8 * load_nth_long(field(plan, of.TREE_DEPTHS), tree * num_nodes + other), other)
    scores = scratch + field(plan, of.NODE_SCORES) + row * field(plan, of.NODES_BYTES)
    last = min(block + BLOCK_LEN, load_nth_long(scratch + field(plan, of.HIGHS), row))
    for position in range(max(block, start), last):
        lane, node = position - block, load_nth_long(path, position - start)
        store_float(scratch + field(plan, of.SCORES) + row * _SCORES_BYTES + 4 * lane, load_float(scores + 4 * node))
        scale = load_float(scratch + field(plan, of.NODE_SCALES) + 4 * node)
        store_float(scratch + field(plan, of.VALUE_SCALES) + 4 * lane, scale)
        address = load_nth_long(scratch + field(plan, of.NODE_ADDRESSES), node)
        store_long(scratch + field(plan, of.VALUE_ADDRESSES) + 8 * lane, address)


@njit(nogil=True)
def _mix_rows(plan, tile, scratch, lines, block):
    """Turn the scores of a block into weights, and add its values to the lines of a tile's rows."""
    has_nodes = field(tile, of.TREE) >= 0 and block + BLOCK_LEN > field(tile, of.START)  # each row has its own
    width, num_rows, step = field(plan, of.WIDTH_BYTES), field(tile, of.NUM_ROWS), 1 if has_nodes else _FEW
    addresses = scratch + field(plan, of.VALUE_ADDRESSES)
    scales = scratch + field(plan, of.VALUE_SCALES) if field(plan, of.KIND) == INT8S else _ZERO
    for row in range(0, num_rows, step):
        few, scores = min(step, num_rows - row), scratch + field(plan, of.SCORES) + row * _SCORES_BYTES
        lows, highs = scratch + field(plan, of.LOWS) + 8 * row, scratch + field(plan, of.HIGHS) + 8 * row
        if has_nodes:
            _put_nodes(plan, tile, scratch, row, block)
        for number in range(few):
            low, high = load_nth_long(lows, number) - block, load_nth_long(highs, number) - block
            if low < BLOCK_LEN and high > 0:
                line, own = lines + (row + number) * (width + _VECTOR), scores + number * _SCORES_BYTES
                _weigh(own, line, width, low, high, scales)
        own = lines + row * (width + _VECTOR)
        _mix_seen(own, width, scores, few, addresses, lows, highs, block, _in_place(plan, num_rows))


@njit(nogil=True)
def attend(record, piece, num_pieces, member):
    """Read what a tile's tokens see with the heads of a KV head: one span of it, or all, one after the other."""
    plan = field(record, PLAN)
    tile = find_tile(plan, of.FIRST_PART, piece)
    scratch = field(plan, of.SCRATCH) + member * field(plan, of.SCRATCH_BYTES)
    parts, first_span = field(tile, of.PARTS), field(tile, of.LOW) // SPAN_LEN
    kv_head, part = (piece - field(tile, of.FIRST_PART)) // parts, (piece - field(tile, of.FIRST_PART)) % parts
    width, num_rows, start = field(plan, of.WIDTH_BYTES), field(tile, of.NUM_ROWS), field(tile, of.START)
    stride, lines, merged = width + _VECTOR, scratch + field(plan, of.LINES), scratch + field(plan, of.MERGED)
    scores, value_rows = scratch + field(plan, of.SCORES), scratch + field(plan, of.VALUE_BLOCK)
    last_span, ahead = (field(tile, of.HIGH) - 1) // SPAN_LEN, scratch + field(plan, of.AHEAD)
    if parts > 1:
        first_span = last_span = first_span + part
        lines = field(plan, of.PARTIALS) + (field(tile, of.FIRST_LINE) + (kv_head * parts + part) * num_rows) * stride
    _put_rows(record, plan, tile, scratch, kv_head)
    _clear(merged, num_rows, width)
    for span in range(first_span, last_span + 1):
        first, last = max(span * SPAN_LEN, field(tile, of.LOW)), min((span + 1) * SPAN_LEN, field(tile, of.HIGH))
        in_order = last  # the end of what is in the order of the row; the nodes of a tree come behind it
        _find(plan, tile, ahead, first, min(BLOCK_LEN, last - first))
        _prefetch(record, plan, ahead, kv_head, min(BLOCK_LEN, last - first))
        _clear(lines, num_rows, width)
        if field(tile, of.TREE) >= 0 and last > start:
            in_order = start
            for node in range(0, field(tile, of.WIDTH), BLOCK_LEN):
                count, values = min(field(tile, of.WIDTH) - node, BLOCK_LEN), scratch + field(plan, of.NODE_VALUES)
                own, row_bytes = scratch + field(plan, of.NODE_SCORES) + 4 * node, field(plan, of.NODES_BYTES)
                lanes = (start + node, _ZERO, count)
                _score_rows(record, plan, tile, scratch, kv_head, lanes, values + node * width, own, row_bytes, _ZERO)
                _keep_nodes(plan, scratch, node, count)
        for block in range(first // BLOCK_LEN * BLOCK_LEN, last, BLOCK_LEN):
            num_ahead = min(max(last - block - BLOCK_LEN, 0), BLOCK_LEN)
            _find(plan, tile, ahead, block + BLOCK_LEN, num_ahead)
            lanes = (block, max(first - block, _ZERO), min(in_order - block, BLOCK_LEN))
            if lanes[1] < lanes[2]:
                _score_rows(record, plan, tile, scratch, kv_head, lanes, value_rows, scores, _SCORES_BYTES, num_ahead)
            _mix_rows(plan, tile, scratch, lines, block)
        if parts == 1:
            for row in range(num_rows):
                _fold(merged + row * stride, lines + row * stride, width)
    if parts == 1:
        for row in range(num_rows):
            _write(record, plan, tile, kv_head, row, merged + row * stride)


@njit(nogil=True)
def attend_pieces(record, size):
    """Into how many pieces `attend` is cut."""
    return field(field(record, PLAN), of.NUM_PARTS)


@njit(nogil=True)
def merge_spans(record, piece, num_pieces, member):
    """Fold spans of a tile that were read apart, each row's in their order."""
    plan = field(record, PLAN)
    tile = find_tile(plan, of.FIRST_MERGE, piece)
    scratch = field(plan, of.SCRATCH) + member * field(plan, of.SCRATCH_BYTES)
    kv_head, parts, num_rows = piece - field(tile, of.FIRST_MERGE), field(tile, of.PARTS), field(tile, of.NUM_ROWS)
    width, merged = field(plan, of.WIDTH_BYTES), scratch + field(plan, of.MERGED)
    lines = field(plan, of.PARTIALS) + (field(tile, of.FIRST_LINE) + kv_head * parts * num_rows) * (width + _VECTOR)
    for row in range(num_rows):
        _clear(merged, _ONE, width)
        for part in range(parts):
            _fold(merged, lines + (part * num_rows + row) * (width + _VECTOR), width)
        _write(record, plan, tile, kv_head, row, merged)


@njit(nogil=True)
def merge_pieces(record, size):
    """Into how many pieces `merge_spans` is cut."""
    return field(field(record, PLAN), of.NUM_MERGES)
