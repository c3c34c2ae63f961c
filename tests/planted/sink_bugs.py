"""Planted bugs in what gpt-oss brought: attention sinks in every backend, YaRN, biases of experts, MXFP4."""

from tests.planted.bug import Bug

_NUMBA = "        store_float(line + width + 4, total * first_of(fade) + first_of(weight))"
_LOW_FIRST = "[(_NUMBERS[byte & 15], _NUMBERS[byte >> 4]) for byte in range(256)]"

SINK_BUGS = (
    Bug(
        "torch_reads_sinks",
        "roost.layers.attention",
        "        odds = torch.from_numpy(np.exp((sinks - level).contiguous().numpy()))",
        "        odds = torch.zeros_like(level)",
        "sinks weigh nothing",
        test="tests/parity/test_attention.py::"
        "test_a_sink_joins_the_sum_of_weights_in_chunks_rounds_and_trees_and_keeps_their_bits",
    ),
    Bug(
        "triton_reads_sinks_once",
        "roost.kernels.attention",
        "        if num_splits == 1:",
        "        if num_splits >= 1:",
        "a sink is counted in every split, and once more where they are merged",
        test="tests/kernels/test_attention.py::test_a_sink_joins_the_sum_of_weights_once[window-5]",
    ),
    Bug(
        "numba_reads_sinks",
        "roost.numba_kernels.attention",
        _NUMBA,
        _NUMBA.replace(" + first_of(weight)", ""),
        "sinks weigh nothing",
        test="tests/numba_kernels/test_kernels_alone.py::test_a_sink_joins_the_sum_of_weights",
    ),
    Bug(
        "yarn_makes_products_longer",
        "roost.models.decoder_layers",
        "        return heads if kind.rope.rotated_len else replace(heads, scale=heads.scale * kind.rope.length**2)",
        "        return heads",
        "queries and keys are as long as without YaRN",
        test="tests/parity/test_families.py::test_logits_in_one_pass_equal_transformers[gpt-oss]",
    ),
    Bug(
        "experts_add_their_own_bias",
        "roost.kernels.experts",
        "        total += tl.load(bias + expert * HIDDEN + row, mask=row < HIDDEN, other=0.0).to(tl.float32)",
        "        total += tl.load(bias + row, mask=row < HIDDEN, other=0.0).to(tl.float32)",
        "every expert adds the bias of the first one",
        test="tests/kernels/test_experts.py::"
        "test_experts_with_biases_and_a_clamped_gate_say_what_the_reference_says[1-8-4-48-24-dtype0]",
    ),
    Bug(
        "mxfp4_has_its_first_number_in_the_low_bits",
        "roost.weights.mxfp4",
        f"    pairs = torch.tensor({_LOW_FIRST}, dtype=torch.bfloat16)",
        f"    pairs = torch.tensor({_LOW_FIRST}, dtype=torch.bfloat16).flip(1)",
        "neighbours of an expert's weights change places",
        test="tests/parity/test_mxfp4_checkpoints.py::test_any_block_is_dequantised_as_transformers_does",
    ),
)
