"""Planted bugs of the control plane that must show on the real engine too, with speculation on, mode by mode.

The lines are those of the bugs that seeds of the simulator find; here each is pinned to the mode's test in
tests/parity. What only the device can do wrong is in `device_bugs`.
"""

from collections.abc import Sequence
from dataclasses import replace

from tests.planted.bug import Bug

_LENGTHS = "tests/parity/test_spec_lengths.py::"
_OUTPUT = "tests/parity/test_spec_output.py::"
_SESSIONS = "tests/parity/test_session_modes.py::"
_RESERVES = "    reserves = tuple(spec.alloc_len_per_decode if book.window is None else spec.tokens for book in books)"

# mode and simulated bug -> the test on the real engine
_TESTS = {
    ("01", "bonus_claim"): _LENGTHS + "test_01_bonus_token_of_a_round_in_flight_is_inherited[1-4-14]",
    ("01", "claims_at_epoch_end"): _LENGTHS + "test_01_bonus_token_of_a_round_in_flight_is_inherited[1-4-14]",
    ("02", "epoch_check"): _LENGTHS + "test_02_stale_result_of_a_preempted_request_changes_nothing",
    ("03", "overshoot_trim"): _LENGTHS + "test_03_overshoot_is_neither_inherited_nor_kept_in_the_record[2-1]",
    ("04", "frontier_with_trim"): _LENGTHS + "test_04_abort_keeps_the_window_behind_the_commit_point[4-1]",
    ("05", "tail_free"): _LENGTHS + "test_05_preemptions_at_any_offset_in_a_page_lose_no_page_and_no_token[chain]",
    ("06", "row_not_widened"): "tests/parity/test_spec_named.py::"
    "test_it_returns_what_plain_decoding_returns_and_every_page",
    ("08", "page_rounded_reserve"): _LENGTHS + "test_08_rest_of_the_last_page_is_used_by_the_next_turn[4-1]",
    ("10", "page_aligned_free"): _LENGTHS + "test_10_aborted_turn_leaves_the_partial_page_of_the_commit_point[9-1]",
    ("12", "abort_frees_twice"): _LENGTHS + "test_12_client_lost_while_it_gets_its_last_tokens_frees_once",
    ("13", "retire_before_reclaim"): _LENGTHS
    + "test_13_row_and_pages_rest_while_a_launched_step_may_write_them[chain]",
    ("14", "stale_draft_slot"): _LENGTHS
    + "test_14_next_turn_drafts_right_after_a_rewind_at_any_offset_in_a_page[chain-1]",
    ("15", "own_id_clears"): _SESSIONS
    + "test_15_refused_and_waiting_turns_leave_the_session_with_the_turn_that_has_it[plain]",
    ("16", "abort_in_queue"): _SESSIONS
    + "test_16_turn_aborted_in_the_queue_frees_its_session_and_a_close_completes[plain]",
    ("17", "preempt_suspends"): _SESSIONS
    + "test_17_turn_preempted_twice_stays_one_turn_of_its_session[finished-chain 1]",
    ("18", "disconnect_ends_turn"): _SESSIONS
    + "test_18_next_turn_right_after_a_disconnect_goes_on_from_the_commit_point[3-plain]",
    ("18", "abort_before_result"): _SESSIONS + "test_18_abort_that_was_read_comes_before_the_last_result",
    ("19", "reclaim_idle"): _SESSIONS + "test_19_idle_sessions_beyond_rows_and_pages_let_others_in_and_resume[plain]",
    ("19", "admission_counts_idle"): _SESSIONS
    + "test_19_idle_sessions_beyond_rows_and_pages_let_others_in_and_resume[plain]",
    ("22", "close_waits_for_turn"): _SESSIONS
    + "test_22_close_during_decode_ends_the_turn_and_frees_nothing_under_it[plain]",
    ("23", "abort_rolls_back_tokens"): _SESSIONS
    + "test_23_abort_keeps_no_text_of_its_turn_and_all_kv_of_those_before[4-plain]",
    ("23", "abort_keeps_kv"): _SESSIONS
    + "test_23_abort_keeps_no_text_of_its_turn_and_all_kv_of_those_before[4-window]",
    ("27", "salt"): _SESSIONS + "test_27_kv_of_one_salt_is_never_inherited_under_another[plain]",
    ("28", "stop_inside_a_run"): _OUTPUT + "test_28_stop_token_inside_an_accepted_run_ends_the_output_there[2-1]",
    ("31", "next_prompt_token"): _OUTPUT
    + "test_31_draft_kv_after_a_chunked_prefill_is_that_after_a_whole_one[3-eagle]",
}
_OWN = (
    Bug(
        "mode_11_window_reserve",
        "roost.config.resolve",
        _RESERVES,
        _RESERVES.replace("spec.tokens for", "spec.tokens - memory.page_size for"),
        "11: a round has a page of the window pool too few",
        test=_LENGTHS + "test_11_window_pool_is_counted_to_the_page[qwen2-window-spec1-1]",
    ),
    Bug(
        "mode_20_lease_passed_over",
        "roost.session.table",
        "        if session is not None and session.lease is not None:",
        "        if session is not None and session.lease is not None and match_max is None:",
        "20: log-probabilities asked from before the inherited length cut the key, and the session's KV is orphaned",
        test=_SESSIONS + "test_20_logprobs_asked_from_the_start_are_raised_to_what_is_inherited[plain]",
    ),
    Bug(
        "mode_21_over_length_runs",
        "roost.sched.fit",
        "    if wanted <= most:",
        "    if wanted <= most or submit.session_id is not None:",
        "21: a turn that is too long is run all the same",
        test=_SESSIONS + "test_21_over_length_turn_is_refused_and_its_session_goes_on_as_if_it_had_not_been[plain]",
    ),
    Bug(
        "mode_22_refused_lease",
        "roost.session.table",
        "        if turn.session is None or lease is not turn.session.lease:",
        "        if turn.session is None or lease is not None:",
        "22: a turn that admission turns away takes its session's KV with it",
        test=_SESSIONS + "test_22_turn_that_admission_turns_away_keeps_what_its_session_has[plain]",
    ),
    Bug(
        "mode_24_pins_of_a_first_turn",
        "roost.kv.store",
        "        self.tree.unpin(lease, 0, now)",
        "        self.tree.unpin(lease, lease.shared_len, now)",
        "24: a first turn that is aborted leaves what it had found in the tree pinned",
        test=_SESSIONS + "test_24_first_turn_aborted_unpins_what_it_found_in_the_tree[2-plain]",
    ),
    Bug(
        "mode_24_empty_lease",
        "roost.session.table",
        "        if lease.settled_len == 0:",
        "        if lease.settled_len < 0:",
        "24: after an aborted first turn the session holds an empty lease, and never looks into the tree",
        test=_SESSIONS + "test_24_first_turn_aborted_unpins_what_it_found_in_the_tree[2-plain]",
    ),
    Bug(
        "mode_25_pages_copied",
        "roost.kv.store",
        "        lease.holder = holder",
        "        lease.holder, lease.pages = holder, [[page for page in pages] for pages in lease.pages]",
        "25: a change of holder walks the pages of the whole history",
        test=_SESSIONS + "test_25_host_work_of_a_turn_does_not_grow_with_its_history[plain]",
    ),
    Bug(
        "mode_27_salt_is_fixed",
        "roost.sched.intake",
        '    if session is not None and submit.cache_salt not in ("", session.cache_salt):',
        '    if session is not None and submit.cache_salt not in ("", session.cache_salt, submit.cache_salt):',
        "27: a turn with another salt than its session's is taken",
        test=_SESSIONS + "test_27_kv_of_one_salt_is_never_inherited_under_another[plain]",
    ),
    Bug(
        "mode_26_first_token_stops",
        "roost.sched.settle",
        "        for i, token in enumerate(tokens[:room]):",
        "        for i, token in enumerate(tokens[1:room], 1):",
        "26: the first token of a result is never looked at, so a stop there is no end",
        test=_OUTPUT + "test_26_turns_of_no_token_of_one_and_of_a_stop_at_once_go_on_exactly[chain-1]",
    ),
    Bug(
        "mode_30_ids_of_the_vocabulary",
        "roost.models.eagle",
        "        return draft_ids if self._ids is None else self._ops.look_up(self._ids, draft_ids)",
        "        return draft_ids if self._ids is None else self._ops.look_up(self._ids, draft_ids) + draft_ids",
        "30: a head's ids run past the vocabulary",
        test=_OUTPUT + "test_30_no_draft_and_no_token_lies_outside_the_vocabulary[101-9-8]",
    ),
)


def mode_bugs(simulated: Sequence[Bug]) -> tuple[Bug, ...]:
    """The bugs, each with the test that finds it."""
    named = {bug.name: bug for bug in simulated}
    repeated = (replace(named[name], name=f"mode_{mode}_{name}", test=test) for (mode, name), test in _TESTS.items())
    return (*repeated, *_OWN)
