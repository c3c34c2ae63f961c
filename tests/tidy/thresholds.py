"""Numbers of the source, by module and name: which test stands on both sides of each, or why it needs none.

A number that decides which way something goes (a threshold, a size, a limit) names a test that crosses it; those that
decide nothing, or only how good a guess is, are in `plain_numbers`. Whoever adds a number adds it to one of them.
"""

_INTAKE = "tests/unit/sched/test_intake.py::test_what_is_just_allowed_is_taken_and_one_more_is_refused"
_SAMPLING = "tests/unit/test_sampling.py::test_an_option_has_the_range_that_it_says"
_LOOKUP = "tests/unit/layers/test_lookup.py::"
_GUMBEL = "tests/unit/layers/test_gumbel.py::"
_HOST_DRAW = "tests/unit/sampling/test_host_draw.py::"
_SESSION_TABLE = "tests/unit/server/test_session_table.py::"
_BODY = "tests/unit/server/test_body_reader.py::"
_REQUESTS = "tests/server/test_request_limits.py::"
_GENERATION = "tests/unit/server/test_generation.py::"
_DRAFTING = "tests/unit/draft_length/test_choice.py::"
_CHUNKS = "tests/unit/step_times/test_prompt_tokens.py::"
_TIMES = "tests/unit/step_times/test_times.py::"
_BUDGET = "tests/unit/sched/test_step_budget.py::"
_LATE = "tests/unit/sched/test_late_planning.py::"
_KERNELS = "tests/kernels/"
_NUMBA = "tests/numba_kernels/"
_GROUPED = _KERNELS + "test_grouped_linear.py::"
_INT4 = "tests/unit/layers/test_int4.py::"
_OFFLOAD = "tests/unit/server/test_background_threads.py::"
_LISTENER = "tests/unit/server/test_listener.py::"
_LOGS = "tests/unit/server/test_logs.py::"
_TOKEN_BOUNDS = "tests/unit/text/test_token_bounds.py::"
_LOCALITY = "tests/unit/text/test_locality.py::"
_TOOLS = "tests/unit/tools/"
_CONVERSATIONS = "tests/unit/server/test_conversations.py::"
_SOCKET = "tests/unit/server/test_response_socket.py::"
_STORED = "tests/unit/server/test_stored_responses.py::"
_OWN_ANSWERS = "tests/unit/front/test_own_answers.py::test_the_least_recently_used_go_first_by_number_and_by_tokens"
_GRAMMARS = "tests/unit/grammar/test_compiler.py::"
_WATCHED = "tests/unit/cli/test_watched_server.py::"
_SCREEN = "tests/unit/cli/test_watch_screen.py::"
_AGREEMENT = "tests/parallel/test_agreement.py::"
_CIRCLES = "tests/unit/train/test_answers.py::test_other_answers_do_not"

_PLACEMENT = "tests/unit/router/test_placement.py::"

TESTED: dict[str, str] = {
    "roost.server.config._PORT_MAX": "tests/unit/server/test_options.py::test_an_option_that_cannot_work_is_named",
    "roost.startup.THREADS_MAX": (
        "tests/unit/test_threads.py::test_a_number_of_threads_that_a_system_may_not_start_is_refused"
    ),
    # --- router ---
    "roost.router.placement.SLACK": _PLACEMENT
    + "test_a_prompt_goes_where_its_beginning_has_run_until_that_replica_has_too_much_more_to_do",
    "roost.ray.build.REPLICAS_MAX": "tests/ray/test_build.py::test_a_number_of_replicas_may_be_a_range",
    "roost.router.placement.BLOCK_LEN": _PLACEMENT + "test_only_so_much_of_a_prompt_is_looked_at",
    "roost.router.placement.PROMPT_BLOCKS_MAX": _PLACEMENT + "test_only_so_much_of_a_prompt_is_looked_at",
    # --- kv, sched ---
    "roost.kv.state_cache.HEAP_SLACK": "tests/unit/kv/test_eviction.py::"
    "test_the_least_recently_used_goes_first_however_often_that_has_changed",
    "roost.session.journal.COMPACT_BYTES": "tests/unit/session/test_journal.py::"
    "test_a_log_stays_within_twice_the_session_however_often_that_is_rewound",
    "roost.session.journal_files.SWEEP_AFTER_NS": "tests/unit/session/test_journal_files.py::"
    "test_sessions_that_nobody_asks_for_any_more_are_removed_long_after_their_time",
    "roost.session.journal_files._BEGINNING": "tests/unit/session/test_journal_files.py::"
    "test_sessions_that_nobody_asks_for_any_more_are_removed_long_after_their_time",
    "roost.server.session_table._OUTCOME_UNKNOWN": "tests/unit/server/test_session_table.py::"
    "test_a_turn_whose_outcome_is_unknown_has_its_session_asked_for_again",
    "roost.sched.intake.LOGPROBS_MAX": _INTAKE,
    "roost.sched.intake.PRIORITY_MAX": _INTAKE,
    "roost.sched.intake.TIMEOUT_MS_MAX": _INTAKE,
    "roost.sched.intake.STOPS_MAX": _INTAKE,
    "roost.sched.intake.STOP_LEN_MAX": _INTAKE,
    "roost.sched.intake.STOP_IDS_MAX": "tests/unit/sched/test_intake.py::"
    "test_as_many_stop_ids_are_looked_at_as_may_be_given",
    "roost.sched.sessions.ID_LEN_MAX": _INTAKE,
    "roost.sched.sessions.TTL_MS_MAX": _INTAKE,
    "roost.sched.sessions.TOKENS_MAX": _INTAKE,
    "roost.sched.admission.LOOKED_AT_MAX": "tests/unit/sched/test_prefill_shares.py::"
    "test_of_a_long_queue_only_a_part_is_looked_at_for_what_needs_less",
    "roost.sched.admission.OVERTAKEN_MAX": "tests/unit/sched/test_prefill_shares.py::"
    "test_what_waits_for_pages_is_overtaken_a_few_times_by_what_needs_less_and_then_no_more",
    "roost.sched.planner._PREFILL_SHARE": "tests/unit/sched/test_step_limits.py::"
    "test_where_tokens_are_few_rounds_are_narrow_and_all_of_them_go_on",
    "roost.sched.step_budget._FIRST": _BUDGET
    + "test_before_anything_is_measured_a_step_has_512_prompt_tokens_or_what_it_may",
    "roost.sched.step_budget._GROWTH": _BUDGET
    + "test_a_step_has_at_most_twice_the_prompt_tokens_that_were_ever_measured",
    "roost.sched.step_budget._PREFILL_PART": _BUDGET
    + "test_prefill_has_a_quarter_of_a_step_however_long_the_rounds_take",
    "roost.sched.step_budget._TARGETS_ALONE": _BUDGET
    + "test_a_step_without_rounds_may_take_four_targets_and_one_that_delays_rounds_takes_one",
    "roost.sched.step_budget._DRAFTED_PART": _BUDGET + "test_where_prompts_wait_drafts_leave_them_half_of_the_target",
    "roost.sched.late_planning._STEP_LEAST": _LATE + "test_nobody_waits_for_mail_while_steps_are_short",
    "roost.sched.late_planning._LEAD_LEAST": _LATE
    + "test_the_lead_is_what_the_host_takes_a_part_of_the_step_and_some_time_at_least",
    "roost.sched.late_planning._LEAD_HOST": _LATE
    + "test_the_lead_is_what_the_host_takes_a_part_of_the_step_and_some_time_at_least",
    "roost.sched.late_planning._LEAD_PART": _LATE + "test_a_result_that_had_to_be_waited_for_was_not_late",
    "roost.sched.late_planning._STEPS_KNOWN": _LATE
    + "test_the_lead_is_what_the_host_takes_a_part_of_the_step_and_some_time_at_least",
    "roost.sched.late_planning._BLOCKED_LEAST": _LATE + "test_a_result_that_had_to_be_waited_for_was_not_late",
    "roost.sched.late_planning._CAUTION_STEP": _LATE
    + "test_a_device_that_was_idle_is_waited_for_less_and_with_time_more_again",
    "roost.step_times.times._NUM_KNOWN": _TIMES + "test_the_running_step_is_known_after_three_like_it",
    "roost.step_times.prompt_tokens._NUM_KNOWN_ALONE": _TIMES
    + "test_a_running_step_of_chunks_is_known_after_three_and_taken_to_be_no_larger_than_they_were",
    "roost.sched.settle._FAILURES_MAX": "tests/unit/sched/test_engine.py::"
    "test_failures_with_a_good_step_between_them_do_not_add_up",
    "roost.sched.step_limits.PATIENCE": "tests/unit/sched/test_step_limits.py::"
    "test_a_larger_step_is_tried_after_so_many_good_ones_and_not_before",
    "roost.draft_length.work_times._LATE": "tests/unit/draft_length/test_work_times.py::"
    "test_a_machine_that_gets_busy_is_followed_and_a_late_step_is_not",
    "roost.draft_length.uneven_times._KNOWN_FOR": "tests/unit/draft_length/test_lookup_widths.py::"
    "test_what_steps_of_several_widths_cost_beyond_their_nodes_is_measured_and_forgotten",
    "roost.draft_length.choice._TRIED_WITHIN": _DRAFTING + "test_a_change_of_text_is_noticed",
    "roost.draft_length.choice._NEAR": _DRAFTING
    + "test_widths_that_come_close_to_the_best_are_measured_as_often_as_is_kept",
    "roost.draft_length.costs._NUM_BUSY": _DRAFTING + "test_busy_steps_count_only_where_rounds_alone_are_rare",
    "roost.step_times.prompt_tokens._APART": _CHUNKS
    + "test_chunks_that_are_shorter_by_the_rounds_beside_them_tell_nothing",
    "roost.step_times.prompt_tokens._NUM_KNOWN": _CHUNKS + "test_until_then_a_step_of_chunks_alone_bounds_it",
    "roost.step_times.prompt_tokens._REST_LEAST": _CHUNKS
    + "test_where_a_chunk_takes_almost_all_of_a_step_nothing_is_said_of_its_rounds",
    "roost.spec_widths.AUTO_STEPS_MAX": "tests/unit/test_spec_widths.py::test_what_may_be_chosen_is_captured",
    "roost.spec_widths.LOOKUP_STEPS_MAX": "tests/unit/test_spec_widths.py::"
    "test_the_fewer_rounds_share_a_step_the_wider_are_those_that_repeat_a_text",
    "roost.spec_shape.MATCH_MAX": _LOOKUP + "test_in_the_own_text_the_longest_match_wins_then_the_latest",
    "roost.layers.lookup.GRAM": _LOOKUP + "test_what_others_say_is_found_by_four_tokens_and_by_no_fewer",
    "roost.layers.lookup.NOBODY": _LOOKUP + "test_nothing_is_found_in_another_scope",
    "roost.layers.lookup._PLACES_MAX": _LOOKUP + "test_the_table_of_places_is_a_power_of_two_and_one_and_at_most_8_mb",
    "roost.kernels.lookup._CHUNK": _KERNELS + "test_lookup.py::test_a_text_of_several_chunks_is_searched_to_its_end",
    "roost.drafters.joint._NO_TOKEN": "tests/unit/drafters/test_joint.py::"
    "test_what_is_looked_up_goes_on_where_the_head_has_no_more",
    "roost.sampling.params.TOP_K_MAX": _SAMPLING,
    "roost.sampling.params.SEED_END": _SAMPLING,
    "roost.sampling.params.LOGIT_BIAS_MAX": _SAMPLING,
    "roost.sampling.params.LOGIT_BIAS_ENTRIES_MAX": _SAMPLING,
    # --- exec, layers, kernels ---
    "roost.sampling.draw.RANKED_FIRST": "tests/unit/sampling/test_sampler.py::"
    "test_top_p_keeps_what_it_should_of_a_flat_row_beside_peaked_ones",
    "roost.sampling.draw.VOCAB_SIZE_MAX": "tests/unit/sampling/test_draw.py::"
    "test_a_sum_of_the_largest_vocabulary_does_not_overflow",
    "roost.layers.gumbel.BIASES_MAX": "tests/unit/layers/test_gumbel.py::test_there_is_room_for_every_bias",
    "roost.layers.gumbel.SMALLEST_TEMPERATURE": _GUMBEL + "test_without_numba_the_host_draws_the_same",
    "roost.layers.host_gumbel._LEAST": _GUMBEL + "test_drafts_on_the_host_are_those_of_the_reference",
    "roost.numba_kernels.gumbel._BLOCK": _GUMBEL + "test_without_numba_the_host_draws_the_same",
    "roost.kernels.gumbel._CHUNK": _KERNELS + "test_gumbel.py::test_a_draw_is_the_references",
    "roost.sampling.host_draw._BLOCK": _HOST_DRAW + "test_the_token_is_the_references",
    "roost.sampling.host_draw._ERROR": _HOST_DRAW + "test_the_token_is_the_references",
    "roost.sampling.host_draw._CANDIDATES_MAX": _HOST_DRAW + "test_the_token_is_the_references",
    "roost.sampling.host_draw._TEMPERATURE_LEAST": _HOST_DRAW
    + "test_what_float32_cannot_tell_is_left_to_the_reference",
    "roost.sampling.host_draw._LOGIT_MAX": _HOST_DRAW + "test_what_float32_cannot_tell_is_left_to_the_reference",
    "roost.sampling.sampler.CHUNK_ELEMENTS_MAX": "tests/unit/sampling/test_sampler.py::"
    "test_a_row_does_not_see_the_others_in_a_large_vocabulary",
    "roost.sampling.logprobs.LOGPROB_POSITIONS_MAX": "tests/unit/sampling/test_prompt_logprobs.py::"
    "test_outputs_are_scored_in_pieces_and_as_if_at_once",
    "roost.runner.memory._LOGPROB_BYTES": "tests/unit/runner/test_memory.py::"
    "test_log_probabilities_of_as_many_positions_as_exist_at_one_time_are_counted",
    "roost.graph_sizes._CAPTURED_MAX": "tests/unit/graphs/test_sizes.py::"
    "test_steps_of_more_tokens_than_the_largest_graph_are_not_captured",
    "roost.layers.batch_invariance.KEY_BLOCK": "tests/parity/test_one_order.py::"
    "test_a_token_in_a_chunk_of_any_cut_is_the_token_alone",
    "roost.layers.batch_invariance.KEY_STEP": "tests/parity/test_one_order.py::"
    "test_a_token_in_a_chunk_of_any_cut_is_the_token_alone",
    "roost.layers.attention._GATHER_MAX": "tests/parity/test_attention.py::"
    "test_any_number_of_rounds_of_any_length_read_all_their_keys",
    "roost.layers.quantised_kv.SCALE_LEAST": "tests/unit/layers/test_quantised_kv.py::"
    "test_the_smallest_scale_is_one_that_has_a_reciprocal",
    "roost.kernels.argmax._CHUNK": _KERNELS + "test_argmax.py::test_the_lowest_id_of_the_largest_score",
    "roost.kernels.attention._SPLITS_MAX": _KERNELS + "test_attention.py::test_splits_fill_the_device_and_no_more",
    "roost.kernels.attention._SPLIT_LEN": _KERNELS + "test_attention.py::test_splits_fill_the_device_and_no_more",
    "roost.kernels.attention.ARRIVALS_MAX": _KERNELS + "test_attention.py::test_splits_fill_the_device_and_no_more",
    "roost.kernels.attention._TILE_CELLS_MAX": _KERNELS
    + "test_attention.py::test_a_token_of_a_chunk_reads_up_to_itself",
    "roost.sched.step_log.STEPS_KEPT": "tests/sim/test_live_modes.py::"
    "test_steps_are_told_once_and_the_last_ones_are_kept",
    "roost.server.live_hub.WATCHERS_MAX": "tests/unit/server/test_live_hub.py::test_only_so_many_watch",
    "roost.server.live_hub._BEHIND_MAX": "tests/unit/server/test_live_hub.py::test_who_does_not_keep_up_is_let_go",
    "roost.kernels.copy._CELLS": _KERNELS + "test_copy.py::test_slots_change_places_within_a_long_group",
    "roost.kernels.copy._GROUP_LEN_MAX": _KERNELS
    + "test_copy.py::test_a_group_is_as_long_as_the_backend_declares_and_no_longer",
    "roost.kernels.cos_sin._BLOCK": _KERNELS + "test_cos_sin.py::test_cos_and_sin_equal_the_reference",
    "roost.kernels.rounds._BLOCK": _KERNELS + "test_rounds.py::test_more_rounds_than_a_program_takes_have_their_places",
    "roost.kernels.fp8_linear._ALIGNED": _KERNELS + "test_fp8_linear.py::test_a_projection_of_odd_sizes",
    "roost.kernels.fp8_tilings.ROUNDED_FROM": _KERNELS
    + "test_fp8_linear.py::test_a_projection_of_any_number_of_tokens",
    "roost.kernels.fp8_tilings.SCALED_MM_FROM": _KERNELS
    + "test_fp8_linear.py::test_a_projection_of_any_number_of_tokens",
    "roost.kernels.fp8_tilings._WIDE": _KERNELS
    + "test_fp8_linear.py::test_tilings_cover_the_weights_and_keep_multiprocessors_busy",
    "roost.kernels.fp8_tilings._LONG": _KERNELS
    + "test_fp8_linear.py::test_tilings_cover_the_weights_and_keep_multiprocessors_busy",
    **dict.fromkeys(
        (f"roost.kernels.experts.{name}" for name in ("_FEW", "_SUM_BLOCK")),
        _KERNELS + "test_experts.py::test_experts_say_what_the_reference_says",
    ),
    "roost.kernels.gated_activation._BLOCK": _KERNELS + "test_gated_activation.py::test_the_gate_equals_the_reference",
    "roost.kernels.scaled_sum._BLOCK": _KERNELS + "test_scaled_sum.py::test_a_scaled_sum_equals_the_reference",
    "roost.kernels.soft_cap._BLOCK": _KERNELS
    + "test_soft_cap.py::test_capped_logits_equal_the_reference_and_their_neighbours_stay",
    "roost.kernels.grouped_linear._DENSE_FROM": _GROUPED + "test_many_tokens_are_multiplied_by_floats_part_after_part",
    "roost.kernels.grouped_linear._DENSE_WEIGHTS": _GROUPED
    + "test_many_tokens_are_multiplied_by_floats_part_after_part",
    "roost.kernels.grouped_linear._DEQUANTISED_ROWS": _GROUPED + "test_rows_made_floats_are_the_reference_rounded_once",
    **dict.fromkeys(
        (
            f"roost.kernels.grouped_linear.{name}"
            for name in (
                *("_TOKENS_LEAST", "_TOKENS_MAX", "_OUTS_LEAST", "_OUTS_MANY", "_WARPS_ENOUGH", "_WARPS_LEAST"),
                *("_BLOCKS_MANY", "_BLOCKS_LEAST", "_SPLITS_MAX"),
            )
        ),
        _GROUPED + "test_tiles_keep_the_device_busy_and_have_counters",
    ),
    "roost.layers.grouped.SLICE_LEN": _INT4 + "test_a_packed_matrix_has_every_value_scale_and_zero_in_its_place",
    "roost.layers.grouped.OUT_MULTIPLE": _INT4 + "test_a_packed_matrix_has_every_value_scale_and_zero_in_its_place",
    "roost.layers.grouped._WORD_BITS": _INT4 + "test_a_packed_matrix_has_every_value_scale_and_zero_in_its_place",
    "roost.runner.memory.STATES_SHARE": "tests/unit/runner/test_memory.py::"
    "test_states_of_recurrent_layers_and_their_inputs_are_as_large_as_is_counted",
    "roost.kernels.routing._BLOCK": _KERNELS + "test_experts.py::test_pairs_are_sorted_by_expert_and_stay_in_order",
    "roost.kernels.gated_delta._BLOCK_V": _KERNELS + "test_gated_delta.py::test_chunks_and_rounds",
    "roost.kernels.norm._BLOCK": _KERNELS + "test_norm.py::test_a_norm_of_rows",
    "roost.kernels.rotary._BLOCK": _KERNELS + "test_rotary.py::test_rope_write_turns_and_writes",
    "roost.kernels.ops._ALIGNED": _KERNELS + "test_ops.py::test_only_few_tokens_of_a_plain_bfloat16_weight_are_fused",
    "roost.kernels.linear_tilings._WHOLE_MAX": _KERNELS + "test_few_token_linear.py::test_a_tiling_fits_the_device",
    "roost.kernels.linear_tilings._VECTOR": _KERNELS
    + "test_ops.py::test_only_few_tokens_of_a_plain_bfloat16_weight_are_fused",
    "roost.kernels.linear_tilings.TOKENS_MAX": _KERNELS
    + "test_ops.py::test_only_few_tokens_of_a_plain_bfloat16_weight_are_fused",
    "roost.numba_kernels.attention_plan.BLOCK_LEN": _NUMBA
    + "test_one_order.py::test_a_chunk_of_any_cut_and_its_tokens_alone",
    "roost.numba_kernels.attention_plan.SPAN_LEN": _NUMBA
    + "test_one_order.py::test_a_chunk_of_any_cut_and_its_tokens_alone",
    "roost.numba_kernels.attention_plan.TILE_ROWS": _NUMBA
    + "test_attention.py::test_decoding_rows_read_all_their_keys",
    "roost.numba_kernels.attention._ROWS_IN_PLACE": _NUMBA
    + "test_one_order.py::test_a_chunk_of_any_cut_and_its_tokens_alone",
    "roost.numba_kernels.rotary._PIECE_LEN": _NUMBA + "test_rotary.py::test_a_token_is_written_as_it_is_alone",
    "roost.attention.numba_backend._NUM_PARTIALS": _NUMBA
    + "test_one_order.py::test_any_number_of_threads_and_spans_read_apart_or_one_after_the_other",
    "roost.numba_kernels.linear.NARROW": _NUMBA + "test_linear.py::test_a_tokens_result_has_the_same_bits_in_any_batch",
    "roost.numba_kernels.linear.TILE": _NUMBA + "test_linear.py::test_a_tokens_result_has_the_same_bits_in_any_batch",
    "roost.numba_kernels.execution.TOKENS_MAX": _NUMBA
    + "test_execution.py::test_a_recorded_pass_has_the_bits_of_a_direct_one_at_any_number_of_tokens",
    "roost.numba_kernels.tokens.SCALE_LEAST": _NUMBA + "test_linear.py::test_a_token_of_zeros_or_of_none_is_no_trouble",
    # --- front, server, text ---
    "roost.front.options.N_MAX": _GENERATION + "test_a_prompt_has_as_many_outputs_as_may_be_asked_for",
    "roost.front.options.TIMEOUT_S_MIN": _GENERATION
    + "test_a_time_is_at_least_a_millisecond_and_at_most_what_the_engine_takes",
    "roost.server.response_schema.TOP_LOGPROBS_MAX": "tests/unit/server/test_response_input.py::"
    "test_logprobs_are_asked_for_by_include_with_at_most_20_alternatives",
    "roost.text.conversation.MEMO_CHARS_MAX": "tests/unit/text/test_conversation.py::"
    "test_a_memo_gives_what_the_tokenizer_gives_and_forgets_what_was_not_used",
    "roost.front.own_answers.ANSWERS_MAX": _OWN_ANSWERS,
    "roost.front.own_answers.TOKENS_MAX": _OWN_ANSWERS,
    "roost.server.conversations._TRIES": _CONVERSATIONS
    + "test_two_at_once_under_one_label_are_a_turn_and_a_fork_of_what_was_committed",
    "roost.server.conversations._IDLE_MS": _CONVERSATIONS
    + "test_a_resent_history_is_the_next_turn_of_the_session_that_its_label_finds",
    "roost.server.labels.LABELS_MAX": "tests/unit/server/test_labels.py::"
    "test_there_are_so_many_labels_and_the_least_recently_used_goes_first",
    "roost.server.labels.SESSIONS_PER_LABEL": "tests/unit/server/test_labels.py::"
    "test_a_label_has_the_sessions_that_were_used_last",
    "roost.server.openai_responses.ITEMS_MAX": _STORED + "test_a_conversation_takes_so_many_items_at_once",
    "roost.server.openai_responses._PAGE_DEFAULT": _STORED + "test_a_list_comes_in_pages",
    "roost.server.openai_responses._PAGE_MAX": _STORED + "test_a_list_comes_in_pages",
    "roost.server.response_socket.ACTIVE_MAX": _SOCKET
    + "test_so_many_responses_run_at_once_so_many_wait_and_one_more_is_refused",
    "roost.server.response_socket.LANES_MAX": _SOCKET
    + "test_so_many_responses_run_at_once_so_many_wait_and_one_more_is_refused",
    "roost.server.response_socket.WAITING_MAX": _SOCKET
    + "test_so_many_responses_run_at_once_so_many_wait_and_one_more_is_refused",
    "roost.server.response_socket.KEPT_MAX": _SOCKET + "test_what_is_not_stored_can_be_followed_on_the_socket_alone",
    "roost.server.response_socket._STREAM_ID_LEN_MAX": _SOCKET
    + "test_what_cannot_be_read_is_refused_and_the_socket_goes_on",
    "roost.server.response_socket.OPEN_S": _SOCKET + "test_a_socket_is_closed_after_its_time",
    "roost.server.generation.OUTPUTS_MAX": _GENERATION
    + "test_all_prompts_together_have_as_many_outputs_as_one_request_may",
    "roost.server.state.PROMPTS_MAX": _REQUESTS + "test_a_request_has_as_many_prompts_as_it_may",
    "roost.server.schema.REQUEST_ID_LEN_MAX": _REQUESTS + "test_a_name_is_as_long_as_it_may_be",
    "roost.server.message_schema.THINKING_TOKENS_MIN": "tests/unit/server/test_message_input.py::"
    "test_a_budget_of_thoughts_is_less_than_the_answer_and_no_less_than_documented",
    "roost.server.message_events._NUMBER_END": "tests/unit/server/test_message_events.py::"
    "test_whatever_a_model_writes_as_arguments_can_be_sent",
    "roost.server.openai._TOP_LOGPROBS_MAX": _REQUESTS + "test_a_token_has_as_many_alternatives_as_it_may",
    "roost.server.body_reader._DIGITS_MAX": _BODY + "test_a_real_number_has_as_many_digits_as_it_may",
    "roost.server.body_reader.BODY_BYTES_MAX": _BODY + "test_a_body_is_as_long_as_it_may_be",
    "roost.server.body_reader.DEPTH_MAX": _BODY + "test_a_body_may_be_as_deep_as_it_says_and_no_deeper",
    "roost.server.body_reader.VALUES_MAX": _BODY + "test_values_are_counted_as_they_are_wherever_a_body_is_cut",
    "roost.server.body_reader.PARTS_MAX": _BODY + "test_values_are_counted_as_they_are_wherever_a_body_is_cut",
    "roost.server.body_reader._SLICE": _BODY + "test_an_endless_number_is_refused_by_name_wherever_a_body_is_cut",
    "roost.server.body_reader._ENDLESS_LEN": _BODY + "test_a_number_is_read_up_to_63_bits_and_refused_by_name_beyond",
    "roost.server.background_threads.INLINE_MAX": _OFFLOAD + "test_long_work_does_not_hold_up_the_event_loop",
    "roost.server.background_threads.MEDIUM_MAX": _OFFLOAD + "test_so_much_long_work_goes_on_at_once_and_no_more",
    "roost.server.background_threads.NUM_THREADS": _OFFLOAD + "test_so_much_long_work_goes_on_at_once_and_no_more",
    "roost.server.config.CONNECTIONS_DEFAULT": _LISTENER
    + "test_places_are_what_the_system_has_files_for_beside_the_servers_own",
    "roost.server.config.NAME_LEN_MAX": "tests/unit/cli/test_flag_parser.py::"
    "test_names_of_the_model_may_be_given_one_by_one_or_with_commas_between",
    "roost.server.connections.PROBE_SLOTS": "tests/unit/server/test_connections.py::"
    "test_when_all_are_at_work_newcomers_get_probe_slots_and_then_nothing",
    "roost.server.listener._OWN_FILES": _LISTENER
    + "test_places_are_what_the_system_has_files_for_beside_the_servers_own",
    "roost.server.listener._BURST": _LISTENER + "test_so_many_are_refused_at_a_time_and_no_more",
    "roost.obs.log_events._LAST_EVENTS": "tests/unit/obs/test_log_events.py::"
    "test_a_failed_step_comes_with_the_last_events",
    "roost.server.logs._LINES_A_SECOND": _LOGS
    + "test_one_line_of_a_kind_is_written_a_second_and_the_others_are_counted",
    "roost.server.logs._REQUESTS_A_SECOND": _LOGS + "test_request_lines_have_more_room_but_not_all",
    "roost.server.logs._WIDTH_MAX": _LOGS + "test_a_line_has_an_end",
    "roost.server.request_log._PATH_LEN_MAX": "tests/unit/server/test_connection.py::"
    "test_a_path_is_told_but_not_at_length",
    "roost.server.body_reader._NAME_LEN_MAX": _BODY
    + "test_what_a_client_wrote_is_repeated_in_a_message_but_not_at_length",
    "roost.server.body_reader._NUMBER_END": _BODY + "test_a_number_is_read_up_to_63_bits_and_refused_by_name_beyond",
    "roost.server.serve.HEADER_BYTES_MAX": "tests/server/test_access.py::test_headers_that_are_too_large_are_refused",
    "roost.server.request_history.ENDED_MAX": "tests/unit/server/test_request_history.py::"
    "test_the_last_requests_to_end_can_be_continued_and_the_oldest_are_forgotten",
    "roost.server.session_table.CHECK_AT_MIN": _SESSION_TABLE
    + "test_sessions_that_are_gone_are_looked_for_once_there_are_many",
    "roost.server.state.MESSAGE_COST": "tests/unit/server/test_state.py::"
    "test_long_conversations_are_rendered_beside_the_event_loop",
    "roost.server.session_table.WAITING_MAX": _SESSION_TABLE + "test_no_more_turns_wait_for_a_session_than_may",
    "roost.server.worker._BATCH_MAX": "tests/unit/server/test_worker.py::"
    "test_events_that_came_together_leave_together_in_order_and_none_is_lost",
    "roost.server.tracing._SHOWN_LEN": "tests/unit/server/test_tracing.py::test_a_sessions_id_is_shortened",
    "roost.text.template.SOURCE_BYTES_MAX": "tests/unit/text/test_template.py::"
    "test_a_template_longer_than_any_honest_one_is_refused",
    "roost.text.template.TEXT_CHARS_MAX": "tests/unit/text/test_template.py::test_a_text_of_just_the_cap_is_taken",
    "roost.tools.definitions.TOOLS_MAX": _TOOLS
    + "test_definitions.py::test_as_many_tools_as_openai_takes_are_taken_and_no_more",
    "roost.tools.definitions.DEPTH_MAX": _TOOLS
    + "test_model_formats.py::test_arguments_may_be_nested_as_deep_as_they_may_be_and_no_deeper",
    "roost.tools.chars._BLANKS_MAX": _TOOLS
    + "test_machine.py::test_a_call_has_as_much_whitespace_as_it_may_and_no_more",
    "roost.tools.chars.WORD_MAX": _TOOLS
    + "test_machine.py::test_a_parameter_has_a_name_as_long_as_it_may_and_no_longer",
    "roost.tools.parameters._REFS_MAX": _TOOLS
    + "test_machine.py::test_a_parameter_is_found_through_as_many_references_as_may_be_and_no_more",
    "roost.grammar.build.GRAMMAR_BYTES_MAX": _GRAMMARS + "test_a_text_may_have_so_many_bytes_and_no_more",
    "roost.grammar.build.LEXER_FUEL_MAX": _GRAMMARS + "test_what_llguidance_bounds_itself_has_these_bounds",
    "roost.grammar.build.STATES_MAX": _GRAMMARS + "test_what_llguidance_bounds_itself_has_these_bounds",
    "roost.grammar.build.SYMBOLS_MAX": _GRAMMARS + "test_what_llguidance_bounds_itself_has_these_bounds",
    "roost.grammar.compiler.COMPILED_MAX": _GRAMMARS
    + "test_so_many_grammars_are_kept_and_those_used_longest_ago_are_forgotten",
    "roost.grammar.build.ERROR_LEN_MAX": _GRAMMARS + "test_an_error_is_passed_on_at_some_length_and_no_more",
    "roost.grammar.compiler.COMPILED_BYTES_MAX": _GRAMMARS + "test_kept_grammars_have_taken_so_much_memory_and_no_more",
    "roost.grammar.compiler.REFUSED_MAX": _GRAMMARS
    + "test_so_many_grammars_are_kept_and_those_used_longest_ago_are_forgotten",
    "roost.grammar.build.FORCED_MAX": _GRAMMARS
    + "test_a_grammar_that_forces_too_long_a_text_is_refused_at_once_or_when_it_comes_to_that",
    "roost.grammar.compiler._FILLS_LOOKED_AT": _GRAMMARS
    + "test_a_grammar_that_forces_too_long_a_text_is_refused_at_once_or_when_it_comes_to_that",
    "roost.grammar.compiler.SLOW_PENDING_MAX": _GRAMMARS
    + "test_so_many_slow_grammars_may_wait_and_quick_ones_have_their_own_places",
    "roost.grammar.ebnf.DEPTH_MAX": "tests/unit/grammar/test_ebnf.py::test_groups_may_be_so_deep_and_no_deeper",
    "roost.grammar.ebnf.REPEATS_MAX": "tests/unit/grammar/test_ebnf.py::test_a_part_may_come_so_often_and_no_oftener",
    "roost.grammar.compiler.PENDING_MAX": _GRAMMARS + "test_so_many_grammars_may_wait_and_no_more",
    "roost.grammar.compiler.QUICK_S": _GRAMMARS + "test_what_is_not_tried_in_time_is_tried_once_more_with_more_of_it",
    "roost.grammar.compiler.SLOW_S": _GRAMMARS + "test_what_is_not_tried_in_time_is_tried_once_more_with_more_of_it",
    "roost.grammar.trial.MEMORY_MAX": _GRAMMARS
    + "test_a_grammar_that_takes_too_much_memory_is_refused_by_the_process_that_tries_it",
    "roost.grammar.forms.CHOICES_MAX": "tests/unit/grammar/test_forms.py::"
    "test_choices_are_some_texts_that_are_not_empty",
    "roost.text.continuation._ENDING": _LOCALITY + "test_questions_and_answers_add_what_the_whole_conversation_adds",
    "roost.text.locality.OPENING": _LOCALITY + "test_a_template_that_may_look_further_renders_everything",
    "roost.text.locality._ENDING": _LOCALITY + "test_a_template_that_may_look_further_renders_everything",
    "roost.text.locality._COUNT_MAX": _LOCALITY + "test_a_template_that_may_look_further_renders_everything",
    "roost.text.escaping._WINDOW": "tests/unit/text/test_language.py::"
    "test_a_long_text_is_escaped_like_a_short_one_wherever_it_is_looked_through",
    "roost.text.token_bounds.DECOMPOSED_MAX": _TOKEN_BOUNDS
    + "test_no_character_is_composed_of_more_than_is_reckoned_with",
    "roost.text.token_bounds._ASCII_END": _TOKEN_BOUNDS + "test_a_text_has_at_least_the_tokens_that_its_length_says",
    "roost.text.tokenizer.CHARS_MAX": _TOKEN_BOUNDS
    + "test_a_text_of_what_becomes_no_token_is_refused_before_it_is_tokenised_too",
    "roost.text.tokenizer._GIL_RELEASE_CHARS": _TOKEN_BOUNDS
    + "test_a_long_text_is_tokenised_without_the_gil_and_just_like_a_short_one",
    "roost.values._SHOWN_MAX": "tests/unit/test_values.py::test_a_value_is_repeated_in_a_message_but_not_at_length",
    "roost.values._WHOLE_BITS_MAX": "tests/unit/test_values.py::test_a_whole_number_has_so_many_bits_and_no_more",
    "roost.server.restarts.WINDOW_S": "tests/unit/server/test_restarts.py::"
    "test_so_many_within_an_hour_and_one_more_is_refused",
    # --- parallel ---
    "roost.parallel.agreement.ALONE_S": _AGREEMENT + "test_a_step_that_breaks_on_one_rank_alone_ends_the_group",
    "roost.parallel.agreement.BEHIND_S": _AGREEMENT + "test_a_rank_that_is_not_done_is_lost_after_so_long",
    "roost.parallel.executor.CHECK_STEPS": "tests/parallel/test_executor.py::"
    "test_ranks_compare_what_came_of_so_many_steps",
    "roost.parallel.group.COLLECTIVE_S": "tests/parallel/test_lost_ranks.py::"
    "test_a_rank_that_hangs_in_a_step_is_found_by_those_that_wait_for_it",
    "roost.parallel.ranks.SILENT_S": "tests/parallel/test_lost_ranks.py::"
    "test_a_stopped_rank_is_found_while_nothing_runs",
    # --- cli, train ---
    "roost.cli.top._FIRST_FRAMES": "tests/unit/cli/test_top.py::test_an_engine_in_a_long_step_is_waited_for_a_little",
    "roost.cli.watched_server.RATE_MS": _WATCHED + "test_rates_are_those_of_the_last_five_seconds",
    "roost.cli.watched_server.STEPS_KEPT": _WATCHED
    + "test_rates_of_a_server_with_many_steps_are_those_of_the_steps_that_are_kept",
    "roost.cli.watched_server.LABELS_MAX": _WATCHED
    + "test_labels_of_owners_that_own_nothing_are_forgotten_when_there_are_many",
    "roost.cli.watch_screen._INDENT_MAX": _SCREEN + "test_deep_forks_are_not_indented_out_of_sight",
    "roost.cli.watch_screen._PLACES_MAX": _SCREEN + "test_of_many_places_the_first_are_shown",
    "roost.cli.watch_screen._LEAST": _SCREEN + "test_where_the_height_is_short_each_list_has_three_lines",
    "roost.train.composed_prompts.PASSAGE_CHARS_MIN": "tests/unit/train/test_composed_prompts.py::"
    "test_passages_are_long_lines_without_their_labels_and_code_is_code",
    "roost.train.losses._EXPONENT_MAX": "tests/unit/train/test_losses.py::test_the_largest_logits_stay_finite",
    "roost.train.answers.CIRCLES_MIN": _CIRCLES,
    "roost.train.answers.PERIOD_MAX": _CIRCLES,
}
