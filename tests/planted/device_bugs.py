"""Planted bugs in the device's side of speculation: drafting, verifying, accepting, and what passes between rounds."""

from tests.planted.bug import Bug

_DRAFTING = "tests/parity/test_drafting.py::"
_DENSE = _DRAFTING + "test_draft_logits_of_every_branch_and_step_equal_dense_ones"
_TREES = "tests/parity/test_spec_trees.py::"
_SECOND = _TREES + "test_a_path_that_is_not_the_first_is_accepted_with_its_kv_in_every_pool"
_LENGTHS = "tests/parity/test_spec_lengths.py::"
_OUTPUT = "tests/parity/test_spec_output.py::"
_WIDTHS = _LENGTHS + "test_07_widths_that_all_differ_are_never_confused[4-3-9]"
_COUNTS = _LENGTHS + "test_09_lengths_are_taken_from_the_device_exactly_when_a_step_speculates"
_REWINDS = _LENGTHS + "test_14_rounds_that_stop_at_any_offset_in_a_page_rewind_the_draft[chain]"
_REWINDS_TREES = _REWINDS.replace("[chain]", "[tree]")
_OPTIONS = _OUTPUT + "test_29_options_and_logprobs_are_exact_in_every_round"
_CHUNKS = _OUTPUT + "test_31_draft_kv_after_a_chunked_prefill_is_that_after_a_whole_one[3-eagle]"
_BY_ROW = (
    "tests/unit/drafters/test_tree.py::test_trees_that_are_kept_by_row_are_found_by_row_with_no_node_past_their_width"
)
_BITS = (
    "tests/parity/test_graphs.py::test_every_step_that_is_replayed_tells_and_keeps_what_the_eager_one_does_bit_for_bit"
)
_GRAPHS = "tests/parity/test_graphs.py::test_chunks_are_replayed_too_final_or_not_alone_and_beside_rounds"

_LOOKED_UP = "tests/unit/drafters/test_lookup.py::"
_FOUND = "tests/unit/layers/test_lookup.py::"

_EAGLE = "roost.drafters.eagle"
_LOOKUP = "roost.drafters.lookup"
_RUNNER = "roost.runner.runner"
_PASSES = "roost.forward.passes"
_BATCH = "roost.forward.layout"
_MIXED = "roost.graphs.mixed"
_ATTENTION = "roost.layers.attention"
_EXTEND = "            self.drafter.extend(self._pairs(layout, target, accepted))"
_SOURCES = "            sources = sources + accepted.nodes.flatten()[cells]"
_MOVES = "                self._attention.copy(self.kv_cache, *branches.moves(branch, step + 1))"

DEVICE_BUGS = (
    # --- drafting ---
    Bug(
        "branches_move_with_the_beam",
        _EAGLE,
        _MOVES,
        _MOVES.replace("branch,", "torch.arange(topk).expand_as(branch),"),
        "a path that changes its branch reads the drafts of another path",
        test=_DENSE + "[eagle-tree-4-9]",
    ),
    Bug(
        "branches_move_whole",
        _EAGLE,
        _MOVES,
        _MOVES.replace("step + 1", "step"),
        "a path that changes its branch leaves its last slot behind",
        test=_DENSE + "[eagle-tree-4-9]",
    ),
    Bug(
        "hidden_moves_with_the_beam",
        _EAGLE,
        "                hidden = hidden.gather(1, branch[:, :, None].expand_as(hidden))",
        "                hidden = hidden.clone()",
        "a path that changes its branch goes on from another path's hidden state",
        test=_DENSE + "[eagle-tree-4-9]",
    ),
    Bug(
        "draft_positions_by_depth",
        _EAGLE,
        "        positions = (branches.rounds.start_positions + step)[:, None].expand_as(tokens)",
        "        positions = branches.rounds.start_positions[:, None].expand_as(tokens)",
        "every draft step is turned as if it were the first",
        test=_WIDTHS,
    ),
    Bug(
        "branches_do_not_see_each_other",
        _ATTENTION,
        "    seen = (branch < 0)[:, None] | (branch[:, None] == torch.arange(topk, device=device)[None, :, None])",
        "    seen = (branch < topk)[:, None].expand(-1, topk, -1)",
        "a draft branch reads the drafts of the others",
        test=_WIDTHS,
    ),
    Bug(
        "offsets_of_a_reduced_vocabulary",
        _EAGLE,
        "        return self._token_ids[ids].view(shape), scores.view(shape)",
        "        return ids.view(shape), scores.view(shape)",
        "30: a head's own ids are taken for the target's",
        test=_DENSE + "[eagle3-tree-4-9]",
    ),
    Bug(
        "drafts_follow_width",
        _EAGLE,
        "        return self._shape.head_steps_of(width)",
        "        return self._shape.steps",
        "a narrow round drafts as much as the widest",
        test="tests/parity/test_spec_auto.py::test_a_round_runs_no_more_draft_passes_than_it_has_drafts",
    ),
    # --- draft-extend ---
    Bug(
        "extend_after_rounds",
        _PASSES,
        _EXTEND,
        _EXTEND.replace("self", "len(layout.drafting) or self", 1),
        "the drafter does not take over what rounds accepted",
        test=_REWINDS_TREES,
    ),
    Bug(
        "extend_after_prefill",
        _PASSES,
        _EXTEND,
        _EXTEND.replace("self", "layout.is_prefill.any() or self", 1),
        "the drafter does not take over prompts",
        test=_CHUNKS,
    ),
    Bug(
        "pairs_of_a_chunk_that_is_not_final",
        _BATCH,
        "    after[plan.token_offsets[1:][plan.is_prefill] - 1] = plan.next_tokens[plan.is_prefill]",
        "    after[plan.token_offsets[1:][plan.is_prefill] - 1] = 0",
        "31: the last pair of a chunk does not hold the prompt's next token",
        test=_CHUNKS,
    ),
    Bug(
        "sources_of_rounds",
        _PASSES,
        _SOURCES,
        _SOURCES.replace("accepted.nodes", "(accepted.nodes - 1).clamp(min=0)"),
        "a pair has the hidden state of the node before",
        test=_TREES + "test_draft_kv_after_rounds_is_that_of_the_text[eagle]",
    ),
    Bug(
        "sources_of_chunks",
        _BATCH,
        '            "pair_sources": self.offsets[segment] + np.where(is_chunk, index, 0),',
        '            "pair_sources": self.offsets[segment],',
        "every pair of a chunk has the hidden state of its first token",
        test=_DENSE + "[eagle-chain-4-9]",
    ),
    Bug(
        "head_goes_on_from_the_accepted_path",
        _PASSES,
        '            last_pairs=layout["accept_firsts"] + accepted.lens - 1,',
        '            last_pairs=layout["accept_firsts"],',
        "the next drafts go on from the root of the last round",
        test=_REWINDS_TREES,
    ),
    # --- verify ---
    Bug(
        "positions_by_depth",
        _PASSES,
        '            tokens, positions = trees.tokens.flatten()[layout["node_cells"]], node_positions',
        '            tokens, positions = trees.tokens.flatten()[layout["node_cells"]], places',
        "nodes are turned by their number, not by their depth",
        test=_SECOND + "[llama-eagle]",
    ),
    Bug(
        "nodes_see_their_ancestors",
        "roost.drafters.tree",
        "        sees = sees | sees.gather(1, above[:, :, None].expand(-1, -1, width))",
        "        sees = sees | torch.zeros_like(sees)",
        "a node sees itself alone",
        test="tests/unit/drafters/test_tree.py::test_the_best_candidates_are_nodes_and_come_after_their_parents",
    ),
    Bug(
        "nodes_see_no_siblings",
        _ATTENTION,
        "    paths = torch.where(mask, depths[:, None], width).argsort(dim=-1, stable=True)  # nodes from the root on",
        "    paths = torch.arange(width).expand_as(mask)",
        "a node sees the nodes that lie beside its own path",
        test=_SECOND + "[llama-eagle]",
    ),
    Bug(
        "window_by_position",
        _ATTENTION,
        "        mask=_mask(_seen(at, positions, window)).flatten(0, 1)[:, None, None],",
        "        mask=_mask(_seen(at, starts + width - 1, window)).expand(-1, width, -1).flatten(0, 1)[:, None, None],",
        "a node's window ends where the tree does, not at its position",
        test="tests/parity/test_attention.py::test_a_node_of_a_tree_reads_its_ancestors_and_what_is_before_the_tree",
    ),
    Bug(
        "keys_in_blocks_that_agree",
        "roost.layers.batch_invariance",
        "        return blocks * KEY_BLOCK + next(tail for tail in (0, *self.tails) if tail >= rest)",
        "        return blocks * KEY_BLOCK + -(-rest // KEY_STEP) * KEY_STEP",
        "keys are padded to shapes that sum in another order",
        test="tests/parity/test_one_order.py::test_a_token_in_a_chain_is_the_token_alone[(64, None)-2]",
    ),
    Bug(
        "blocks_begin_alike",
        _ATTENTION,
        "    return first_read(start, window) // KEY_BLOCK * KEY_BLOCK",
        "    return first_read(start, window)",
        "with a window, blocks of keys begin where a pass does",
        test="tests/parity/test_one_order.py::test_blocks_of_keys_begin_at_the_same_positions_for_everybody",
    ),
    Bug(
        "queries_in_rows_that_agree",
        _ATTENTION,
        "    missing = padded_rows(rows.shape[-2], multiple) - rows.shape[-2]",
        "    missing = 0",
        "one query is summed by another kernel than several",
        test="tests/parity/test_one_order.py::test_a_token_in_a_chunk_of_any_cut_is_the_token_alone[(64, None)]",
    ),
    Bug(
        "projections_in_rows_that_agree",
        "roost.layers.linear",
        "    missing = padded_rows(len(hidden), multiple) - len(hidden)",
        "    missing = 0",
        "in fp32 a token alone is projected by another kernel than beside others",
        test="tests/parity/test_one_order.py::test_a_projection_in_fp32_gives_a_token_the_same_bits_beside_any_number_of_others[1]",
    ),
    Bug(
        "narrow_rounds_are_cut",
        _PASSES,
        '        at, drafted = layout["drafting"], proposed.cut(layout["draft_widths"])',
        '        at, drafted = layout["drafting"], proposed',
        "nodes that a round does not verify are accepted",
        test=_TREES + "test_a_round_narrower_than_its_tree_accepts_no_node_it_did_not_verify",
    ),
    # --- accept ---
    Bug(
        "accepted_kv_moves",
        _PASSES,
        "        if layout.shape.topk > 1 and trees.width > 1:",
        "        if layout.shape.topk > 1 and trees.width == 1:",
        "the accepted path's KV stays where its nodes were",
        test=_SECOND + "[llama-eagle]",
    ),
    Bug(
        "accepted_kv_moves_in_every_book",
        _PASSES,
        "        for cache in self.kv_caches:  # of every book",
        "        for cache in self.kv_caches[:1]:",
        "11: the accepted path's KV moves in the full book alone",
        test=_SECOND + "[qwen2-window-eagle]",
    ),
    Bug(
        "path_stays_at_its_last_node",
        "roost.drafters.accept",
        "        node = torch.where(goes_on, is_child.to(torch.int8).argmax(dim=1), node)",
        "        node = is_child.to(torch.int8).argmax(dim=1)",
        "a path that ends goes back to the root",
        test="tests/unit/drafters/test_accept.py",
    ),
    Bug(
        "path_follows_children",
        "roost.drafters.accept",
        "        is_child = (trees.parents == node[:, None]) & (trees.tokens == wanted) & (number > 0)",
        "        is_child = (trees.tokens == wanted) & (number > 0)",
        "a token of another path is accepted",
        test="tests/unit/drafters/test_accept.py",
    ),
    Bug(
        "bonus_is_drawn_at_the_last_node",
        "roost.drafters.accept",
        "        tokens.append(targets.gather(1, node[:, None]).squeeze(1).masked_fill(~goes_on, NOTHING))",
        "        tokens.append(wanted.squeeze(1).masked_fill(~goes_on, NOTHING))",
        "1: every accepted token comes twice, and the bonus never",
        test="tests/unit/drafters/test_accept.py",
    ),
    Bug(
        "bonus_is_the_next_root",
        _PASSES,
        "        self.last_tokens[target.rows] = accepted.tokens.gather(1, accepted.lens[:, None] - 1).squeeze(1)",
        "        self.last_tokens[target.rows] = accepted.tokens[:, 0]",
        "1: the next round starts from the round's first token, not from its bonus",
        test=_WIDTHS,
    ),
    Bug(
        "lengths_advance_by_what_was_accepted",
        _PASSES,
        '        lengths[layout["sampling"]] = target.root_positions + accepted.lens',
        '        lengths[layout["sampling"]] = target.root_positions + 1',
        "9: the row's length on the device grows by one, whatever was accepted",
        test=_WIDTHS,
    ),
    Bug(
        "host_lengths_of_what_was_accepted",
        _PASSES,
        '        result[layout["sampling"], 0] = accepted.lens',
        '        result[layout["sampling"], 0] = accepted.lens.clamp(max=1)',
        "9: the host is told of fewer tokens than the device has moved on by",
        test=_WIDTHS,
    ),
    # --- sampling and log-probabilities ---
    Bug(
        "penalties_along_the_path",
        _RUNNER,
        '            paths = target.trees.path_tokens.flatten(0, 1)[of["node_cells"][nodes]]',
        "            paths = None",
        "29: a node's penalties do not count the drafts before it",
        test=_OPTIONS + "[rivals]",
    ),
    Bug(
        "noted_tokens_are_all_accepted",
        _RUNNER,
        "            self._sampler.note(target.rows[:, None].expand_as(tokens).flatten(), tokens.flatten())",
        "            self._sampler.note(target.rows, tokens[:, 0])",
        "29: penalties count one token of each round",
        test=_OPTIONS + "[rivals]",
    ),
    Bug(
        "draws_by_position",
        _RUNNER,
        "        drawn_at = target.positions + 1  # a token is drawn for the position after its node",
        "        drawn_at = (target.positions[:1] + 1).expand_as(target.positions)",
        "29: every node of a round draws with the same random number",
        test=_OPTIONS + "[warm]",
    ),
    Bug(
        "logprobs_at_the_accepted_nodes",
        _RUNNER,
        "            at = (offsets[:, None] + accepted.nodes)[index].flatten()",
        "            at = (offsets[:, None] + 0 * accepted.nodes)[index].flatten()",
        "29: every token of a round is scored at its root",
        test=_OPTIONS + "[bias]",
    ),
    Bug(
        "chains_end_at_the_first_that_is_wrong",
        "roost.layers.rounds",
        "    return is_right.to(torch.int64).cumprod(dim=1).sum(dim=1) + 1",
        "    return is_right.to(torch.int64).sum(dim=1) + 1",
        "drafts behind a wrong one are kept",
        test="tests/unit/drafters/test_accept.py",
    ),
    # --- captured chunks and rounds ---
    Bug(
        "a_graphs_layout_is_taken_anew",
        _MIXED,
        "            layout.take(sent)",
        "            layout.is_sent or layout.take(sent)",
        "a graph of chunks and rounds has the segments of the step that it was captured with",
        test=_GRAPHS + "[plain]",
    ),
    Bug(
        "columns_are_padded_anew",
        _MIXED,
        "            self._packed[first + len(column) : first + number] = padding",
        "            pass",
        "a step finds what a larger one before it left in the graph's columns",
        test="tests/unit/graphs/test_mixed.py::test_a_step_finds_nothing_of_the_one_before_it",
    ),
    Bug(
        "padding_samples_as_the_padding_row",
        _MIXED,
        '            "sampling": (num_rows, last),',
        '            "sampling": (num_rows, 0),',
        "what a step leaves empty samples, and is accepted, in the place of its first row",
        test=_BITS + "[plain-gemma3-untied]",
    ),
    Bug(
        "padding_tokens_are_the_padding_rows",
        _MIXED,
        '            "token_segment": (num_tokens, last),',
        '            "token_segment": (num_tokens, 0),',
        "tokens that pad a step are written over the KV of its first row",
        test=_BITS + "[plain-gemma3-untied]",
    ),
    Bug(
        "a_token_is_the_hosts_or_a_node",
        _BATCH,
        '            self.columns["token_cells"] = np.where(self.is_prefill[segment], -1, cells)',
        '            self.columns["token_cells"] = np.where(self.is_prefill[segment], -1, cells - index)',
        "beside chunks, every node of a round is its root",
        test="tests/unit/graphs/test_mixed.py::test_every_token_is_the_hosts_or_a_node_of_a_round",
    ),
    Bug(
        "chunks_start_where_the_host_says",
        _PASSES,
        '            starts = torch.where(layout["chunk_starts"] < 0, starts, layout["chunk_starts"])',
        '            starts = torch.where(layout["chunk_starts"] < 0, starts, starts)',
        "a chunk starts at the length that its row had on the device before",
        test="tests/unit/forward/test_passes.py::"
        "test_a_chunk_starts_where_the_host_says_whatever_length_its_row_had_before",
    ),
    Bug(
        "drawn_tokens_have_their_cells",
        _RUNNER,
        '            cells = graph.layout["node_cells"][:num_nodes]',
        "            cells = slice(num_nodes)",
        "beside chunks, tokens are accepted as if they were drawn at other nodes",
        test=_BITS + "[eagle3-chain-llama]",
    ),
    Bug(
        "logits_are_the_nodes",
        _MIXED,
        "        return self._passes.model.logits(target.hidden[target.node_tokens[:size]])[:num_nodes]",
        "        return self._passes.model.logits(target.hidden[:size])[:num_nodes]",
        "beside chunks, logits are those of the first tokens of the batch",
        test=_GRAPHS + "[plain]",
    ),
    Bug(
        "rounds_beside_chunks_are_drafted_for",
        _RUNNER,
        "        rounds.replay_drafts()",
        "        pass",
        "rounds beside chunks verify the drafts of the round before, again",
        test=_BITS + "[target-tree-gemma3-untied]",
    ),
    Bug(
        "drafts_by_row_are_of_the_steps_rows",
        _RUNNER,
        "        self.round_graphs.load(rounds, rows, width)",
        "        pass",
        "beside chunks, drafts are made for rows of an earlier step",
        test=_BITS + "[eagle3-chain-llama]",
    ),
    Bug(
        "trees_by_row_are_cut",
        "roost.drafters.tree",
        "            return chains(tokens).cut(widths)",
        "            return chains(tokens)",
        "a chunk's last token has the drafts of whoever had its row before",
        test=_BY_ROW + "[1]",
    ),
    Bug(
        "trees_by_row_have_their_roots",
        "roost.drafters.tree",
        "        tokens[:, 0] = roots",
        "        tokens[:, 1:1] = 0",
        "beside chunks, a round without drafts goes on from nothing",
        test=_BY_ROW + "[3]",
    ),
    Bug(
        "steps_that_no_graph_holds_are_drafted_for",
        _RUNNER,
        "            if mixed is None or not self._draft(plan, starts):",
        "            if mixed is None:",
        "rounds beside chunks are replayed without drafts",
        test=_BITS + "[target-tree-gemma3-untied]",
    ),
    Bug(
        "logprobs_are_made_in_pieces",
        "roost.sampling.logprobs",
        "    return _whole([log_probabilities(logits[at[part]], tokens[part], num_top) for part in _parts(len(at))])",
        "    return log_probabilities(logits[at], tokens, num_top)",
        "log-probabilities of many rows take memory that nobody counted",
        test="tests/unit/sampling/test_prompt_logprobs.py",
    ),
    # --- lookup ---
    Bug(
        "history_is_extended",
        _LOOKUP,
        "        self._texts.tokens[pairs.rows, pairs.positions + 1] = pairs.tokens.to(torch.int32)",
        "        self._texts.tokens[pairs.rows, pairs.positions] = pairs.tokens.to(torch.int32)",
        "drafts are looked up in a text that is off by one",
        test="tests/unit/drafters/test_ngram.py::test_what_a_step_adds_is_known_to_the_next",
    ),
    Bug(
        "match_before_the_root",
        "roost.layers.host_lookup",
        "    found = np.flatnonzero(known[:last] == known[last])",
        "    found = np.flatnonzero(known[: last + 1] == known[last])",
        "the last tokens are found to be followed by what follows themselves",
        test=_FOUND + "test_in_the_own_text_the_longest_match_wins_then_the_latest",
    ),
    Bug(
        "lookup_in_its_own_scope",
        "roost.layers.host_lookup",
        "    if texts.scopes.numpy().item(source) != scope:",
        "    if source < 0:",
        "drafts come from what another client says, once a row is taken by it",
        test=_FOUND + "test_a_place_whose_text_is_gone_or_was_taken_by_another_scope_is_not_used",
    ),
    Bug(
        "prompts_are_found_by_nobody_else",
        _LOOKUP,
        '            "shared_from": np.array([setup.prompt_len for setup in setups]),',
        '            "shared_from": np.array([0 for _ in setups]),',
        "others are drafted what a prompt says",
        test=_LOOKED_UP + "test_a_prompt_is_found_by_nobody_else_and_an_output_is",
    ),
    Bug(
        "row_begins_without_its_old_text",
        _LOOKUP,
        '        texts.tokens.index_fill_(0, sent["rows"], NOTHING)',
        "        pass",
        "what a row said before it began again is found behind its new text",
        test=_LOOKED_UP + "test_what_a_row_said_before_it_began_again_is_nobodys_any_more",
    ),
    Bug(
        "lookup_goes_on_from_its_own_path",
        "roost.drafters.tree",
        "    above = torch.where(at == shared[:, None], node[:, None], number - 1)",
        "    above = torch.where(at == shared[:, None], 0 * node[:, None], number - 1)",
        "a looked-up path that a tree has in part hangs on its root",
        test="tests/unit/drafters/test_with_lookup.py::"
        "test_every_path_of_the_lookup_is_there_and_only_the_last_nodes_made_room",
    ),
    Bug(
        "mirror_follows_the_device",
        "roost.forward.lengths",
        "        lengths.refresh(sync=plan.shape.speculates)",
        "        lengths.refresh(sync=False)",
        "9: after rounds the host's lengths are old ones",
        test=_COUNTS,
    ),
)
