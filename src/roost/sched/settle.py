"""Settle: what a collected step, and every mark, does to the requests.

Runs every tick, with or without a result. A result counts only for the lease epoch it was launched in; what an
accepted run holds past the end of the output is decided here, before anything is kept. Called by the loop.
"""

from roost.errors import InvariantError
from roost.kv.lease import Lease
from roost.messages import Tokens
from roost.sched.counters import count_round
from roost.sched.ending import abort, finish, suspend
from roost.sched.request import Flight, Mark, Request
from roost.sched.state import State
from roost.step import StepId, StepResult

_FAILURES_MAX = 1  # a second step that breaks at the same place, where it ran alone, ends a request


def settle(state: State, flight: Flight, result: StepResult) -> None:
    """Take over what a step did."""
    plan = flight.plan
    if result.step != plan.step or result.rows.tolist() != plan.rows.tolist():
        raise InvariantError(f"result of step {result.step} answers the plan of step {plan.step}")
    state.store.collected(plan.step)
    state.rows.collected(plan.step)
    epochs, widths = result.epochs.tolist(), plan.widths.tolist()
    accept_lens, tokens, finals = result.accept_lens.tolist(), result.tokens.tolist(), plan.is_final.tolist()
    for i, request in enumerate(flight.requests):
        lease = flight.leases[i]
        if lease.epoch != epochs[i]:  # the request ended, was retracted or failed meanwhile
            continue
        if flight.chunks[i]:
            state.store.settle(lease, plan.step, flight.chunks[i])
            if finals[i]:
                _take_tokens(state, request, tokens[i][:1], round_width=0)
        else:
            state.store.settle(lease, plan.step, accept_lens[i])
            _take_tokens(state, request, tokens[i][: accept_lens[i]], widths[i])
        if request.row is not None:
            _after_settling(state, request, finals[i])


def _take_tokens(state: State, request: Request, tokens: list[int], round_width: int) -> None:
    """Add sampled tokens to the output, cut at its end, and finish the request if that is here."""
    record = request.turn.record
    room = request.max_new_tokens - request.output_len
    kept, reason = cut_output(tokens, room, request.submit.stop_token_ids)
    if round_width:
        count_round((request.counters, state.counters), round_width, len(tokens), kept)
    returned_len = len(record) + kept
    record.append(tokens)
    if kept:
        state.send(request, Tokens(request_id=request.id, tokens=tuple(tokens[:kept])))
    if reason is not None:
        finish(state, request, reason, returned_len)


def cut_output(tokens: list[int], room: int, stop_token_ids: frozenset[int]) -> tuple[int, str | None]:
    """How many of `tokens` belong to the output, and why it ends there, if it does."""
    for i, token in enumerate(tokens[:room]):
        if token in stop_token_ids:
            return i + 1, "stop"
    return (room, "length") if len(tokens) >= room else (len(tokens), None)


def _after_settling(state: State, request: Request, prefill_ended: bool) -> None:
    """A running request after its result: share the prompt, let the window move on."""
    turn = request.turn
    if request.lease.settled_len > request.failed_len:  # past where it broke: no longer a suspect
        request.num_failures = 0
    if prefill_ended and turn.session is None:
        state.store.publish(request.lease, turn.record.key(len(turn.record), state.resolved.spec.pair), state.now)
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
        elif request.mark is Mark.RETRACT:
            suspend(state, request)


def fail(state: State, failed: list[Flight], last_step: StepId) -> None:
    """A step broke, and those after it are void: leases keep what was proven before, requests try again or end."""
    first_step = failed[0].plan.step
    broken = zip(failed[0].requests, failed[0].leases, strict=True)
    broken_lens = {request.turn.id: _length_after(lease, first_step) for request, lease in broken}
    for lease in list(state.store.leases.values()):
        if lease.last_step >= first_step:
            state.store.fall_back(lease)
    state.store.collected(last_step)
    state.rows.collected(last_step)
    named: dict[int, tuple[Request, Lease]] = {
        request.turn.id: (request, lease)
        for flight in failed
        for request, lease in zip(flight.requests, flight.leases, strict=True)
    }
    for request, lease in named.values():
        if request.turn.lease is not lease or request.row is None:
            continue  # it had left before the step broke
        if request.turn.id in broken_lens:  # the others were only launched after it
            request.num_failures += 1
            request.failed_len = max(request.failed_len, broken_lens[request.turn.id])
        if request.num_failures > _FAILURES_MAX:
            abort(state, request, "error", "a step failed on the device, twice under this request")
        elif request.mark is Mark.NONE:
            suspend(state, request)


def _length_after(lease: Lease, step: StepId) -> int:
    """The length a lease would have had at least after a step."""
    return lease.settled_len + sum(claim.size for claim in lease.claims if claim.step == step)
