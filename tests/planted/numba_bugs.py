"""Planted bugs in the CPU kernels: edges of windows and pages, spans, heads, scales, norms, rows, programs."""

from tests.planted.bug import Bug

_ALONE = "tests/numba_kernels/test_kernels_alone.py::"
_EQUALS = _ALONE + "test_attention_equals_the_reference"
_WRITTEN = _ALONE + "test_slots_hold_what_was_written_to_them"
_ATTENTION, _BLOCKS = "roost.numba_kernels.attention", "roost.numba_kernels.kv_blocks"
_LOW = "        store_long(scratch + field(plan, of.LOWS) + 8 * row, max(at - window + 1, 0) if window > 0 else 0)"
_SPAN = "            _fold(merged, lines + (part * num_rows + row) * (width + _VECTOR), width)"
_HEAD = "        token, head = field(tile, of.FIRST) + row // group, kv_head * group + row % group"
_VALUE_SCALES = "        put_scales(scratch + field(plan, of.VALUE_SCALES), slots, first, last, source + line_bytes)"
_PARTS = "            parts = (high - 1) // SPAN_LEN - low // SPAN_LEN + 1"
_CODES = "            _put_codes(target, field(record, SCALES) + 4 * (line * num_slots + slot), source, head_dim)"
_ROW = "        _row(record, load_long(field(record, IDS) + 8 * token), field(record, OUTPUT) + 4 * token * in_len)"
_ROOT = "    return np.float32(1.0) / np.float32(math.sqrt(squares / np.float32(count) + np.float32(eps)))"

NUMBA_BUGS = (
    Bug(
        "numba_window_edge",
        _ATTENTION,
        _LOW,
        _LOW.replace("window + 1", "window"),
        "a token reads one key more than its window has",
        test=_EQUALS + "[fp32]",
    ),
    Bug(
        "numba_branch_begins",
        _BLOCKS,
        "        if number == 0 or position == base:",
        "        if number == 0:",
        "a draft branch goes on in the slots right behind the text, which are another's",
        test=_ALONE + "test_a_branch_reads_the_text_and_its_own_slots",
    ),
    Bug(
        "numba_span_missed",
        _ATTENTION,
        "        for part in range(parts):",
        "        for part in range(parts - 1):",
        "the last span of a long context is not merged",
        test=_EQUALS + "[fp32]",
    ),
    Bug(
        "numba_span_of_another_row",
        _ATTENTION,
        _SPAN,
        _SPAN.replace("part * num_rows + row", "row * parts + part"),
        "spans are merged as if those of a row lay side by side",
        test=_EQUALS + "[fp32]",
    ),
    Bug(
        "numba_span_not_counted",
        "roost.numba_kernels.attention_plan",
        _PARTS,
        _PARTS.replace(" + 1", ""),
        "a tile whose keys end in another span than they begin in is read without the last of them",
        test=_EQUALS + "[fp32]",
    ),
    Bug(
        "numba_head_of_another_group",
        _ATTENTION,
        _HEAD,
        _HEAD.replace("kv_head * group + row % group", "row % group * field(plan, of.NUM_KV_HEADS) + kv_head"),
        "queries of GQA heads read the keys of another KV head",
        test=_EQUALS + "[fp32]",
    ),
    Bug(
        "numba_values_with_the_keys_scales",
        _ATTENTION,
        _VALUE_SCALES,
        _VALUE_SCALES.replace("source + line_bytes", "source"),
        "values are read with the scales of the keys",
        test=_EQUALS + "[int8]",
    ),
    Bug(
        "numba_scale_of_the_next_slot",
        _BLOCKS,
        "        store_float(target + 4 * lane, load_float(base + 4 * load_nth_long(slots, lane)))",
        "        store_float(target + 4 * lane, load_float(base + 4 * (load_nth_long(slots, lane) + 1)))",
        "a key is read with the scale of the slot beside it",
        test=_EQUALS + "[int8]",
    ),
    Bug(
        "numba_scale_written_beside",
        "roost.numba_kernels.rotary",
        _CODES,
        _CODES.replace("line * num_slots + slot", "line + slot * 2 * num_kv_heads"),
        "scales are written slot by slot, and read head by head",
        test=_WRITTEN + "[int8]",
    ),
    Bug(
        "numba_page_boundary",
        _BLOCKS,
        "        elif offset == page_size:",
        "        elif offset > page_size:",
        "the first position of a page is looked for behind the page before",
        test=_EQUALS + "[fp32]",
    ),
    Bug(
        "numba_norm_without_eps",
        "roost.numba_kernels.rows",
        _ROOT,
        _ROOT.replace(" + np.float32(eps)", ""),
        "a norm divides small numbers by their size alone",
        test=_ALONE + "test_a_norm_of_small_numbers_is_held_down_by_eps",
    ),
    Bug(
        "numba_embedding_of_the_first",
        "roost.numba_kernels.embedding",
        _ROW,
        _ROW.replace(" + 8 * token)", ")"),
        "every token gets the embedding of the first",
        test=_ALONE + "test_an_embedding_is_the_row_of_its_token",
    ),
    Bug(
        "numba_record_without_pieces",
        "roost.numba_kernels.program",
        "        if num_pieces > 0:",
        "        if num_pieces >= 0:",
        "a record without pieces is handed out, and nobody ever finishes it",
        test=_ALONE
        + "test_a_program_is_handed_out_from_its_first_record_with_pieces_on_and_those_who_sleep_are_counted",
    ),
    Bug(
        "numba_sleeper_not_counted",
        "roost.numba_kernels.program",
        "    for member in range(1, size):",
        "    for member in range(1, size - 1):",
        "the last member sleeps on while the others work",
        test=_ALONE
        + "test_a_program_is_handed_out_from_its_first_record_with_pieces_on_and_those_who_sleep_are_counted",
    ),
)
