"""Settle: applies a collected step's results, and marks (abort, preempt), to the requests.

Runs every tick, with or without a result. A result counts only for the lease epoch it was launched in. Accepted tokens
past the end of the output are cut off here, before anything is kept. Called by the loop.
"""

from collections.abc import Callable, Sequence
from itertools import takewhile

from roost.errors import InvariantError
from roost.kv.lease import Lease
from roost.messages import NO_LOGPROBS, PromptLogprobs, TokenLogprobs, Tokens
from roost.sched.ending import abort, finish, start_followers, suspend
from roost.sched.live import show_tree
from roost.sched.request import LaunchedStep, Mark, Request
from roost.sched.state import State
from roost.step import LogprobColumns, StepId, StepPlan, StepResult

StopAt = Callable[[int, int], int | str | None]  # (index, token) -> the stop id or text that it completes
_Lookup = tuple[int, bool, list[int]]  # tokens found again, whether what followed was drafted, and what followed

_FAILURES_MAX = 1  # a second step that breaks at the same place, where it ran alone, ends a request


def settle(state: State, launched: LaunchedStep, result: StepResult) -> None:
    """Apply a step's results, row by row."""
    plan = launched.plan
    if result.step != plan.step or result.rows.tolist() != plan.rows.tolist():
        raise InvariantError(f"result of step {result.step} answers the plan of step {plan.step}")
    state.store.collected(plan.step)
    state.rows.collected(plan.step)
    state.totals.steps += 1
    state.step_limits.worked(plan)
    show_tree(state, launched, result)
    has_window = state.store.window_book is not None
    rounds: list[tuple[int, int, bool]] = []  # of live ones: tokens accepted, nodes, whether its drafts were looked up
    is_looked_up, lookups = _looked_up(plan, result), _lookups(plan, result)
    num_nodes = plan.query_lens if result.lookups is None else result.lookups.num_nodes
    columns = (result.epochs, result.accept_lens, result.tokens, plan.is_final, num_nodes)
    rows = zip(
        launched.requests, launched.leases, launched.chunks, *(column.tolist() for column in columns), strict=True
    )
    for i, (request, lease, chunk, epoch, accept_len, tokens, is_final, width) in enumerate(rows):
        if lease.epoch != epoch:  # the request ended, was preempted or failed meanwhile
            continue
        state.store.settle(lease, plan.step, chunk or accept_len)
        if not chunk:
            rounds.append((accept_len, width, is_looked_up[i]))
            state.totals.count_round(width)
            said, lookup = tokens[:accept_len], lookups[i]
            if lookup is not None:
                _learn(state, request, lookup, said, width)
            _take_tokens(state, request, result, i, said, width, lookup)
        else:
            _take_prompt_logprobs(state, request, plan, result, i)
            if is_final:
                _take_tokens(state, request, result, i, tokens[:accept_len], 1)
        if request.row is None:  # it has ended
            continue
        if request.num_failures and lease.settled_len > request.failed_len:  # past where it broke
            request.num_failures = 0
        if is_final:
            _share_prompt(state, request)
        if has_window:
            state.store.slide(lease)
    _let_go_of_states(state, launched)
    timed = state.step_times.collected(plan.step, state.now)
    if state.resolved.widths.is_auto:
        accept_lens = [accept_len for accept_len, _, is_found in rounds if not is_found]
        looked_up = [(width, accept_len) for accept_len, width, is_found in rounds if is_found]
        state.draft_policy.collected(timed, accept_lens, looked_up, _wide(state, plan))


def _let_go_of_states(state: State, launched: LaunchedStep) -> None:
    """A session keeps more states while its turn's last step may break: that one has been collected now."""
    if state.store.states is None:
        return
    for lease, epoch in zip(launched.leases, launched.plan.epochs.tolist(), strict=True):
        if lease.epoch != epoch:
            state.store.slide(lease)


def _wide(state: State, plan: StepPlan) -> list[int]:
    """Nodes of the rounds that were planned wider than the others of their step, where none is narrowed."""
    if state.resolved.widths.narrows or not state.resolved.spec.lookup_steps or plan.has_chunks:
        return []
    return [width for width in plan.query_lens.tolist() if width > plan.head_width]


def _looked_up(plan: StepPlan, result: StepResult) -> list[bool]:
    """For each row whether its drafts were looked up, where another way to draft was open to it."""
    if result.lookups is None or plan.lookup_widths is None:
        return [False] * len(plan.rows)
    found: list[bool] = (result.lookups.is_used & (plan.query_lens > 1)).tolist()
    return found


def _lookups(plan: StepPlan, result: StepResult) -> Sequence[_Lookup | None]:
    """What was looked up for each row's round; None where nothing was, or the round was planned without drafts."""
    columns = result.lookups
    if columns is None:
        return [None] * len(plan.rows)
    found = zip(columns.match_lens.tolist(), columns.is_used.tolist(), columns.drafts.tolist(), strict=True)
    return [each if width > 1 else None for each, width in zip(found, plan.query_lens.tolist(), strict=True)]


def _take_tokens(
    state: State,
    request: Request,
    result: StepResult,
    row: int,
    tokens: list[int],
    width: int,
    lookup: _Lookup | None = None,
) -> None:
    """Add tokens sampled at `width` nodes to the output, cut at its end, and finish the request if that is here."""
    if row in result.errors:  # the step is good, and what this row drew means nothing
        abort(state, request, "error", result.errors[row])
        return
    submit, record = request.submit, request.turn.record
    known_len = len(record)
    output_len = known_len - request.turn.prompt_len
    may_stop = request.stop_finder is not None or not submit.stop_token_ids.isdisjoint(tokens)
    stop_at = _stop_at(request, output_len) if may_stop else None
    kept, reason, matched = cut_output(tokens, request.max_new_tokens - output_len, stop_at)
    if width > 1:  # plain decoding, and a round without drafts, say nothing about speculation
        num_forced = 0 if result.num_forced is None else int(result.num_forced[row])
        _count_round(state, request, lookup, tokens, width, kept, num_forced)
    record.append(tokens)
    if kept:
        state.totals.completion_tokens += kept
        wants_logprobs = submit.num_top_logprobs is not None  # the device has them of all rows if one asks
        wanted = _row_logprobs(result.logprobs, row, request).first(kept) if wants_logprobs else NO_LOGPROBS
        state.send(request, Tokens(request_id=submit.request_id, tokens=tuple(tokens[:kept]), logprobs=wanted))
    if reason is not None:
        finish(state, request, reason, known_len + kept, matched)


def _learn(state: State, request: Request, lookup: _Lookup, tokens: list[int], width: int) -> None:
    """Learn who drafts well from a round of `width` nodes that said `tokens`."""
    shape, (match_len, is_used, drafts) = state.resolved.spec, lookup
    num_head_drafts = shape.head_steps_of(width) if shape.pair and not is_used else 0
    state.draft_policy.lookups.note(request.drafts, match_len, drafts, tokens, num_head_drafts)


def _count_round(
    state: State,
    request: Request,
    lookup: _Lookup | None,
    tokens: list[int],
    width: int,
    kept: int,
    num_forced: int,
) -> None:
    """Count a round of `width` nodes that said `tokens`."""
    shape, offered, looked_up, right = state.resolved.spec, width - 1, 0, 0
    if lookup is not None and shape.pair:
        _, is_used, drafts = lookup
        if is_used:
            looked_up = shape.lookup_nodes_of(width)
            right = sum(1 for _ in takewhile(_is_same, zip(drafts[:looked_up], tokens[:-1], strict=False)))
        elif shape.topk == 1:  # behind the head's drafts are forced ones, or none
            offered = max(shape.head_steps_of(width), len(tokens) - 1)
    for counters in (request.spec_counters, state.spec_counters):
        counters.count_round(offered, len(tokens), kept, num_forced, lookup_offered=looked_up, lookup_accepted=right)


def _is_same(pair: tuple[int, int]) -> bool:
    return pair[0] == pair[1]


def cut_output(tokens: list[int], room: int, stop_at: StopAt | None) -> tuple[int, str | None, int | str | None]:
    """How many of `tokens` belong to the output, why it ends there, if it does, and which stop was met."""
    if stop_at is not None:
        for i, token in enumerate(tokens[:room]):
            matched = stop_at(i, token)
            if matched is not None:
                return i + 1, "stop", matched
    return (room, "length", None) if len(tokens) >= room else (len(tokens), None, None)


def _stop_at(request: Request, output_len: int) -> StopAt:
    """Which stop, if any, each of the next tokens of a request meets; nothing stops its first min_new_tokens."""
    submit, finder = request.submit, request.stop_finder

    def stop_at(i: int, token: int) -> int | str | None:
        if output_len + i < submit.min_new_tokens:
            if finder is not None:
                finder.skip([token])
            return None
        found = finder.feed([token]) if finder is not None else None
        if token in submit.stop_token_ids:
            return token
        return found[1] if found is not None else None

    return stop_at


def _take_prompt_logprobs(state: State, request: Request, plan: StepPlan, result: StepResult, row: int) -> None:
    """Report the log-probabilities of prompt tokens that a chunk computed, once each, also if it runs again."""
    first, end = int(plan.prompt_logprob_starts[row]), int(plan.prompt_logprob_ends[row])
    if first < 0:
        return
    request.prompt_logprobs_next = end
    logprobs = _row_logprobs(result.prompt_logprobs, row, request)
    state.send(request, PromptLogprobs(request_id=request.id, start=first + 1, logprobs=logprobs))


def _row_logprobs(columns: LogprobColumns | None, row: int, request: Request) -> TokenLogprobs:
    """The log-probabilities of one row, with as many alternatives as it asked for; still columns, for speed."""
    if columns is None:
        return NO_LOGPROBS
    num_top = request.submit.num_top_logprobs or 0
    entries = slice(columns.offsets[row], columns.offsets[row + 1])
    top_ids = columns.top_ids[entries, :num_top]  # a small vocabulary has fewer
    return TokenLogprobs(
        num_top_logprobs=top_ids.shape[1],
        logprobs=columns.logprobs[entries].tobytes(),
        top_ids=top_ids.tobytes(),
        top_logprobs=columns.top_logprobs[entries, :num_top].tobytes(),
    )


def _share_prompt(state: State, request: Request) -> None:
    """A prompt has been run: others may use its KV."""
    turn = request.turn
    if turn.session is None:
        state.store.publish(request.lease, turn.record.key(len(turn.record), state.resolved.spec.pair), state.now)
    start_followers(state, request)


def act_on_marks(state: State, least: Mark) -> None:
    """End or preempt the requests that were marked with `least` or more, wherever they are."""
    due = [request for request in state.marked if request.mark >= least]
    state.marked = [request for request in state.marked if request.mark < least]
    for request in due:
        if request.id not in state.requests or state.requests[request.id] is not request:
            continue  # its last result came first
        if request.mark is Mark.ABORT:
            abort(state, request, "abort")
        elif request.mark is Mark.PREEMPT:
            suspend(state, request)


def end_overdue(state: State) -> None:
    """End the requests whose time is up, wherever they are."""
    overdue = [each for each in state.requests.values() if each.deadline is not None and state.now >= each.deadline]
    for request in overdue:
        if request.turn.id in state.turns:  # the end of another may have refused it
            abort(state, request, "timeout", f"timeout: not done within {request.submit.timeout_ms} ms")


def fail(state: State, failed: list[LaunchedStep], last_step: StepId) -> None:
    """A step broke, and those after it are void: leases keep what was proven before, requests try again or end."""
    first, first_step = failed[0], failed[0].plan.step
    state.step_times.failed()
    is_own = len(first.requests) == 1 and not state.step_limits.may_be_large(first.plan)
    state.step_limits.broke(first.plan, (request.turn.id for request in first.requests))
    broken = zip(first.requests, first.leases, strict=True)
    broken_lens = {request.turn.id: _length_after(lease, first_step) for request, lease in broken}
    for lease in list(state.store.leases.values()):
        if lease.last_step >= first_step:
            state.store.fall_back(lease)
    state.store.collected(last_step)
    state.rows.collected(last_step)
    state.totals.failed_steps += len(failed)
    named: dict[int, tuple[Request, Lease]] = {
        request.turn.id: (request, lease)
        for launched in failed
        for request, lease in zip(launched.requests, launched.leases, strict=True)
    }
    for request, lease in named.values():
        if request.turn.lease is not lease or request.row is None:
            continue  # it had left before the step broke
        if request.turn.id in broken_lens:  # the others were only launched after it
            request.num_failures = request.num_failures + 1 if is_own else 1
            request.failed_len = max(request.failed_len, broken_lens[request.turn.id])
        if request.num_failures > _FAILURES_MAX:
            state.step_limits.acquit(request.turn.id)
            abort(state, request, "error", "a step failed on the device, twice under this request")
        elif request.mark is Mark.NONE:
            suspend(state, request)


def _length_after(lease: Lease, step: StepId) -> int:
    """The length a lease would have had at least after a step."""
    return lease.settled_len + sum(claim.size for claim in lease.claims if claim.step == step)
