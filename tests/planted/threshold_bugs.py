"""Planted bugs that show only past a threshold of the source, or as waste: what is right but costs others too much."""

from tests.planted.bug import Bug

_SCORES = "roost.sampling.logprobs"
_ROOM = "roost.sched.reserve"
_RADIX = "roost.kv.radix"
_CLIENT_SESSION = "roost.front.session"
_HISTORY = "roost.server.request_history"
_SCORED = "tests/parity/test_logprobs_exact.py::test_a_chunk_of_any_length_is_scored_to_its_end"
_TOP_P = "tests/unit/sampling/test_sampler.py::test_top_p_keeps_what_it_should_of_a_flat_row_beside_peaked_ones"
_OLDEST = "tests/unit/kv/test_eviction.py::test_the_least_recently_used_goes_first_however_often_that_has_changed"
_SPARED = "tests/unit/sched/test_reserve.py::test_whoever_can_be_spared_is_not_preempted"
_SMALLEST = "tests/parity/test_graphs.py::test_a_step_is_padded_to_the_smallest_captured_size_that_holds_it"
_CONTINUED = "tests/unit/server/test_request_history.py::"
_SESSION_TESTS = "tests/unit/front/test_session.py::"
_SPARE = "        if num_freed(store, leaving + [each.lease for each in others], book) >= missing:"
_NEXT_VICTIM = "    while newer and num_freed(store, leaving + [each.lease for each in victims], book) < missing:"

THRESHOLD_BUGS = (
    # --- thresholds ---
    Bug(
        "logprobs_past_the_first_piece",
        _SCORES,
        "    return [slice(first, first + LOGPROB_POSITIONS_MAX) for first in range(0, length, LOGPROB_POSITIONS_MAX)]",
        "    return [slice(0, LOGPROB_POSITIONS_MAX)]",
        "prompt positions past the 256th of a chunk are not scored",
        test=_SCORED,
    ),
    Bug(
        "logprobs_of_their_own_piece",
        _SCORES,
        '        logits = logits_of(hidden[sent["index"][part]])',
        '        logits = logits_of(hidden[sent["index"][: len(sent["index"][part])]])',
        "prompt positions past the 256th of a chunk are scored by the logits of those before",
        test=_SCORED,
    ),
    Bug(
        "padding_starts_anew",
        "roost.forward.passes",
        "        lengths = lengths.masked_fill(layout.rows == self.padding_row, 0)",
        "        lengths = lengths.clone()",
        "the row that pads graphs of rounds gets longer with every replay, until it is longer than a row",
        test="tests/parity/test_graphs.py::test_padding_starts_anew_in_every_replay[target-tree]",
    ),
    Bug(
        "ranked_enough_for_every_row",
        "roost.sampling.draw",
        "        if bool((held >= total.to(torch.float64) * top_p.unsqueeze(1)).all()):",
        "        if bool((held >= total.to(torch.float64) * top_p.unsqueeze(1)).any()):",
        "a flat row is cut to its 1,024 best tokens, if that is enough for a row beside it",
        test=_TOP_P,
    ),
    Bug(
        "order_after_a_sweep",
        _RADIX,
        "                heapq.heapify(heap)",
        "                heap.reverse()",
        "once entries that are out of date are swept away, eviction takes what was just used",
        test=_OLDEST,
    ),
    Bug(
        "usages_are_rewound",
        _CLIENT_SESSION,
        "        del self.usages[state.turns :]",
        "        del self.usages[len(self.usages) :]",
        "after a rewind a new turn is taken for the one that had its number",
        test=_SESSION_TESTS + "test_a_rewound_turn_may_be_sent_again_and_what_it_then_costs_is_told",
    ),
    Bug(
        "oldest_branch_goes",
        _HISTORY,
        "            self._ended.popitem(last=False)",
        "            self._ended.popitem()",
        "from the 257th on, a request cannot be continued",
        test=_CONTINUED + "test_the_last_requests_to_end_can_be_continued_and_the_oldest_are_forgotten",
    ),
    Bug(
        "fork_has_its_own_tokens",
        "roost.session.record",
        "        return Record(self._tokens[:length])",
        "        twin = Record()\n        twin._tokens = self._tokens\n        return twin",
        "a fork and its source write their next tokens over each other's",
        test="tests/unit/session/test_record.py::test_a_copy_and_what_it_was_made_of_go_on_each_by_itself",
    ),
    Bug(
        "a_turn_that_waited_is_a_use",
        "roost.session.table",
        "            self._idle.move_to_end(session.id)",
        "            session.last_used = now",
        "a session whose turn was aborted in the queue is reclaimed before others that were used before it",
        test="tests/unit/sched/test_sessions.py::test_a_turn_that_never_ran_is_a_use_of_its_session_all_the_same",
    ),
    Bug(
        "menus_hold_their_last_size",
        "roost.spec_widths",
        "        return next((menu for most, menu in _MENUS if num_rounds <= most), _MENU_BEYOND)",
        "        return next((menu for most, menu in _MENUS if num_rounds < most), _MENU_BEYOND)",
        "eight rounds, and sixty-four, have the shorter drafts of more",
        test="tests/unit/test_spec_widths.py::test_the_more_rounds_share_a_step_the_shorter_is_the_menu",
    ),
    # --- waste ---
    Bug(
        "evict_what_is_missing",
        _ROOM,
        "    tree.evict(book, need - ledger.num_free(book))",
        "    tree.evict(book, need)",
        "as many pages are evicted as are wanted, not as many as are missing",
    ),
    Bug(
        "evict_what_a_reclaim_left_missing",
        _ROOM,
        "        tree.evict(book, need - ledger.num_free(book))",
        "        tree.evict(book, need)",
        "the same, after an idle session was reclaimed",
    ),
    Bug(
        "evict_no_node_beyond",
        _RADIX,
        "        goal = max(0, self._num_evictable[book] - count)",
        "        goal = max(0, self._num_evictable[book] - count - 1)",
        "one node is evicted beyond what was asked for",
    ),
    Bug(
        "spare_who_is_not_needed",
        _ROOM,
        _SPARE,
        _SPARE.replace(">=", ">"),
        "one is preempted beyond those that bring exactly what is missing",
        test=_SPARED,
    ),
    Bug(
        "last_in_line_first",
        _ROOM,
        _NEXT_VICTIM,
        _NEXT_VICTIM.replace("<", "<="),
        "an older one is preempted in place of those behind it that bring exactly what is missing",
    ),
    Bug(
        "rounds_in_flight_are_charged",
        "roost.sched.admission",
        "    soon = length + (1 + resolved.depth) * resolved.reserve_of(book)",
        "    soon = length + max(1, resolved.depth) * resolved.reserve_of(book)",
        "at depth 1 a request is let in with the pages of one round, where two can be in flight",
    ),
    Bug(
        "nothing_is_held_where_no_stop_begins",
        "roost.text.stream",
        "        self._held = text[certain_len:]",
        "        self._held = text[-self._stops.depth(self._state) :]",
        "where no stop string begins all output is kept, and copied with every token",
        test="tests/unit/text/test_stream.py::test_what_a_stream_keeps_does_not_grow_with_the_output",
    ),
    Bug(
        "order_of_eviction_is_swept",
        _RADIX,
        "            if len(heap) > HEAP_SLACK + 2 * len(self._nodes):  # by now most entries are out of date",
        "            if len(heap) > 10**9:",
        "the order of eviction takes more memory with every use of a cached prefix",
        test="tests/unit/kv/test_eviction.py::test_the_order_of_eviction_takes_no_more_memory_the_longer_a_server_runs",
    ),
    Bug(
        "room_for_the_step_alone",
        "roost.sched.planner",
        "        needs = (chunk,) * len(reserves) if chunk else reserves",
        "        needs = tuple(chunk + each for each in reserves)",
        "a chunk takes the pages of a round too, before there is one",
    ),
    Bug(
        "windows_move_on",
        "roost.kv.store",
        "        whole_len = floor_to(max(0, length - 1), self.page_size)",
        "        whole_len = floor_to(max(0, length - 1 - self.page_size), self.page_size)",
        "every lease keeps a window page that nothing reads any more",
    ),
    Bug(
        "preempt_what_helps",
        _ROOM,
        "        return  # not even all of them would do: wait until older requests end",
        "        pass",
        "requests are preempted although all they have does not do",
        test=_SPARED,
    ),
    Bug(
        "waiting_is_not_looked_up",
        "roost.sched.admission",
        '    return "" if better else refusal.reason',
        '    return ""',
        "a long prompt that has to wait is looked up in the tree in every tick",
        test="tests/unit/sched/test_admission.py::"
        "test_who_has_to_wait_is_not_looked_up_again_before_something_has_changed",
    ),
    Bug(
        "branch_that_ends_again_is_the_newest",
        _HISTORY,
        "        self._ended.pop(name, None)  # another had this name before",
        "        self._ended.get(name)",
        "a request that ends again under its name is forgotten as if it had ended only once",
        test=_CONTINUED + "test_a_request_that_ends_again_under_its_name_is_the_newest",
    ),
    Bug(
        "smallest_graph_of_rounds",
        "roost.graphs.rounds",
        "        return self.by_size[min(sizes), width] if sizes else None",
        "        return self.by_size[max(sizes), width] if sizes else None",
        "one request is padded to the largest captured batch",
        test=_SMALLEST,
    ),
    Bug(
        "smallest_graph_of_a_step_with_chunks",
        "roost.graphs.mixed",
        "        return next((each for each in self._by_size if each.num_tokens >= num_tokens), None)",
        "        return next((each for each in self._by_size[::-1] if each.num_tokens >= num_tokens), None)",
        "a short chunk is padded to the largest captured size",
        test=_SMALLEST,
    ),
)
