"""Planted bugs in quantised KV: scales that are another slot's, another tensor's, left behind or left over."""

from tests.planted.bug import Bug

_KERNELS = "tests/kernels/test_quantised_kv.py::"
_SAME = "tests/parity/test_spec_matrix.py::test_with_quantised_kv_output_is_that_of_one_prefill_after_the_other"
_PATH = "tests/parity/test_spec_trees.py::test_the_scales_of_quantised_kv_follow_an_accepted_path[llama-int8]"
_TORCH = "roost.attention.torch_backend"
_ATTENTION = "roost.kernels.attention"
_ROTARY = "roost.kernels.rotary"
_SCORE = '        score = scaled(tl.dot(q, tl.trans(key), input_precision="ieee"), scales, slot, is_live)'
_WEIGHT = (
    "        weight, fade, peak, total = _weigh(score, peak, total, scale, scales, num_slots + slot, is_live, True)"
)

KV_TYPE_BUGS = (
    Bug(
        "scale_of_another_slot",
        _TORCH,
        "            cache.scales[layer, :, 0, slots] = key_scales.t()",
        "            cache.scales[layer, :, 0, slots.roll(1)] = key_scales.t()",
        "a key is read with the scale of the token written beside it",
        test=_SAME + "[plain-1-1-gemma3-untied-mixed-int8]",
    ),
    Bug(
        "scales_left_behind",
        "roost.attention.kv_cache",
        "            self.scales[..., dests.flatten()] = self.scales[..., sources.flatten()]",
        "            self.scales[..., dests.flatten()] = self.scales[..., dests.flatten()]",
        "an accepted path comes to the front without its scales",
        test=_PATH,
    ),
    Bug(
        "values_with_the_keys_scales",
        "roost.layers.attention",
        "    kept = (keys, key_scales), (values, value_scales)",
        "    kept = (keys, key_scales), (values, key_scales)",
        "values are read with the scales of the keys",
        test="tests/parity/test_attention.py::test_quantised_keys_and_values_are_read_with_their_own_scales",
    ),
    Bug(
        "kernel_scale_of_another_slot",
        _ATTENTION,
        _SCORE,
        _SCORE.replace("slot,", "place,"),
        "the kernel takes a key's position for its slot when it looks for the scale",
        test=_KERNELS + "test_branches_read_quantised_keys_and_values",
    ),
    Bug(
        "kernel_values_with_the_keys_scales",
        _ATTENTION,
        _WEIGHT,
        _WEIGHT.replace("num_slots + slot", "slot"),
        "the kernel multiplies values by the scales of the keys",
        test=_KERNELS + "test_branches_read_quantised_keys_and_values",
    ),
    Bug(
        "kernel_scales_left_behind",
        "roost.kernels.copy",
        "    if scales is not None and tl.program_id(1) == 0:",
        "    if scales is not None and tl.program_id(1) < 0:",
        "the kernel copies slots without their scales",
        test=_KERNELS + "test_scales_go_where_their_slots_go",
    ),
    Bug(
        "kernel_scale_of_zeros_left_over",
        _ROTARY,
        "        tl.store(scales + scale_cells, scale, mask=tl.max(is_cell.to(tl.int32), 1) > 0)",
        "        tl.store(scales + scale_cells, scale, mask=(tl.max(is_cell.to(tl.int32), 1) > 0) & is_coded)",
        "a vector of zeros leaves the scale that its slot had before, which may be none",
        test=_KERNELS + "test_vectors_without_a_size_and_those_that_are_no_numbers_leave_scales_that_say_so",
    ),
    Bug(
        "kernel_ties_away_from_even",
        _ROTARY,
        "    shift = step * 12582912.0  # 1.5 * 2^23: where numbers of float32 are a step apart",
        "    shift = step * 6291456.0",
        "codes are rounded to halves of a step, and then cut off",
        test=_KERNELS + "test_each_slot_gets_the_codes_and_scales_of_its_own_heads",
    ),
)
