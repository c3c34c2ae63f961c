"""The planted bugs: which line, what instead, and which failure it stands for.

Numbers in `why` are those of the failure modes the project keeps a test for. An entry whose line is gone fails tidy.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Bug:
    """One line swapped."""

    name: str
    module: str
    line: str
    replacement: str
    why: str


BUGS = (
    Bug(
        "bonus_claim",
        "roost.sched.planner",
        "        size, most = (line.chunk, line.chunk) if line.chunk else (1, shape.accept_max)",
        "        size, most = (line.chunk, line.chunk) if line.chunk else (0, shape.accept_max)",
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
        "        if lease.epoch != epochs[i]:  # the request ended, was retracted or failed meanwhile",
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
        "roost.config",
        "        return ceil_to(self.sched.context + 2 * max(self.reserves), self.page_size)",
        "        return ceil_to(self.sched.context, self.page_size)",
        "6: branches do not fit the row (the guard must say so)",
    ),
    Bug(
        "page_rounded_reserve",
        "roost.kv.store",
        "        wants = [ceil_div(length, self.page_size) - len(pages) for length, pages in pairs]",
        "        wants = [length // self.page_size - len(pages) for length, pages in pairs]",
        "8: room is counted in whole pages rounded down",
    ),
    Bug(
        "reserve_at_depth_1",
        "roost.sched.planner",
        "        hi = request.lease.hi_len",
        "        hi = request.lease.claimed_len",
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
    ),
    Bug(
        "node_remembers_step",
        "roost.kv.radix",
        "        node.last_step = max(node.last_step, lease.last_step)  # its steps may still read these pages",
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
        "branch_tail_copy",
        "roost.spec.shape",
        "            for branch in range(1, self.topk)",
        "            for branch in range(1, 1)",
        "7: branches after the first read a hole instead of the prefix's last page",
    ),
    Bug(
        "branch_stride",
        "roost.spec.shape",
        "        return self.base + branch * self.stride + self.last + step",
        "        return self.base + branch * self.stride + step",
        "7: a branch writes over its copy of the prefix",
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
        "        SAMPLED if not line.chunk or final else int(line.request.turn.record.slice(end, end + 1)[0])",
        "        SAMPLED if not line.chunk or final or end else 0",
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
        "retract_suspends",
        "roost.sched.ending",
        "    state.sessions.end_turn(request.turn, Outcome.SUSPEND, 0, state.now)",
        "    state.sessions.end_turn(request.turn, Outcome.COMMIT, len(request.turn.record), state.now)",
        "17: a retract takes the finish path",
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
        "roost.sched.room",
        "    for session in state.sessions.idle():",
        "    for session in state.sessions.idle()[:0]:",
        "19: idle sessions pin the pages that running requests need",
    ),
    Bug(
        "admission_reclaims_idle",
        "roost.sched.admission",
        "        for session in idle:",
        "        for session in idle[:0]:",
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
        "    if prefill_ended and turn.session is None:",
        "    if prefill_ended:",
        "a session's running turn shares pages past its commit point, so an abort cannot keep its last page",
    ),
    Bug(
        "last_round_of_a_turn",
        "roost.sched.planner",
        "        return True  # even if its end is certain: that round writes the last token's KV for the next turn",
        "        return request.certain_output_len < request.max_new_tokens",
        "1: at depth 1 a turn whose end is certain stops one round early",
    ),
    Bug(
        "retract_no_more",
        "roost.sched.room",
        "    missing = need - store.ledger.num_free(book) - store.ledger.num_retiring(book)",
        "    missing = need - store.ledger.num_free(book)",
        "more is retracted than the shortfall: pages on their way are not counted",
    ),
    Bug(
        "oldest_not_retracted",
        "roost.sched.room",
        "    newer = [each for each in newest_first if each.arrival > request.arrival]",
        "    newer = [each for each in newest_first if each is not request]",
        "the oldest request is retracted for a newer one",
    ),
    Bug(
        "global_statistics",
        "roost.sched.settle",
        "        count_round((request.counters, state.counters), round_width, len(tokens), kept)",
        "        count_round((request.counters,), round_width, len(tokens), kept)",
        "2: the global counter and the sum over requests part",
    ),
    Bug(
        "stop_inside_a_run",
        "roost.sched.settle",
        "        if token in stop_token_ids:",
        "        if token in stop_token_ids and i == 0:",
        "28: a stop token inside an accepted run is passed over",
    ),
)
