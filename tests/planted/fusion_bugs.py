"""Planted bugs of projections that are fused with their neighbours."""

from tests.planted.bug import Bug

_KERNEL_OPS = "roost.kernels.ops"
_STREAM = "tests/kernels/test_ops.py::"

FUSION_BUGS = (
    Bug(
        "sum_before_the_norm",
        _KERNEL_OPS,
        "    if plain is not None and stream.added is None:",
        "    if plain is not None:",
        "what a projection left to be added is lost where the next one is fused with its norm",
        test=_STREAM + "test_a_stream_equals_the_reference[True-1-plain]",
    ),
    Bug(
        "norm_half_done_for_another_weight",
        _KERNEL_OPS,
        "        if isinstance(tiling, BlockTiling) and scaled is not None and scaled.weight is weight:",
        "        if isinstance(tiling, BlockTiling) and scaled is not None:",
        "a norm takes rows that were multiplied by the weight of another",
        test=_STREAM + "test_a_norm_that_was_half_done_for_another_weight_is_done_anew",
    ),
    Bug(
        "next_norm_of_the_next_layer",
        "roost.models.decoder",
        "            kv, next_norm = kv_numbers[number], norms[number + 1]",
        "            kv, next_norm = kv_numbers[number], norms[number]",
        "a layer prepares the stream for its own norm, and the next one norms it in a kernel of its own",
        test="tests/kernels/test_fused_decoder.py::test_no_norm_between_projections_is_a_kernel_of_its_own[3-norms1]",
    ),
)
