"""The planted bugs: which line, what instead, and which failure it stands for.

Numbers in `why` are those of the failure modes the project keeps a test for. An entry whose line is gone fails tidy.
"""

from tests.planted.branch_bugs import BRANCH_BUGS
from tests.planted.budget_bugs import BUDGET_BUGS
from tests.planted.bug import Bug
from tests.planted.chain_bugs import CHAIN_BUGS
from tests.planted.client_bugs import CLIENT_BUGS
from tests.planted.compat_bugs import FOREIGN_BUGS
from tests.planted.conversation_bugs import CONVERSATION_BUGS
from tests.planted.device_bugs import DEVICE_BUGS
from tests.planted.edge_bugs import EDGE_BUGS
from tests.planted.fusion_bugs import FUSION_BUGS
from tests.planted.grammar_bugs import GRAMMAR_BUGS
from tests.planted.int4_bugs import INT4_BUGS
from tests.planted.journal_bugs import JOURNAL_BUGS
from tests.planted.kv_type_bugs import KV_TYPE_BUGS
from tests.planted.layer_bugs import LAYER_BUGS
from tests.planted.lookup_bugs import LOOKUP_BUGS
from tests.planted.mode_bugs import mode_bugs
from tests.planted.numba_bugs import NUMBA_BUGS
from tests.planted.progress_bugs import PROGRESS_BUGS
from tests.planted.session_bugs import SESSION_BUGS
from tests.planted.sink_bugs import SINK_BUGS
from tests.planted.size_bugs import SIZE_BUGS
from tests.planted.spec_bugs import SPEC_BUGS
from tests.planted.state_bugs import STATE_BUGS
from tests.planted.text_bugs import TEXT_BUGS
from tests.planted.threshold_bugs import THRESHOLD_BUGS
from tests.planted.weight_bugs import WEIGHT_BUGS
from tests.planted.wish_bugs import WISH_BUGS

_SIMULATED = (
    Bug(
        "bonus_claim",
        "roost.sched.planner",
        "    of_rounds = {width: Claim(step=step, size=1, most=accept_max_of(width)) for width in set(chosen.widths)}",
        "    of_rounds = {width: Claim(step=step, size=0, most=accept_max_of(width)) for width in set(chosen.widths)}",
        "1: a round in flight promises nothing, so a turn that ends hands over one token too few",
    ),
    Bug(
        "claims_at_epoch_end",
        "roost.kv.store",
        "        kept = min(lease.committed_len(known_len), target_len)",
        "        kept = min(lease.settled_len, target_len)",
        "1: claims are dropped, not resolved, when a turn ends",
    ),
    Bug(
        "epoch_check",
        "roost.sched.settle",
        "        if lease.epoch != epoch:  # the request ended, was preempted or failed meanwhile",
        "        if request.row is None:",
        "2: a result of an ended epoch still counts",
    ),
    Bug(
        "overshoot_trim",
        "roost.kv.store",
        "        kept = min(lease.committed_len(known_len), target_len)",
        "        kept = lease.committed_len(known_len)",
        "3: KV past the end of the output is inherited",
    ),
    Bug(
        "frontier_with_trim",
        "roost.kv.store",
        "        lease.evicted_len = min(lease.evicted_len, first * self.page_size)",
        "        lease.evicted_len = max(lease.evicted_len, 0)",
        "4: the window frontier stays ahead of a trimmed length",
    ),
    Bug(
        "tail_free",
        "roost.kv.store",
        "            self._release(lease, book, pages[first:])",
        "            self._release(lease, book, pages[:0])",
        "5: the tail behind a trimmed length is forgotten, and overwritten in the row",
    ),
    Bug(
        "page_aligned_free",
        "roost.kv.store",
        "        keep = ceil_div(length, self.page_size)  # the partly used page stays with the lease",
        "        keep = length // self.page_size",
        "5, 10: the free starts at an unaligned length and takes a live page",
    ),
    Bug(
        "row_not_widened",
        "roost.config.resolved",
        "        return ceil_to(self.context + 2 * max(self.reserves), self.page_size)",
        "        return ceil_to(self.context, self.page_size)",
        "6: branches do not fit the row (the guard must say so)",
    ),
    Bug(
        "page_rounded_reserve",
        "roost.kv.store",
        "        ends = [ceil_div(length + reserve, size) for reserve in reserves]",
        "        ends = [(length + reserve) // size for reserve in reserves]",
        "8: room is counted in whole pages rounded down",
    ),
    Bug(
        "reserve_at_depth_1",
        "roost.sched.planner",
        "        hi = lease.device_len_max",
        "        hi = lease.claimed_len",
        "9: room is taken for the length last seen, not for the length the device may have",
    ),
    Bug(
        "abort_frees_twice",
        "roost.sched.settle",
        "        if request.id not in state.requests or state.requests[request.id] is not request:",
        "        if request.id not in state.requests and request.arrival < 0:",
        "12: an abort after the last result frees again",
    ),
    Bug(
        "retire_before_reclaim",
        "roost.kv.ledger",
        "        if last_step <= self._collected:",
        "        if last_step <= last_step:",
        "13: pages are free while a launched step still writes them",
    ),
    Bug(
        "row_rests",
        "roost.sched.rows",
        "        if last_step <= collected:",
        "        if last_step <= last_step:",
        "13: a row is reused while a launched step still reads it",
        test="tests/sim/test_ownership_modes.py::"
        "test_13_pages_and_row_of_an_aborted_request_rest_until_its_step_is_collected[chain]",
    ),
    Bug(
        "node_remembers_step",
        "roost.kv.radix",
        "        node.last_step = max(node.last_step, lease.last_step)  # a step in flight may still read these pages",
        "        node.last_step = max(node.last_step, node.last_step)",
        "13: an evicted page is reused while a launched step still reads it",
    ),
    Bug(
        "node_remembers_window_step",
        "roost.kv.radix",
        "        node.last_step = max(node.last_step, lease.last_step)  # likewise for the window pages",
        "        node.last_step = max(node.last_step, node.last_step)",
        "13: an evicted window page is reused while a launched step still reads it",
    ),
    Bug(
        "stale_draft_slot",
        "roost.session.table",
        "            stale = 1 if self._pair and lease.settled_len == turn.commit_len else 0",
        "            stale = 0",
        "14: the last draft slot still stands for a token that was never returned",
    ),
    Bug(
        "branches_apart",
        "roost.spec_shape",
        "        return max(0, self.head_steps_of(self.tokens) - 1) if self.pair else 0",
        "        return max(0, self.head_steps_of(self.tokens) - 2) if self.pair else 0",
        "7: branches lie one position too close, and write over their neighbours' drafts",
    ),
    Bug(
        "branches_behind_the_text",
        "roost.spec_shape",
        "        return length + branch * self.branch_len + step",
        "        return length - 1 + branch * self.branch_len + step",
        "7: the first branch writes over the text's last draft slot",
    ),
    Bug(
        "reserve_for_branches",
        "roost.spec_shape",
        "        return max(self.scratch_len, self.tokens)",
        "        return self.tokens",
        "6: branches that are longer than the nodes verified reach past what the row holds",
    ),
    Bug(
        "publish_settled_only",
        "roost.kv.store",
        "        return lease.settled_len if lease.last_step <= self.ledger.collected else lease.proven_len",
        "        return lease.settled_len",
        "a step that fails later leaves a page in the tree that it never wrote",
    ),
    Bug(
        "fall_back_to_proven",
        "roost.kv.store",
        "        self.end_epoch(lease, lease.proven_len, lease.proven_len)",
        "        self.end_epoch(lease, lease.settled_len, lease.settled_len)",
        "a failed step's certain tokens are kept although it never wrote them",
    ),
    Bug(
        "pair_rule",
        "roost.session.record",
        "    return wide[:-1] << 32 | wide[1:] if pair else wide",
        "    return wide[:-1] if pair else wide",
        "a draft slot is shared with a sequence that goes on differently",
    ),
    Bug(
        "next_prompt_token",
        "roost.sched.planner",
        "        if end < turn.prefill_len:",
        "        if end < 0:",
        "31: the last token of a chunk that is not final goes to the drafter as if one had been sampled",
    ),
    Bug(
        "shared_page_written",
        "roost.kv.store",
        "        if length < lease.shared_len:",
        "        if length < lease.shared_len - self.page_size:",
        "a trim into a shared page leaves it to be written",
    ),
    Bug(
        "dedupe_resyncs_row",
        "roost.kv.radix",
        "                lease.row_synced[number] = min(lease.row_synced[number], index)",
        "                lease.row_synced[number] = max(lease.row_synced[number], 0)",
        "13: the row keeps pointing at the page that was given up for the cached one",
    ),
    Bug(
        "pinned_not_evicted",
        "roost.kv.radix",
        "            elif node.pins == 0 and not node.children:",
        "            elif not node.children:",
        "eviction takes a page that a running request reads",
    ),
    Bug(
        "window_pinned_not_evicted",
        "roost.kv.radix",
        "                if node.window_pins == 0:",
        "                if node.window_pins >= 0:",
        "eviction takes a window page that a running request reads",
    ),
    Bug(
        "window_hit_usable",
        "roost.kv.radix",
        "                if run >= pos - book.first_needed(pos, self._page_size):",
        "                if run >= 0:",
        "11: a hit is used although its last window is gone",
    ),
    Bug(
        "anchor_kept",
        "roost.kv.store",
        "            if lease.anchor[0] <= index * self.page_size < lease.anchor[1]:",
        "            if lease.anchor[0] <= index * self.page_size < lease.anchor[0]:",
        "4: the window behind the commit point is gone when a turn is aborted",
    ),
    Bug(
        "own_id_clears",
        "roost.session.table",
        "        if session.turn != turn.id:",
        "        if session.turn is None:",
        "15: a turn that only waited clears the running turn's mark",
    ),
    Bug(
        "abort_in_queue",
        "roost.sched.settle",
        "        if request.mark is Mark.ABORT:",
        "        if request.mark is Mark.ABORT and request.row is not None:",
        "16: a turn aborted in the queue never ends",
    ),
    Bug(
        "preempt_suspends",
        "roost.sched.ending",
        "    state.sessions.end_turn(request.turn, Outcome.SUSPEND, state.now)",
        "    state.sessions.end_turn(request.turn, Outcome.COMMIT, state.now, len(request.turn.record), "
        "Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0))",
        "17: a preemption takes the finish path",
    ),
    Bug(
        "disconnect_ends_turn",
        "roost.sched.intake",
        "    state.mark(request, Mark.ABORT)",
        "    state.mark(request, Mark.NONE)",
        "18: the turn of a client that went away decodes on and becomes history",
    ),
    Bug(
        "reclaim_idle",
        "roost.sched.reserve",
        "    for session in state.sessions.idle():",
        "    for session in state.sessions.idle()[:0]:",
        "19: idle sessions pin the pages that running requests need",
    ),
    Bug(
        "admission_counts_idle",
        "roost.sched.admission",
        "        spare = num_freed(state.store, [each for each in idle if each is not None], book)",
        "        spare = num_freed(state.store, [each for each in idle if each is None], book)",
        "19: idle sessions keep everybody else in the queue",
    ),
    Bug(
        "close_waits_for_turn",
        "roost.sched.ending",
        "    if session.closing and session.turn is None:",
        "    if session.closing:",
        "22: closing frees KV under the running turn",
    ),
    Bug(
        "refusal_unpins",
        "roost.session.table",
        "        if turn.session is None or lease is not turn.session.lease:",
        "        if turn.session is not None and lease is not turn.session.lease:",
        "24: a request that did not get in leaves its pins behind",
    ),
    Bug(
        "abort_rolls_back_tokens",
        "roost.session.table",
        "            target = returned_len if outcome is Outcome.COMMIT else turn.commit_len",
        "            target = returned_len if outcome is Outcome.COMMIT else len(record)",
        "23: an aborted turn's partial text stays in the session",
    ),
    Bug(
        "abort_keeps_kv",
        "roost.session.table",
        "                self._store.end_epoch(lease, target, len(record))",
        "                self._store.end_epoch(lease, target if outcome is Outcome.COMMIT else 0, len(record))",
        "23: an abort wipes the whole session's KV",
    ),
    Bug(
        "running_turn_publishes_nothing",
        "roost.sched.settle",
        "    if turn.session is None:",
        "    if turn.started:",
        "a session's running turn shares pages past its commit point, so an abort cannot keep its last page",
    ),
    Bug(
        "last_round_of_a_turn",
        "roost.sched.planner",
        "    return request.turn.session is not None and state.resolved.depth > 0 and request.max_new_tokens > 0",
        "    return False",
        "1: at depth 1 a turn whose end is certain stops one round early",
    ),
    Bug(
        "preempt_no_more",
        "roost.sched.reserve",
        "    missing = need - store.ledger.num_free(book) - store.ledger.num_retiring(book)",
        "    missing = need - store.ledger.num_free(book)",
        "more is preempted than the shortfall: pages on their way are not counted",
    ),
    Bug(
        "oldest_not_preempted",
        "roost.sched.reserve",
        "    newer = [each for each in newest_first if each.order > request.order]",
        "    newer = [each for each in newest_first if each is not request]",
        "the oldest request is preempted for a newer one",
    ),
    Bug(
        "global_statistics",
        "roost.sched.settle",
        "    for counters in (request.spec_counters, state.spec_counters):",
        "    for counters in (request.spec_counters,):",
        "2: the global counter and the sum over requests part",
    ),
    Bug(
        "stop_inside_a_run",
        "roost.sched.settle",
        "        if token in submit.stop_token_ids:",
        "        if token in submit.stop_token_ids and i == 0:",
        "28: a stop token inside an accepted run is passed over",
    ),
    Bug(
        "suspects_alone",
        "roost.sched.planner",
        "        chosen = _choose_from(state, [suspect])",
        "        chosen = _choose_from(state, ready)",
        "35: a request that breaks every step breaks those of the others, until steps are small enough",
        test="tests/unit/sched/test_engine.py::"
        "test_after_a_broken_step_each_of_its_requests_runs_alone_before_they_run_together",
    ),
    Bug(
        "retry_once",
        "roost.sched.settle",
        "_FAILURES_MAX = 1  # a second step that breaks at the same place, where it ran alone, ends a request",
        "_FAILURES_MAX = 0",
        "35: whoever shared a step with a bad request ends with it",
    ),
    Bug(
        "suspicion_lifted_too_early",
        "roost.sched.settle",
        "        if request.num_failures and lease.settled_len > request.failed_len:  # past where it broke",
        "        if request.num_failures:",
        "35: a request that breaks its second chunk is retried for ever",
    ),
    Bug(
        "abort_before_result",
        "roost.sched.engine",
        "        act_on_marks(state, Mark.ABORT)  # an abort that was read comes before a result that was not",
        "        state.now = max(state.now, 0)",
        "18: an aborted turn still becomes history",
    ),
    Bug(
        "salt",
        "roost.sched.intake",
        "            scoped_salt=session.scoped_salt if session else scoped(submit.client, submit.cache_salt),",
        '            scoped_salt=session.scoped_salt if session else scoped(submit.client, ""),',
        "27: requests of different salts share pages",
    ),
    Bug(
        "suspend_publishes",
        "roost.session.table",
        "            self._store.publish(lease, record.key(len(record), self._pair), now)",
        "            self._store.hand(lease, turn.id)",
        "17: a preempted turn finds nothing of what it had",
    ),
    Bug(
        "reclaim_publishes",
        "roost.session.table",
        "        self._store.publish(session.lease, key, session.last_used)",
        "        session.last_used = max(session.last_used, len(key) * 0)",
        "a reclaimed session finds nothing of what it had",
    ),
    Bug(
        "reclaim_no_more",
        "roost.sched.reserve",
        "        if ledger.num_free(book) >= need:",
        "        if ledger.num_free(book) < 0:",
        "19: more idle sessions lose their residence than the shortfall asks for",
    ),
)
BUGS = (
    *_SIMULATED,
    *WISH_BUGS,
    *SESSION_BUGS,
    *CONVERSATION_BUGS,
    *JOURNAL_BUGS,
    *SPEC_BUGS,
    *LOOKUP_BUGS,
    *DEVICE_BUGS,
    *LAYER_BUGS,
    *SINK_BUGS,
    *BRANCH_BUGS,
    *FUSION_BUGS,
    *CHAIN_BUGS,
    *CLIENT_BUGS,
    *FOREIGN_BUGS,
    *EDGE_BUGS,
    *KV_TYPE_BUGS,
    *NUMBA_BUGS,
    *INT4_BUGS,
    *TEXT_BUGS,
    *THRESHOLD_BUGS,
    *SIZE_BUGS,
    *BUDGET_BUGS,
    *WEIGHT_BUGS,
    *PROGRESS_BUGS,
    *GRAMMAR_BUGS,
    *STATE_BUGS,
    *mode_bugs(_SIMULATED),
)
