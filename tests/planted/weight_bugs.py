"""Planted bugs of quantised weights: scales that belong to others, and what a checkpoint leaves in floats."""

from tests.planted.bug import Bug

_FP8 = "roost.layers.fp8"
_FORMATS = "roost.weights.fp8_formats"
_FOLDER = "roost.weights.quantised_folder"
_LOGITS = "tests/parity/test_fp8_checkpoints.py::test_a_checkpoint_gives_the_logits_of_the_floats_that_it_stands_for"
_STACK = "tests/unit/layers/test_fp8.py::test_a_stack_is_its_parts_one_below_the_other"
_REFUSED = "tests/unit/weights/test_quantised_folder.py::test_what_does_not_fit_is_refused_by_its_name"

WEIGHT_BUGS = (
    Bug(
        "scales_of_their_own_outputs",
        _FP8,
        "            scales=torch.cat([each.scales for each in weights]),",
        "            scales=torch.cat([each.scales for each in weights[::-1]]),",
        "in a stack of queries, keys and values the queries are scaled by the values' scales",
        test=_STACK,
    ),
    Bug(
        "blocks_do_not_straddle",
        _FP8,
        "        if any(each.block[0] != rows or each.shape[0] % rows for each in weights):",
        "        if any(each.block[0] != rows for each in weights):",
        "keys that end inside of a block of scales push those of the values out of place",
        test=_STACK + "[block1]",
    ),
    Bug(
        "scale_inv_is_a_factor",
        _FORMATS,
        '    values, scales = parts["weight"], parts[found[0]].to(torch.float32)',
        '    values, scales = parts["weight"], parts[found[0]].to(torch.float32) ** (-1 if "inv" in found[0] else 1)',
        "weight_scale_inv is divided by, as its name says, although checkpoints multiply by it",
        test=_LOGITS + "[deepseek]",
    ),
    Bug(
        "scale_of_a_tensor_is_every_outputs",
        _FORMATS,
        "    return scales.reshape(-1, 1).expand(out_len, 1).contiguous()",
        "    return torch.nn.functional.pad(scales.reshape(-1, 1), (0, 0, 0, out_len - scales.numel()), value=1.0)",
        "only the first output of a matrix gets the matrix's scale",
        test=_LOGITS + "[autofp8]",
    ),
    Bug(
        "floats_stay_floats",
        "roost.layers.linear",
        '    return weights if _form(weights).quantise is None else "bf16"',
        "    return weights",
        "what a quantised checkpoint leaves in floats, such as its head, is quantised at load",
        test="tests/unit/layers/test_fp8.py::test_what_a_checkpoint_leaves_in_floats_is_not_quantised[fp8-bf16]",
    ),
    Bug(
        "listed_modules_are_left_out",
        _FOLDER,
        "            if self._quantisation.covers(module) and not is_left_out:",
        "            if not is_left_out:",
        "a projection that the config lists as left out is refused for its missing scales",
        test=_LOGITS + "[fbgemm]",
    ),
    Bug(
        "missing_scales_are_refused",
        _FOLDER,
        "            if self._quantisation.covers(module) and not is_left_out:",
        "            if self._quantisation.ignores(module):",
        "FP8 values without scales are taken for the weights",
        test=_REFUSED,
    ),
    Bug(
        "quantised_and_left_out",
        _FOLDER,
        "            if quantisation.ignores(module):",
        "            if quantisation.ignores(module) and not module:",
        "a checkpoint whose config contradicts its tensors is read as if it did not",
        test=_REFUSED,
    ),
    Bug(
        "parts_are_read_by_their_types",
        _FOLDER,
        "        return (*FLOATS, *self._packing.parts.get(_part(name), ()))",
        '        return (*FLOATS, "F8_E4M3", "I32")',
        "any tensor of a quantised checkpoint may be of a type that is no weight's",
        test="tests/unit/weights/test_quantised_folder.py::"
        "test_types_that_only_quantised_tensors_may_have_are_refused_elsewhere",
    ),
    Bug(
        "rows_of_a_block_share_a_scale",
        "roost.kernels.fp8_linear",
        "            SCALE_ROWS=weight.block[0],",
        "            SCALE_ROWS=2 * weight.block[0],",
        "on a GPU, outputs are scaled by the scales of those before them",
        test="tests/kernels/test_fp8_linear.py::test_products_with_scales_by_block",
    ),
    Bug(
        "kept_forms_are_the_checkpoints",
        "roost.startup",
        "        return found if found in kept else best",
        "        return best",
        "an FP8 checkpoint is dequantised on a device that computes with FP8",
        test="tests/unit/test_choose_weights.py::test_the_form_of_weights",
    ),
)
