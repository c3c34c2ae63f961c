"""Planted bugs of recurrent layers: states at wrong positions, lost, leaked, or gone on from where they must not be."""

from tests.planted.bug import Bug

_COLUMNS = "roost.sched.state_columns"
_STATES = "roost.kv.states"
_STORE = "roost.kv.store"
_TABLE = "roost.session.table"
_TREE = "roost.kv.radix"
_CACHE = "roost.kv.state_cache"
_WANTED = "roost.kv.wanted_states"

_MODES = "tests/sim/test_state_modes.py::"

STATE_BUGS = (
    # --- positions ---------------------------------------------------------------------------------------------
    Bug(
        "state_of_rejected_drafts",
        _COLUMNS,
        "        return wanted_of_round(states, lease, lease.claimed_len)",
        "        return wanted_of_round(states, lease, lease.device_len_max)",
        "a round keeps a state that drafts have had a say in which may be rejected",
    ),
    Bug(
        "state_at_the_wrong_position",
        _COLUMNS,
        "            kept_at[i, number], kept_in[i, number] = at, page",
        "            kept_at[i, number], kept_in[i, number] = at, planned[-1 - number][1]",
        "two states that one step keeps change places",
    ),
    Bug(
        "state_written_in_place",
        _COLUMNS,
        "            kept_at[i, number], kept_in[i, number] = at, page",
        "            kept_at[i, number], kept_in[i, number] = at, int(sources[i]) or page",
        "a state that others go on from is written over",
    ),
    Bug(
        "state_of_nothing",
        _COLUMNS,
        "    sources, starts = (np.zeros(len(leases), dtype=np.int32) for _ in range(2))",
        "    sources, starts = (np.full(len(leases), page, dtype=np.int32) for page in (1, 0))",
        "who comes to a row starts from what somebody else has left, not from nothing",
    ),
    Bug(
        "state_before_it_is_kept",
        _STATES,
        "        most = self._ledger.collected if proven else PLANNED - 1",
        "        most = self._ledger.collected if proven else PLANNED",
        "a step starts from a state that it has yet to keep itself",
    ),
    Bug(
        "state_past_a_cut",
        _STORE,
        "            self.states.cut(lease, length)",
        "            assert self.states.pool",
        "an aborted or rewound sequence goes on from a state that has seen what was taken back",
    ),
    Bug(
        "state_one_past_a_cut",
        _STATES,
        "        for position in [each for each in (*lease.states, *lease.tree_states) if each > length]:",
        "        for position in [each for each in (*lease.states, *lease.tree_states) if each > length + 1]:",
        "the state that has seen one token more than is left stays",
    ),
    Bug(
        "state_of_a_broken_step",
        _STATES,
        "        for position in [each for each, state in lease.states.items() if state.step "
        "> self._ledger.collected]:",
        "        for position in [each for each, state in lease.states.items() if state.step == PLANNED]:",
        "a sequence goes on from a state that a broken step never wrote",
    ),
    Bug(
        "state_published_unproven",
        _STATES,
        "            if not is_whole or own.step > self._ledger.collected:",
        "            if not is_whole:",
        "a step that fails later leaves a state in the tree that it never wrote",
    ),
    # --- what is found -----------------------------------------------------------------------------------------
    Bug(
        "hit_past_the_last_state",
        _TREE,
        "            ends = [node.end for node, taken in path if taken == len(node.key) and node.state != NULL_PAGE]",
        "            ends = [node.end for node, taken in path if taken == len(node.key)]",
        "a prefix hit is as long as its KV, although no state is that deep",
    ),
    Bug(
        "hit_in_the_midst_of_a_node",
        _TREE,
        "            ends = [node.end for node, taken in path if taken == len(node.key) and node.state != NULL_PAGE]",
        "            ends = [node.end for node, taken in path if node.state != NULL_PAGE]",
        "the state at a node's end is gone on from by a prompt that leaves it before",
    ),
    Bug(
        "split_copies_the_state",
        _TREE,
        "            last_used=node.last_used,",
        "            last_used=node.last_used, state=node.state,",
        "both halves of a node that is split have the state of its end",
    ),
    Bug(
        "inputs_are_shared",
        "roost.kv.lease",
        "        return 0 if book.is_replayed else self.shared_len // page_size",
        "        return self.shared_len // page_size",
        "inputs behind a state that is shared are taken for the tree's, which has none",
    ),
    # --- inputs ------------------------------------------------------------------------------------------------
    Bug(
        "inputs_behind_the_last_state",
        _STORE,
        "            return floor_to(self.states.last_at(lease, max(0, length - 1), proven=True), self.page_size)",
        "            return floor_to(self.states.last_at(lease, max(0, length - 1)), self.page_size)",
        "inputs are let go of in front of a state that a step in flight may not come to write",
    ),
    Bug(
        "inputs_of_the_last_token",
        _STORE,
        "            return floor_to(self.states.last_at(lease, max(0, length - 1), proven=True), self.page_size)",
        "            return floor_to(self.states.last_at(lease, length, proven=True), self.page_size)",
        "a turn that has to run its last token again finds no inputs behind the state before it",
        test=_MODES + "test_a_turn_without_new_tokens_after_an_abort_runs_its_last_token_alone[4-depth1]",
    ),
    Bug(
        "inputs_not_looked_for",
        _STATES,
        "        return length if is_near and self._has_inputs(lease, position, length) else position",
        "        return length",
        "a cut ends where inputs behind the last state are gone",
    ),
    Bug(
        "inputs_midst_of_a_page",
        _STORE,
        "                pages.pop()  # a state is in the midst of a page that was let go: "
        "the rest of it will be written again",
        "                lease.proven_len = min(lease.proven_len, length)",
        "the rest of a page that was let go up to a state has nowhere to be written",
    ),
    Bug(
        "state_of_long_prompts",
        _WANTED,
        "    if at_page > last and (is_final or end - last > pool.interval):",
        "    if at_page > last and is_final:",
        "a prompt of many chunks runs all of it through the recurrence again in each",
    ),
    Bug(
        "state_of_rounds",
        _COLUMNS,
        "        return wanted_of_round(states, lease, lease.claimed_len)",
        "        return NO_STATES",
        "a long output keeps no states, and the inputs since the prompt",
    ),
    # --- what is kept ------------------------------------------------------------------------------------------
    Bug(
        "state_of_the_commit_point",
        _STATES,
        "        lease.turn_end, lease.rollback_state = turn_end, self.last_at(lease, max(0, "
        "rollback_len - 1), proven=True)",
        "        lease.turn_end, lease.rollback_state = turn_end, 0",
        "the state behind the commit point is gone when a turn is aborted",
    ),
    Bug(
        "state_of_the_turn_end",
        _STATES,
        "        lease.turn_end, lease.rollback_state = turn_end, self.last_at(lease, max(0, "
        "rollback_len - 1), proven=True)",
        "        lease.turn_end, lease.rollback_state = 0, self.last_at(lease, max(0, rollback_len - 1), proven=True)",
        "a rewind to the end of a turn runs tokens again, since no state is kept there",
    ),
    Bug(
        "state_of_the_pairs_turn_end",
        _TABLE,
        "        turn_end = 0 if session is None else max(0, turn.commit_len - self._pair)",
        "        turn_end = 0 if session is None else turn.commit_len",
        "with pairs the state at a turn's end is one past where a rewind goes on",
    ),
    Bug(
        "states_of_the_last_turns",
        _STATES,
        "        kept, before = ends[-self.pool.num_turns :] if self.pool.num_turns else [], lease.shared_len",
        "        kept, before = ends[: self.pool.num_turns] if self.pool.num_turns else [], lease.shared_len",
        "the states of a session's first turns are kept, not those of its last",
        test=_MODES + "test_of_many_turns_the_ends_of_the_last_are_kept",
    ),
    Bug(
        "states_of_no_turns",
        _STATES,
        "        kept, before = ends[-self.pool.num_turns :] if self.pool.num_turns else [], lease.shared_len",
        "        kept, before = ends[-self.pool.num_turns :], lease.shared_len",
        "where no ends of turns are to be kept, all are",
    ),
    Bug(
        "state_of_the_last_page",
        _STATES,
        "        keep = {last, self._last_at_page(lease, lease.settled_len - 1), *self._lasting(lease)}",
        "        keep = {last, *self._lasting(lease)}",
        "a preempted sequence finds nothing behind its prompt: it kept no state at a page's end",
    ),
    # --- owners ------------------------------------------------------------------------------------------------
    Bug(
        "state_leaks_when_let_go",
        _STATES,
        "            self._ledger.release(self.book, [own.page], leased(lease.id), lease.last_step)",
        "            assert own.page",
        "a state that is let go of stays taken",
    ),
    Bug(
        "state_leaks_at_the_end",
        _STORE,
        "            self.states.cut(lease, -1)",
        "            self.states.cut(lease, lease.settled_len)",
        "an ended request's states stay taken",
    ),
    Bug(
        "state_leaks_with_its_node",
        _TREE,
        "                    self.state_cache.drop(node)",
        "                    self.state_cache.offer(node)",
        "a node's state stays when its pages are evicted",
    ),
    Bug(
        "state_freed_in_flight",
        _STATES,
        "            self._ledger.release(self.book, [own.page], leased(lease.id), lease.last_step)",
        "            self._ledger.release(self.book, [own.page], leased(lease.id), self._ledger.collected)",
        "13: a state is free while a launched step still reads or writes it",
    ),
    Bug(
        "state_unpinned",
        _STATES,
        "            if position >= needed_from:",
        "            if position > needed_from:",
        "a state that is given to the tree may be evicted while its lease goes on from it",
    ),
    Bug(
        "pinned_state_not_evicted",
        _CACHE,
        "            if node is not None and self._is_current(entry) and not node.state_pins:",
        "            if node is not None and self._is_current(entry):",
        "eviction takes a state that a lease goes on from",
    ),
    Bug(
        "spare_states_dropped",
        "roost.sched.reserve",
        "    if book == state.store.state_book:",
        "    if book == state.store.state_book and need < 0:",
        "a request is preempted while states are kept for later alone",
    ),
    Bug(
        "spare_states_only",
        _STATES,
        "        return [each for each in self._lasting(lease) if each < last and each != lease.rollback_state]",
        "        return [each for each in self._lasting(lease) if each != lease.rollback_state]",
        "where states are short, one is dropped that a sequence goes on from",
    ),
    Bug(
        "spare_states_not_the_commit_points",
        _STATES,
        "        return [each for each in self._lasting(lease) if each < last and each != lease.rollback_state]",
        "        return [each for each in self._lasting(lease) if each < last]",
        "where states are short, the one behind a running turn's commit point is dropped",
        test=_MODES + "test_where_states_are_short_a_turn_that_is_aborted_still_goes_back_to_its_commit_point[depth0]",
    ),
)
