"""Settle: what a collected step, and every mark, does to the requests.

Runs every tick, with or without a result. A result counts only for the lease epoch it was launched in; what an
accepted run holds past the end of the output is decided here, before anything is kept. Called by the loop.
"""

from collections.abc import Callable

from roost.errors import InvariantError
from roost.kv.lease import Lease
from roost.messages import NO_LOGPROBS, PromptLogprobs, TokenLogprobs, Tokens
from roost.sched.counters import count_round
from roost.sched.ending import abort, finish, start_followers, suspend
from roost.sched.request import LaunchedStep, Mark, Request
from roost.sched.state import State
from roost.step import LogprobColumns, StepId, StepPlan, StepResult

StopAt = Callable[[int, int], int | str | None]  # (index, token) -> the stop id or text that it completes

_FAILURES_MAX = 1  # a second step that breaks at the same place, where it ran alone, ends a request


def settle(state: State, launched: LaunchedStep, result: StepResult) -> None:
    """Take over what a step did."""
    plan = launched.plan
    if result.step != plan.step or result.rows.tolist() != plan.rows.tolist():
        raise InvariantError(f"result of step {result.step} answers the plan of step {plan.step}")
    state.store.collected(plan.step)
    state.rows.collected(plan.step)
    state.totals.steps += 1
    state.step_limits.worked(plan)
    epochs, widths = result.epochs.tolist(), plan.widths.tolist()
    accept_lens, tokens, finals = result.accept_lens.tolist(), result.tokens.tolist(), plan.is_final.tolist()
    live_lens = []  # of rounds
    draft_lengths = state.totals.draft_lengths
    for i, request in enumerate(launched.requests):
        lease = launched.leases[i]
        if lease.epoch != epochs[i]:  # the request ended, was preempted or failed meanwhile
            continue
        if launched.chunks[i]:
            state.store.settle(lease, plan.step, launched.chunks[i])
            _take_prompt_logprobs(state, request, plan, result, i)
        else:
            state.store.settle(lease, plan.step, accept_lens[i])
            live_lens.append(accept_lens[i])
            draft_lengths[widths[i] - 1] = draft_lengths.get(widths[i] - 1, 0) + 1
        if finals[i] or not launched.chunks[i]:
            wants_logprobs = request.submit.num_top_logprobs is not None  # the device has them of all rows if one asks
            logprobs = _row_logprobs(result.logprobs if wants_logprobs else None, i, request)
            num_drafts = 0 if launched.chunks[i] else widths[i] - 1
            _take_tokens(state, request, tokens[i][: accept_lens[i]], logprobs, num_drafts)
        if request.row is not None:
            _after_settling(state, request, finals[i])
    if state.resolved.widths.is_auto:
        state.draft_policy.collected(plan.step, live_lens, state.now)


def _take_tokens(state: State, request: Request, tokens: list[int], logprobs: TokenLogprobs, num_drafts: int) -> None:
    """Add sampled tokens to the output, cut at its end, and finish the request if that is here."""
    record = request.turn.record
    room = request.max_new_tokens - request.output_len
    kept, reason, matched = cut_output(tokens, room, _stop_at(request))
    if num_drafts:  # plain decoding, and a round without drafts, say nothing about speculation
        count_round((request.spec_counters, state.spec_counters), num_drafts, len(tokens), kept)
    returned_len = len(record) + kept
    record.append(tokens)
    if kept:
        state.totals.completion_tokens += kept
        state.send(request, Tokens(request_id=request.id, tokens=tuple(tokens[:kept]), logprobs=logprobs.first(kept)))
    if reason is not None:
        finish(state, request, reason, returned_len, matched)


def cut_output(tokens: list[int], room: int, stop_at: StopAt) -> tuple[int, str | None, int | str | None]:
    """How many of `tokens` belong to the output, why it ends there, if it does, and which stop was met."""
    for i, token in enumerate(tokens[:room]):
        matched = stop_at(i, token)
        if matched is not None:
            return i + 1, "stop", matched
    return (room, "length", None) if len(tokens) >= room else (len(tokens), None, None)


def _stop_at(request: Request) -> StopAt:
    """Which stop, if any, each of the next tokens of a request meets; nothing stops its first min_new_tokens."""
    submit, output_len = request.submit, request.output_len

    def stop_at(i: int, token: int) -> int | str | None:
        if output_len + i < submit.min_new_tokens:
            if request.stop_finder is not None:
                request.stop_finder.skip([token])
            return None
        found = request.stop_finder.feed([token]) if request.stop_finder is not None else None
        if token in submit.stop_token_ids:
            return token
        return found[1] if found is not None else None

    return stop_at


def _take_prompt_logprobs(state: State, request: Request, plan: StepPlan, result: StepResult, row: int) -> None:
    """Report what a chunk says about the prompt's own tokens; a chunk that runs again says it only once."""
    first, end = int(plan.prompt_logprob_starts[row]), int(plan.prompt_logprob_ends[row])
    if first < 0:
        return
    request.prompt_logprobs_next = end
    logprobs = _row_logprobs(result.prompt_logprobs, row, request)
    state.send(request, PromptLogprobs(request_id=request.id, start=first + 1, logprobs=logprobs))


def _row_logprobs(columns: LogprobColumns | None, row: int, request: Request) -> TokenLogprobs:
    """The log-probabilities of one row, with as many alternatives as it asked for: still columns, for speed."""
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


def _after_settling(state: State, request: Request, prefill_ended: bool) -> None:
    """A running request after its result: share the prompt, let the window move on."""
    turn = request.turn
    if request.lease.settled_len > request.failed_len:  # past where it broke: no longer a suspect
        request.num_failures = 0
    if prefill_ended and turn.session is None:
        state.store.publish(request.lease, turn.record.key(len(turn.record), state.resolved.spec.pair), state.now)
    if prefill_ended:
        start_followers(state, request)
    state.store.slide(request.lease)


def act_on_marks(state: State, least: Mark) -> None:
    """End or suspend the requests that were marked with `least` or more, wherever they are."""
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
    state.draft_policy.failed()
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
