"""Planted bugs in what keeps a step to the size that its device can do."""

from tests.planted.bug import Bug

_LIMITS = "roost.sched.step_limits"
_TESTS = "tests/unit/sched/test_step_limits.py::"

SIZE_BUGS = (
    Bug(
        "steps_keep_to_their_size",
        "roost.sched.planner",
        "        if is_limited and not limits.has_place(len(rows), num_tokens, width):",
        "        if width < 0:",
        "a step that is known to be too large is launched again and again",
    ),
    Bug(
        "a_lone_chunk_is_cut_before_its_request_ends",
        "roost.sched.settle",
        "            request.num_failures = request.num_failures + 1 if is_own else 1",
        "            request.num_failures += 1",
        "a prompt whose chunks are too large for the device ends with an error",
        test=_TESTS + "test_a_device_for_few_tokens_makes_chunks_and_batches_shorter",
    ),
    Bug(
        "larger_steps_are_tried_ever_later",
        _LIMITS,
        "            self.patience *= 2",
        "            self.patience *= 1",
        "a device that is too small breaks a step every so often, for ever",
        test=_TESTS + "test_a_device_that_is_too_small_breaks_few_steps_in_a_long_time",
    ),
    Bug(
        "larger_steps_are_tried",
        _LIMITS,
        "        if self.num_waited >= self.patience:",
        "        if self.num_waited < 0:",
        "a fault that passed limits the engine for ever",
        test=_TESTS + "test_a_fault_that_passes_limits_nobody_for_ever",
    ),
    Bug(
        "half_of_what_broke_is_enough",
        _LIMITS,
        "        self.bad, self.most, self.suspects = size, max(1, self.good, size // 2), suspects",
        "        self.bad, self.most, self.suspects = size, max(1, size - 1), suspects",
        "a device that is too small breaks a step for every row too many",
        test=_TESTS + "test_a_device_that_is_too_small_breaks_few_steps_in_a_long_time",
    ),
    Bug(
        "one_request_limits_nobody",
        "roost.sched.settle",
        "            state.step_limits.acquit(request.turn.id)",
        "            state.step_limits.acquit(-1)",
        "35: a request that breaks every step leaves the others smaller batches",
        test=_TESTS + "test_what_one_request_breaks_alone_limits_nobody",
    ),
    Bug(
        "suspects_prove_themselves_at_once",
        "roost.sched.admission",
        "    is_suspect = request.num_failures > 0  # it will run alone first, so the size of steps does not matter",
        "    is_suspect = False",
        "35: others run in smaller batches until a request that breaks every step has its turn",
        test=_TESTS + "test_what_one_request_breaks_alone_limits_nobody",
    ),
    Bug(
        "what_has_worked_is_not_suspected_at_once",
        _LIMITS,
        "            self.unexplained = size",
        "            self.unexplained = None",
        "steps of a size that works now and then break again and again",
        test=_TESTS + "test_a_size_that_has_worked_is_suspected_only_when_it_breaks_again",
    ),
    Bug(
        "rounds_are_narrow_where_tokens_are_few",
        "roost.sched.planner",
        "    if most is None or not num_rounds:",
        "    if True:",
        "where a step may have few tokens, one row's drafts take them all and the others stand still",
        test=_TESTS + "test_where_tokens_are_few_rounds_are_narrow_and_all_of_them_go_on",
    ),
    Bug(
        "a_limit_between_widths_is_left",
        _LIMITS,
        "            further = self.most + (self.most > self.good)  # no step had that size: rounds come in widths",
        "            further = self.most",
        "a fault that passed limits steps of wide rounds for ever",
        test=_TESTS + "test_a_fault_that_passes_limits_nobody_also_where_sizes_come_in_widths",
    ),
)
