"""Planted bugs that break no output and lose no page, but keep somebody waiting who could go on."""

from tests.planted.bug import Bug

_PLANNER, _SHARING, _ADMISSION = "roost.sched.planner", "roost.sched.prefill_shares", "roost.sched.admission"
_ROOM, _LIMITS, _ENDING, _ENGINE = (
    "roost.sched.reserve",
    "roost.sched.step_limits",
    "roost.sched.ending",
    "roost.sched.engine",
)
_SHARE = "            share = min(request.turn.prefill_len - hi, shares[request.turn.id] + unused)"
_SHARES = "    shares = prefill_shares(wants, budget)"
_PART = "            part = min(sizes[client], -(-budget // (len(clients) - number)))"
_FIRST = "        shares[first] = min(prompts[first].remaining, -(-part // 2) if shorter else part)"
_SHORTER = "            shares[number] = min(prompts[number].remaining, part)"
_TOKENS_LEFT = "        return most if self.tokens.most is None else max(0, min(most, self.tokens.most - num_tokens))"
_READY = "    ready = [request for request in state.running if not request.mark]"
_CANDIDATES = "    for request, lease, hi in candidates:"
_MISSING = "    missing = need - store.ledger.num_free(book) - store.ledger.num_retiring(book)"
_NEWER = "    newer = [each for each in newest_first if each.order > request.order]"
_SOON = "    soon = length + (1 + resolved.depth) * resolved.reserve_of(book)"
_HELD = "    soon = max(prefill_len, lease.device_len_max)"
_TO_HOLD = "    return resolved.pages_to_hold(book, min(soon, resolved.length_to_fit(book, request.length_max)))"
_AVAILABLE = "    available = ledger.num_free(book) + ledger.num_retiring(book) + state.store.tree.num_evictable(book)"
_TRY_FIRST = "        reason = _refused_before(state, line[0]) or _start(state, line[0])"
_NEED = "        need = _charge(state, book, request, lease, request.turn.next_prefill_len) + _promised(state, book)"

PROGRESS_BUGS = (
    # --- prompts crawl ---
    Bug(
        "prompts_run_their_share",
        _PLANNER,
        _SHARE,
        "            share = min(request.turn.prefill_len - hi, shares[request.turn.id] + unused, 1)",
        "every prompt runs one token a step",
    ),
    Bug(
        "new_prompts_run_their_share",
        _PLANNER,
        _SHARE,
        _SHARE + "\n            share = min(share, 1) if request.row_begins else share",
        "the first chunk of a prompt is one token",
    ),
    Bug(
        "prompts_share_the_budget",
        _PLANNER,
        _SHARES,
        "    shares = prefill_shares(wants, min(budget, len(wants)))",
        "a step has one prompt token for each prompt, however many it could have",
    ),
    Bug(
        "budget_is_not_halved",
        _PLANNER,
        _SHARES,
        "    shares = prefill_shares(wants, max(1, budget // 2))",
        "prompts have half of a step's budget, always",
    ),
    Bug(
        "budget_is_not_one_less",
        _PLANNER,
        _SHARES,
        "    shares = prefill_shares(wants, max(1, budget - 1))",
        "prompts have one token less than a step's budget",
    ),
    Bug(
        "budget_is_not_one_more",
        _PLANNER,
        _SHARES,
        "    shares = prefill_shares(wants, budget + 1)",
        "prompts have one token more than a step's budget",
    ),
    Bug(
        "clients_have_their_part",
        _SHARING,
        _PART,
        "            part = min(sizes[client], 1)",
        "the prompts of a client have one token of a step together",
    ),
    Bug(
        "parts_are_equal",
        _SHARING,
        _PART,
        "            part = min(sizes[client], -(-budget // (len(clients) - number + 1)))",
        "a part of the budget is kept for a client that is not there",
    ),
    Bug(
        "a_part_that_is_left_goes_on",
        _SHARING,
        "        clients = sorted(served, key=lambda client: sizes[client])"
        "  # what one client does not need goes to the next",
        "        clients = served",
        "what a later client does not need of its part is lost to those before it",
    ),
    Bug(
        "the_first_has_half",
        _SHARING,
        _FIRST,
        _FIRST.replace("-(-part // 2)", "part // 2"),
        "of one token a step the first prompt has none while shorter ones keep coming",
    ),
    Bug(
        "shorter_prompts_have_half",
        _SHARING,
        _SHORTER,
        "            shares[number] = min(prompts[number].remaining, part, 1)",
        "shorter prompts behind a long one run one token a step",
    ),
    Bug(
        "unused_shares_go_on",
        _PLANNER,
        "            unused += shares[request.turn.id] - (chunk if has_room else 0)",
        "            unused += 0",
        "what a prompt without pages leaves of a step is lost to those behind it",
    ),
    Bug(
        "shares_of_the_preempted_go_on",
        _PLANNER,
        "            unused += shares.get(request.turn.id, 0)",
        "            unused += 0",
        "what a prompt that was just preempted leaves of a step is lost to those behind it",
    ),
    Bug(
        "limited_chunks_are_as_long_as_may_be",
        _LIMITS,
        _TOKENS_LEFT,
        _TOKENS_LEFT.replace("min(most,", "min(1,"),
        "where steps are limited in tokens, a prompt runs one token a step",
    ),
    Bug(
        "prompts_do_not_wait_for_rounds",
        _PLANNER,
        "    if not prefill:",
        "    if not prefill or decode:",
        "prompts wait until nobody decodes",
    ),
    # --- rows stand still ---
    Bug(
        "rounds_do_not_wait_for_prompts",
        _PLANNER,
        _CANDIDATES,
        "    prompts_first = [each for each in candidates if each[2] < each[0].turn.prefill_len]\n"
        "    for request, lease, hi in prompts_first or candidates:",
        "nobody decodes while a prompt is prefilled",
    ),
    Bug(
        "every_row_in_every_step",
        _PLANNER,
        _READY,
        "    ready = [request for request in state.running if not request.mark][state.totals.steps % 2 :]",
        "the first in line sits out every other step",
    ),
    Bug(
        "the_last_row_too",
        _PLANNER,
        _CANDIDATES,
        "    for request, lease, hi in candidates if len(candidates) < 4 else candidates[:-1]:",
        "of four rows or more the last is left out of every step",
    ),
    Bug(
        "prefill_gives_way_to_decode",
        _PLANNER,
        "    state.prefilled_last = num_chunk_tokens > 0",
        "    state.prefilled_last = False",
        "without mixed steps nobody decodes while prompts keep coming",
    ),
    Bug(
        "decode_gives_way_to_prefill",
        _PLANNER,
        "    state.prefilled_last = num_chunk_tokens > 0",
        "    state.prefilled_last = True",
        "without mixed steps prompts wait until nobody decodes",
    ),
    Bug(
        "the_next_suspect_runs",
        _PLANNER,
        "    for suspect in suspects:  # one runs alone, so that a second failure can only be its own",
        "    for suspect in suspects[:1]:",
        "35: nothing is launched while the last token of a suspect is on its way, though others wait to run alone",
    ),
    Bug(
        "steps_follow_each_other",
        _ENGINE,
        "        launched = plan(state, self._next_step)",
        "        launched = plan(state, self._next_step) if not self._launched else None",
        "a step is launched only when the one before has been collected, also at depth 1",
    ),
    Bug(
        "each_book_can_be_short_once",
        _ROOM,
        "    while num_short <= len(state.resolved.pools):  # each book can be short once",
        "    while num_short < len(state.resolved.pools):",
        "a row sits out although pages were just evicted for it",
    ),
    Bug(
        "somebody_is_preempted",
        _ROOM,
        _NEWER,
        _NEWER.replace("each.order > request.order", "each.order < request.order"),
        "nobody makes room for an older request, which waits until those behind it have ended",
    ),
    Bug(
        "no_round_too_many",
        _PLANNER,
        "    end_len = request.turn.prompt_len + request.max_new_tokens - 1"
        "  # of the KV: the last token of the output has none",
        "    end_len = request.turn.prompt_len + request.max_new_tokens",
        "at depth 1 every answer takes a place in one step more than it has use for",
    ),
    # --- too many are preempted ---
    Bug(
        "preempt_for_no_page_more",
        _ROOM,
        _MISSING,
        _MISSING + "\n    missing += missing > 0",
        "one page more is made free than is missing, at the cost of another request",
    ),
    Bug(
        "preempt_for_the_need",
        _ROOM,
        "    _preempt_for(state, request, book, need)",
        "    _preempt_for(state, request, book, need + 1)",
        "the same, where the need is told",
    ),
    Bug(
        "preempt_no_one_more",
        _ROOM,
        "    for victim in victims:",
        "    for victim in victims + newer[:1]:",
        "one request more is preempted than is needed",
    ),
    Bug(
        "preempt_no_one_unmarked",
        _ROOM,
        "        state.mark(victim, Mark.PREEMPT)",
        "        state.mark(victim, Mark.PREEMPT)\n        state.mark(state.running[-1], Mark.PREEMPT)",
        "the last in line is preempted beside whoever is",
    ),
    Bug(
        "everybody_who_can_be_spared_is",
        _ROOM,
        "        others = [each for each in victims if each is not victim]",
        "        others = [each for each in victims if each is victim]",
        "of three that bring more than is missing none is spared, unless one alone would do",
        test="tests/unit/sched/test_reserve.py::"
        "test_of_three_that_bring_more_than_is_missing_the_last_in_line_is_spared",
    ),
    Bug(
        "pages_of_the_preempted_are_on_their_way",
        _ROOM,
        "    leaving = [each.lease for each in state.running if each.mark is not Mark.NONE]",
        "    leaving = [each.lease for each in state.running[:0]]",
        "more are preempted although those that were bring enough",
        test="tests/unit/sched/test_reserve.py::test_pages_that_are_on_their_way_spare_everybody",
    ),
    Bug(
        "preempt_the_last_in_line",
        _ROOM,
        "    newest_first = [each for each in reversed(state.running) if each.mark is Mark.NONE]",
        "    newest_first = [each for each in state.running if each.mark is Mark.NONE]",
        "the second in line is preempted before the last",
    ),
    Bug(
        "the_suspended_keep_their_place",
        _ENDING,
        "    state.enqueue(request)",
        "    state.queued.append(request)",
        "whoever was preempted goes to the end of the queue",
    ),
    # --- admission charges what is needed ---
    Bug(
        "no_round_less_is_charged",
        _ADMISSION,
        _SOON,
        "    soon = length + resolved.depth * resolved.reserve_of(book)",
        "a request is let in with one round less than can be in flight, and somebody is preempted for it",
    ),
    Bug(
        "no_round_more_is_charged",
        _ADMISSION,
        _SOON,
        "    soon = length + (2 + resolved.depth) * resolved.reserve_of(book)",
        "a request waits for the pages of a round that cannot be in flight",
    ),
    Bug(
        "the_last_round_is_charged",
        _ADMISSION,
        _TO_HOLD,
        "    return resolved.pages_to_hold(book, min(soon, request.length_max))",
        "a request near its end is let in without the pages of its last round",
    ),
    Bug(
        "claims_in_flight_are_charged",
        _ADMISSION,
        _HELD,
        "    soon = max(prefill_len, lease.settled_len)",
        "what steps in flight may write is promised to a newcomer",
    ),
    Bug(
        "rounds_of_the_running_are_charged",
        _ADMISSION,
        _HELD,
        "    soon = prefill_len",
        "the running requests are charged for their prompts alone",
    ),
    Bug(
        "promises_are_kept",
        _ADMISSION,
        _NEED,
        _NEED.replace(" + _promised(state, book)", ""),
        "a newcomer is let in on pages that the running requests were promised",
    ),
    Bug(
        "pages_on_their_way_are_available",
        _ADMISSION,
        _AVAILABLE,
        _AVAILABLE.replace(" + ledger.num_retiring(book)", ""),
        "a request waits although pages that a step in flight still reads are about to be free",
    ),
    Bug(
        "cached_pages_are_available",
        _ADMISSION,
        _AVAILABLE,
        _AVAILABLE.replace(" + state.store.tree.num_evictable(book)", ""),
        "a request waits for pages that only the prefix cache holds",
    ),
    # --- the queue stands still ---
    Bug(
        "all_that_fit_are_admitted",
        _ADMISSION,
        _TRY_FIRST,
        _TRY_FIRST + '\n        if not reason:\n            return ""',
        "one request starts in a tick, however many could",
    ),
    Bug(
        "the_first_in_line_is_tried",
        _ADMISSION,
        _TRY_FIRST,
        "        reason = _refused_before(state, line[0]) or _start(state, line[min(1, len(line) - 1)])",
        "the head of the queue is skipped",
    ),
    Bug(
        "one_may_pass",
        _ADMISSION,
        "        if reason and not _let_one_pass(state, line):",
        "        if reason:",
        "small requests wait behind one that waits for pages",
    ),
    Bug(
        "more_than_one_is_looked_at",
        _ADMISSION,
        "LOOKED_AT_MAX = 32  # requests behind it that are considered, so that a long queue costs a tick no more",
        "LOOKED_AT_MAX = 1",
        "behind one that waits for pages only the next is considered",
    ),
    Bug(
        "one_may_pass_more_than_once",
        _ADMISSION,
        "OVERTAKEN_MAX = 8  # requests that may overtake one that waits for pages",
        "OVERTAKEN_MAX = 1",
        "small requests wait behind one that waits for pages, once one has passed",
    ),
    Bug(
        "refusals_are_reconsidered",
        _ADMISSION,
        '    return "" if better else refusal.reason',
        "    return refusal.reason",
        "who was refused for want of pages waits until nobody runs",
    ),
    Bug(
        "no_more_run_than_may",
        _ADMISSION,
        "    if len(state.running) >= state.resolved.sched.max_running:",
        "    if len(state.running) > state.resolved.sched.max_running:",
        "at depth 1 one request more runs than --max-running allows",
    ),
    Bug(
        "no_more_run_than_a_step_holds",
        _ADMISSION,
        "    is_suspect = request.num_failures > 0  # it will run alone first, so the size of steps does not matter",
        "    is_suspect = True",
        "requests start, and hold pages, that have no place in any step",
    ),
    Bug(
        "as_many_run_as_a_step_holds",
        _ADMISSION,
        "    return state.step_limits.has_place(num_running - 1, (num_running - 1) * width, width)",
        "    return state.step_limits.has_place(num_running - 1, num_running * width, width)",
        "where steps are limited in tokens, one request less runs than could",
    ),
    Bug(
        "refusal_sees_shared_prompts",
        _ADMISSION,
        "        (state.store.tree.num_pinned, refusal.num_pinned),",
        "",
        "who was refused before a running request shared their prompt waits until that has ended",
        test="tests/unit/sched/test_admission.py::test_who_was_refused_starts_once_most_of_its_prompt_is_shared",
    ),
    # --- limits outlast their cause ---
    Bug(
        "good_steps_are_counted",
        _LIMITS,
        "        self.num_waited += 1",
        "        self.num_waited += 0",
        "a limit on the size of steps is never raised",
    ),
    Bug(
        "patience_ends",
        _LIMITS,
        "        if self.num_waited >= self.patience:",
        "        if self.num_waited >= 8 * self.patience:",
        "a limit on the size of steps is raised after eight times as many good ones as it should be",
    ),
)
