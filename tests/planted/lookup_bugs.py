"""Planted bugs in how looked-up drafts go beside a head: what is planned, claimed, counted and learned."""

from tests.planted.bug import Bug

_PLANNER, _SETTLE = "roost.sched.planner", "roost.sched.settle"
_STALE = """        if lease.epoch != epoch and not chunk and lookups[i] is not None:
            _learn(state, request, lookups[i], tokens[:accept_len], width)"""
_STALE_COUNTED = """        if lease.epoch != epoch and request.row is not None and not chunk and width > 1:
            _count_round(state, request, lookups[i], tokens[:accept_len], width, accept_len, 0)"""
_EPOCH = "        if lease.epoch != epoch:  # the request ended, was preempted or failed meanwhile"

LOOKUP_BUGS = (
    Bug(
        "wide_claim",
        _PLANNER,
        "    of_rounds = {width: Claim(step=step, size=1, most=accept_max_of(width)) for width in set(chosen.widths)}",
        "    narrow = Claim(step=step, size=1, most=accept_max_of(chosen.rounds.width))\n"
        "    of_rounds = dict.fromkeys(chosen.widths, narrow)",
        "a wide round is charged for the step's own width: the next step has too few pages",
    ),
    Bug(
        "wide_reserve",
        _PLANNER,
        "        needs = (chunk,) * len(reserves) if chunk else reserves",
        "        needs = (chunk,) * len(reserves) if chunk else (rounds.width,) * len(reserves)",
        "a wide round has pages for the step's own width alone",
    ),
    Bug(
        "lookup_fits_its_round",
        _PLANNER,
        "        widest = {turn: max(width, *table) for turn, table in zip(turns, tables, strict=True)}",
        "        widest = {turn: max(width, table[1]) for turn, table in zip(turns, tables, strict=True)}",
        "more may be looked up for a round than it has room to verify",
    ),
    Bug(
        "limited_steps_are_not_widened",
        _PLANNER,
        "        most = width if is_limited else widths.widest_of(len(decode))",
        "        most = widths.widest_of(len(decode))",
        "where larger steps failed, one row's lookup takes the place of the others",
    ),
    Bug(
        "own_lookup_widths",
        _PLANNER,
        "    return _ints([tables.get(request.turn.id, none) for request in chosen.requests])",
        "    return _ints([tables.get(each.turn.id, none) for each in chosen.requests[1:] + chosen.requests[:1]])",
        "what to look up is told to the row before",
    ),
    Bug(
        "no_wide_rounds_beside_prompts",
        _PLANNER,
        "    elif repeating and not has_prefill and not is_limited:",
        "    elif repeating and not is_limited:",
        "rounds are widened while a prompt waits: its steps take longer, and their cost is not known",
    ),
    Bug(
        "batch_limit_of_lookups",
        "roost.spec_widths",
        "        if is_limited or not self.is_auto or not self.shape.lookup_steps:",
        "        if not self.is_auto or not self.shape.lookup_steps:",
        "--spec-max-batch does not hold for drafts that are looked up",
    ),
    Bug(
        "scope_of_a_client",
        _PLANNER,
        "        scope=turn.scoped_salt if state.resolved.lookup == SHARED_LOOKUP else None,",
        "        scope=submit.cache_salt if state.resolved.lookup == SHARED_LOOKUP else None,",
        "drafts are looked up in what other clients say, and their latency tells of it",
    ),
    Bug(
        "own_texts_alone",
        _PLANNER,
        "        scope=turn.scoped_salt if state.resolved.lookup == SHARED_LOOKUP else None,",
        "        scope=turn.scoped_salt,",
        "--spec-lookup own looks drafts up in others' texts",
    ),
    Bug(
        "lookups_counted_by_their_own",
        _SETTLE,
        "            looked_up = shape.lookup_nodes_of(width)",
        "            looked_up = shape.head_steps_of(width)",
        "looked-up drafts are counted as if the head had made them",
    ),
    Bug(
        "head_offers_what_it_drafts",
        _SETTLE,
        "            offered = max(shape.head_steps_of(width), len(tokens) - 1)",
        "            offered = shape.depth_max",
        "a head is said to have drafted what nobody did",
    ),
    Bug(
        "verified_nodes_count",
        _SETTLE,
        "    num_nodes = plan.query_lens if result.lookups is None else result.lookups.num_nodes",
        "    num_nodes = plan.query_lens",
        "drafts that a round was too narrow to verify count as refused",
    ),
    Bug(
        "head_is_judged_by_its_own",
        _SETTLE,
        "    num_head_drafts = shape.head_steps_of(width) if shape.pair and not is_used else 0",
        "    num_head_drafts = shape.head_steps_of(width) if shape.pair else 0",
        "what was looked up is learned as the head's",
    ),
    Bug(
        "ended_epochs_teach_nothing",
        _SETTLE,
        _EPOCH,
        _STALE + "\n" + _EPOCH,
        "what a round of an ended epoch looked up is learned, though its tokens were never said",
    ),
    Bug(
        "ended_epochs_count_nothing",
        _SETTLE,
        _EPOCH,
        _STALE_COUNTED + "\n" + _EPOCH,
        "rounds of an ended epoch count, though their tokens are drawn again",
    ),
)
