"""Planted bugs of the control plane that must show on the real engine too, with speculation on, mode by mode.

The lines are those of the bugs that seeds of the simulator find; here each is pinned to the mode's test in
tests/parity. What only the device can do wrong is in `device_bugs`.
"""

from collections.abc import Sequence
from dataclasses import replace

from tests.planted.bug import Bug

_LENGTHS = "tests/parity/test_spec_lengths.py::"
_OUTPUT = "tests/parity/test_spec_output.py::"

# mode and simulated bug -> the test on the real engine
_TESTS = {
    ("01", "bonus_claim"): _LENGTHS + "test_01_bonus_token_of_a_round_in_flight_is_inherited[1-4-14]",
    ("01", "claims_at_epoch_end"): _LENGTHS + "test_01_bonus_token_of_a_round_in_flight_is_inherited[1-4-14]",
    ("02", "epoch_check"): _LENGTHS + "test_02_stale_result_of_a_retracted_request_changes_nothing",
    ("03", "overshoot_trim"): _LENGTHS + "test_03_overshoot_is_neither_inherited_nor_kept_in_the_record[2-1]",
    ("04", "frontier_with_trim"): _LENGTHS + "test_04_abort_keeps_the_window_behind_the_commit_point[4-1]",
    ("05", "tail_free"): _LENGTHS + "test_05_retracts_at_any_offset_in_a_page_lose_no_page_and_no_token[chain]",
    ("06", "row_not_widened"): "tests/parity/test_spec_named.py::"
    "test_it_returns_what_plain_decoding_returns_and_every_page",
    ("08", "page_rounded_reserve"): _LENGTHS + "test_08_rest_of_the_last_page_is_used_by_the_next_turn[4-1]",
    ("10", "page_aligned_free"): _LENGTHS + "test_10_aborted_turn_leaves_the_partial_page_of_the_commit_point[9-1]",
    ("12", "abort_frees_twice"): _LENGTHS + "test_12_client_lost_while_it_gets_its_last_tokens_frees_once",
    ("13", "retire_before_reclaim"): _LENGTHS
    + "test_13_row_and_pages_rest_while_a_launched_step_may_write_them[chain]",
    ("13", "row_rests"): _LENGTHS + "test_13_row_and_pages_rest_while_a_launched_step_may_write_them[chain]",
    ("14", "stale_draft_slot"): _LENGTHS
    + "test_14_next_turn_drafts_right_after_a_rewind_at_any_offset_in_a_page[chain-1]",
    ("28", "stop_inside_a_run"): _OUTPUT + "test_28_stop_token_inside_an_accepted_run_ends_the_output_there[2-1]",
    ("31", "next_prompt_token"): _OUTPUT
    + "test_31_draft_kv_after_a_chunked_prefill_is_that_after_a_whole_one[3-eagle]",
}
_OWN = (
    Bug(
        "mode_11_window_reserve",
        "roost.config",
        "    reserves = tuple(reserve if book.window is None else spec.tokens for book in books)",
        "    reserves = tuple(reserve if book.window is None else spec.tokens - memory.page_size for book in books)",
        "11: a round has a page of the window pool too few",
        test=_LENGTHS + "test_11_window_pool_is_counted_to_the_page[qwen2-window-spec1-1]",
    ),
    Bug(
        "mode_26_first_token_stops",
        "roost.sched.settle",
        "    for i, token in enumerate(tokens[:room]):",
        "    for i, token in enumerate(tokens[1:room], 1):",
        "26: the first token of a result is never looked at, so a stop there is no end",
        test=_OUTPUT + "test_26_turns_of_no_token_of_one_and_of_a_stop_at_once_go_on_exactly[chain-1]",
    ),
    Bug(
        "mode_30_ids_of_the_vocabulary",
        "roost.models.eagle",
        "        return draft_ids if self._ids is None else self._ids[draft_ids]",
        "        return draft_ids if self._ids is None else self._ids[draft_ids] + draft_ids",
        "30: a head's ids run past the vocabulary",
        test=_OUTPUT + "test_30_no_draft_and_no_token_lies_outside_the_vocabulary[101-9-8]",
    ),
)


def mode_bugs(simulated: Sequence[Bug]) -> tuple[Bug, ...]:
    """The bugs, each with the test that finds it."""
    named = {bug.name: bug for bug in simulated}
    repeated = (replace(named[name], name=f"mode_{mode}_{name}", test=test) for (mode, name), test in _TESTS.items())
    return (*repeated, *_OWN)
