"""Planted bugs in how speculation is chosen, planned and counted."""

from tests.planted.bug import Bug

_ROUTING = "tests/unit/test_routing.py::"
_OPTIONS = "tests/unit/test_spec_config.py"

SPEC_BUGS = (
    Bug(
        "claim_follows_width",
        "roost.sched.planner",
        "        size, most = (line.chunk, line.chunk) if line.chunk else (1, shape.accept_max_of(line.width))",
        "        size, most = (line.chunk, line.chunk) if line.chunk else (1, 1)",
        "a round's claim does not bound what its width can write: the next step has too few pages",
    ),
    Bug(
        "narrow_claim_is_narrow",
        "roost.sched.planner",
        "        size, most = (line.chunk, line.chunk) if line.chunk else (1, shape.accept_max_of(line.width))",
        "        size, most = (line.chunk, line.chunk) if line.chunk else (1, shape.accept_max)",
        "a round without drafts is charged for those it does not carry",
        test="tests/unit/sched/test_widths.py::test_a_claim_is_as_large_as_its_round_can_accept",
    ),
    Bug(
        "batch_limit",
        "roost.sched.planner",
        "    return 1 if most is not None and num_rounds > most else state.resolved.spec.tokens",
        "    return state.resolved.spec.tokens if most is None or num_rounds else 1",
        "--spec-max-batch is ignored",
    ),
    Bug(
        "batch_limit_is_inclusive",
        "roost.sched.planner",
        "    return 1 if most is not None and num_rounds > most else state.resolved.spec.tokens",
        "    return 1 if most is not None and num_rounds >= most else state.resolved.spec.tokens",
        "a step with as many rows as --spec-max-batch carries no drafts",
    ),
    Bug(
        "budget_follows_width",
        "roost.sched.planner",
        "    budget = max(chunk - len(decode) * width, chunk // _PREFILL_SHARE, 1)",
        "    budget = max(chunk - len(decode) * state.resolved.spec.tokens, chunk // _PREFILL_SHARE, 1)",
        "rounds without drafts take tokens from the prefill that they do not use",
        test="tests/unit/sched/test_widths.py::test_the_token_budget_counts_the_width_of_the_rounds",
    ),
    Bug(
        "history_is_sent",
        "roost.sched.planner",
        "    needs_tokens = reads_history or submit.sampling.penalises",
        "    needs_tokens = submit.sampling.penalises",
        "n-gram drafts are looked up in nothing",
    ),
    Bug(
        "history_is_read",
        "roost.spec.shape",
        "        return self.speculates and self.draft_kv is DraftKv.NONE",
        "        return False",
        "no drafter says that it reads the tokens",
        test="tests/unit/spec/test_shape.py::test_only_a_drafter_without_kv_reads_the_history",
    ),
    Bug(
        "rounds_with_drafts_count",
        "roost.sched.settle",
        "    if num_drafts:  # plain decoding, and a round without drafts, say nothing about speculation",
        "    if tokens:",
        "rounds without drafts count as rounds: acceptance looks worse than it is",
    ),
    Bug(
        "branch_pages_declared",
        "roost.config",
        "    if spec.topk > 1 and memory.page_size > 1 and not backend.branch_pages:",
        "    if spec.topk > 1 and memory.page_size > 1 and not backend.name:",
        "a tree over large pages runs on a backend that reads other branches' slots",
        test=_ROUTING + "test_a_tree_over_large_pages_needs_a_backend_with_branch_pages",
    ),
    Bug(
        "recurrent_state_falls_back",
        "roost.config",
        "    if traits.recurrent_state and sched.overlap:",
        "    if not traits.vocab_size:",
        "a model whose state cannot be cut back is overlapped",
        test=_ROUTING + "test_a_model_with_recurrent_state_falls_back_to_depth_0_with_a_warning",
    ),
    Bug(
        "large_pages_keep_depth",
        "roost.config",
        "    if traits.recurrent_state and sched.overlap:",
        "    if (traits.recurrent_state or memory.page_size > 1) and sched.overlap:",
        "pages of more than one token force depth 0",
        test=_ROUTING + "test_large_pages_do_not_force_depth_0",
    ),
    Bug(
        "ignored_options_refused",
        "roost.config",
        '            if name != "spec" and value is not None:',
        '            if name != "spec" and value == "":',
        "options of speculation without --spec are ignored in silence",
        test=_OPTIONS,
    ),
    Bug(
        "ngram_reads_no_head",
        "roost.config",
        "    if config.draft is not None and not has_head:",
        '    if config.draft == "":',
        "--draft is ignored by --spec ngram",
        test=_OPTIONS,
    ),
)
