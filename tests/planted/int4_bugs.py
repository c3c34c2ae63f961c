"""Planted bugs in 4-bit weights and GGUF blocks: orders, zero points, groups, and the counters of split products."""

from tests.planted.bug import Bug

_FORMATS = "tests/unit/weights/test_int4_formats.py::"
_READ = _FORMATS + "test_a_projection_is_read_exactly"
_KERNEL = "tests/kernels/test_grouped_linear.py::"

INT4_BUGS = (
    Bug(
        "awq_in_order",
        "roost.weights.int4_formats",
        "_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the field of a word that holds each of eight neighbouring outputs",
        "_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)",
        "AWQ's order is taken for its inverse, and outputs change places",
        _READ + "[awq]",
    ),
    Bug(
        "gptq_zero_less_one",
        "roost.weights.int4_formats",
        "        zeros = (zeros + 1) & (2 * _MIDDLE - 1)",
        "        zeros = zeros + 0",
        "GPTQ's zero points stay one less than they are",
        _READ + "[gptq]",
    ),
    Bug(
        "act_order_ignored",
        "roost.weights.int4_formats",
        "    if not torch.equal(group_of.to(torch.int64), expected):",
        "    if group_of.shape != expected.shape:",
        "a checkpoint ordered by activation is read with the scales of other inputs",
        _FORMATS + "test_tensors_that_do_not_fit_are_refused[gptq-changed4-its g_idx puts inputs .* into one group "
        ".act-order., not]",
    ),
    Bug(
        "groups_twice_as_long",
        "roost.kernels.grouped_linear",
        "            GROUP_LEN=matrix.group_len,",
        "            GROUP_LEN=2 * matrix.group_len,",
        "every second group is multiplied by the scale of the one before",
        _KERNEL + "test_a_projection_equals_the_reference[72-320-32-zeros-3]",
    ),
    Bug(
        "padded_inputs_read",
        "roost.kernels.grouped_linear",
        "            IS_EVEN=matrix.in_len % matrix.block_len == 0,",
        "            IS_EVEN=True,",
        "what lies behind a token's row is multiplied with the padding of the last block",
        _KERNEL + "test_a_projection_equals_the_reference[72-320-32-zeros-3]",
    ),
    Bug(
        "blocks_unpermuted",
        "roost.weights.gguf",
        "            rows = self._in_halves(rows, name)",
        "            rows = rows + 0",
        "queries and keys kept as blocks are in GGUF's order, and rotate with the wrong partners",
        "tests/parity/test_gguf_files.py::test_blocks_are_the_floats_they_stand_for_with_their_rows_in_order[3]",
    ),
    Bug(
        "zeros_of_a_stack",
        "roost.layers.grouped",
        "        zeros=torch.cat([_zeros(each) for each in matrices]) if has_zeros else None,",
        "        zeros=None,",
        "queries, keys and values in one matrix lose their zero points",
        "tests/unit/layers/test_int4.py::test_a_stack_is_its_parts_one_below_the_other",
    ),
)
