"""Planted bugs in layers that are not attention: short convolutions, mixtures of experts, and how they are read."""

from tests.planted.bug import Bug

_CONVOLUTION, _PASSES, _KV = "roost.layers.convolution", "roost.forward.passes", "roost.models.model"
_GGUF = "roost.weights.gguf"
_FILES = "tests/parity/test_gguf_architectures.py::test_a_file_gives_the_logits_of_its_weights"
_EXPERTS, _ROUTED = "roost.layers.experts", "tests/parity/test_experts.py::"
_MATRIX = "tests/parity/test_spec_matrix.py::test_output_is_that_of_plain_decoding_and_the_pool_is_as_before"
_TURNS = "tests/parity/test_session_matrix.py::test_in_each_named_engine_turns_inherit_what_was_predicted"
_OVERSHOOT = (
    "tests/parity/test_session_matrix.py::test_rounds_that_overshoot_beside_a_window_leave_what_was_returned"
    "[convolutions-tree1-1-whole]"
)

LAYER_BUGS = (
    Bug(
        "nothing_before_the_first_token",
        _CONVOLUTION,
        "    return buffer[slots.clamp(min=0)].masked_fill((slots == NOTHING_THERE)[..., None], 0.0)",
        "    return buffer[slots.clamp(min=0)]",
        "a text's first tokens read what somebody left in the null page",
        test=_TURNS + "[convolutions]",
    ),
    Bug(
        "a_node_follows_its_parent",
        _PASSES,
        "            node = self.trees.parents[tree, node].clamp(min=0)",
        "            node = (node - 1).clamp(min=0)",
        "a node of a tree is convolved with the node before it, which may be another branch's",
        test=_OVERSHOOT,
    ),
    Bug(
        "a_tree_goes_on_from_its_text",
        _PASSES,
        "        in_tree = self.roots + torch.where(depth >= back, node, depth - back)",
        "        in_tree = self.roots + node",
        "the first nodes of a tree are convolved with the root again, not with the text in front of it",
        test=_OVERSHOOT,
    ),
    Bug(
        "inputs_of_accepted_nodes_move",
        _PASSES,
        "                cache.copy(*slots)",
        "                pass",
        "what convolutions read of an accepted path stays where its branch was",
        test=_OVERSHOOT,
    ),
    Bug(
        "inputs_are_kept_as_they_were_computed",
        _KV,
        "        return replace(self, dtype=KEPT_DTYPES.get(kv_cache_dtype, self.dtype)) if self.has_values else self",
        "        return replace(self, dtype=KEPT_DTYPES.get(kv_cache_dtype, self.dtype))",
        "--kv-cache-dtype cuts off what convolutions read",
        test="tests/parity/test_spec_matrix.py::test_with_quantised_kv_output_is_that_of_one_prefill_after_the_other"
        "[eagle3-tree-1-4-lfm2-biased-mixed-int8]",
    ),
    Bug(
        "experts_are_summed_by_their_shares",
        _EXPERTS,
        "    weighted = said * shares[:, :, None]",
        "    weighted = said / shares.shape[1]",
        "the experts of a token count alike",
        test="tests/parity/test_families.py::test_logits_in_one_pass_equal_transformers[qwen3-moe]",
    ),
    Bug(
        "shares_are_normed_where_asked_for",
        _EXPERTS,
        "    if is_normed:",
        "    if not is_normed:",
        "the shares of experts sum up to one where they should not",
        test=_ROUTED + "test_the_best_of_equal_scores_are_the_first_ones_and_shares_are_normed_where_that_is_asked_for",
    ),
    Bug(
        "norms_lose_what_was_added",
        _GGUF,
        '        return values - self._architecture.norm_offset if name.endswith("norm.weight") else values',
        "        return values",
        "norms of a GGUF file are one larger than the model's",
        test=_FILES + "[gemma3-0]",
    ),
    Bug(
        "each_expert_has_its_part",
        _GGUF,
        "    return tensor.data if part is None else tensor.data[part]",
        "    return tensor.data if part is None else tensor.data[0]",
        "all experts of a GGUF file are the first one",
        test=_FILES + "[qwen3moe-0]",
    ),
)
