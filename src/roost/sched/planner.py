"""Planner: turns what is running into the next step.

Oldest first: prefill chunks and decode rounds, together or (without `mixed`) prefill before decode; prompts share the
prefill of a step. Reserves each row's worst case, guards the row's width, and opens the claims. Keeps to the size that
steps may have. Never reads a result. Called by the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.errors import InvariantError
from roost.kv.lease import Claim, TurnId
from roost.sched.prefill_shares import WaitingPrompt, prefill_shares
from roost.sched.request import LaunchedStep, Mark, Request
from roost.sched.reserve import reserve
from roost.sched.state import State
from roost.step import SAMPLED, Ints, RowSetup, StepId, StepPlan, TableDelta

_PREFILL_SHARE = 4  # a mixed step leaves at least chunk / 4 tokens to prefill


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the step to be: a chunk of `chunk` new tokens, or a round (chunk 0)."""

    request: Request
    chunk: int
    width: int  # tokens the target runs: the chunk, or the round's nodes
    hi: int  # device length at most, when the step starts


def plan(state: State, step: StepId) -> LaunchedStep | None:
    """The next step, with its claims opened; None if no row can go."""
    lines = _choose(state)
    if not lines:
        return None
    launched = _build_step(state, step, lines)
    for line in lines:
        line.request.row_begins = False
    num_chunk_tokens = sum(line.chunk for line in lines)
    state.prefilled_last = num_chunk_tokens > 0
    if state.resolved.widths.is_auto:
        rounds = [line.width for line in lines if not line.chunk]
        width, num_out = rounds[0] if rounds else 0, len(state.in_flight)
        state.draft_policy.planned(
            step, len(rounds), width, num_chunk_tokens=num_chunk_tokens, num_out=num_out, now=state.now
        )
    shape = state.resolved.spec
    for line in lines:
        size, most = (line.chunk, line.chunk) if line.chunk else (1, shape.accept_max_of(line.width))
        state.store.claim(line.request.lease, Claim(step=step, size=size, most=most))
    return launched


# --- which rows ------------------------------------------------------------------------------------------------


def _choose(state: State) -> list[Line]:
    """Rows that have work and pages, oldest first."""
    ready = [request for request in state.running if request.mark is Mark.NONE]
    suspects = [request for request in ready if request.num_failures]
    if suspects:  # one goes alone, so that a second failure can only be its own
        lines = _lines(state, suspects[:1])
        if lines:
            return lines
    return _lines(state, [request for request in ready if not request.num_failures])


def _lines(state: State, ready: list[Request]) -> list[Line]:
    """Rows of one step from these requests: prefill and decode together, or prefill first."""
    in_prefill = [request.in_prefill for request in ready]
    prefill = [request for request, is_in in zip(ready, in_prefill, strict=True) if is_in]
    decode = [
        request for request, is_in in zip(ready, in_prefill, strict=True) if not is_in and _decodes_on(state, request)
    ]
    chunk = max(1, state.step_limits.tokens_left(0, state.resolved.sched.chunk))
    width = _round_width(state, len(decode), has_prefill=bool(prefill))
    if not state.resolved.sched.mixed:
        if state.prefilled_last:  # decode has its turn, however many prompts keep coming
            return _with_room(state, decode, 0, width) or _with_room(state, prefill, chunk, width)
        return _with_room(state, prefill, chunk, width) or _with_room(state, decode, 0, width)
    counted = 1 if state.resolved.widths.is_auto else width  # chosen drafts take no tokens from prefill
    budget = max(chunk - len(decode) * counted, chunk // _PREFILL_SHARE, 1)
    if not prefill:
        return _with_room(state, decode, 0, width)
    if state.draft_policy.shortens_chunks(len(decode)):
        budget = max(1, budget // 2)
    return _with_room(state, sorted(prefill + decode, key=lambda request: request.order), budget, width)


def _round_width(state: State, num_rounds: int, *, has_prefill: bool) -> int:
    """How many nodes each of so many rounds verifies: what pays most, as far as a step may have them for all."""
    width, most = state.draft_policy.choose(num_rounds, has_prefill=has_prefill), state.step_limits.tokens.most
    if most is None or not num_rounds:
        return width
    room = most - max(1, most // _PREFILL_SHARE) if has_prefill else most
    allowed = state.resolved.widths.of(num_rounds)
    return min(width, max((each for each in allowed if each * num_rounds <= room), default=min(allowed)))


def _decodes_on(state: State, request: Request) -> bool:
    """Whether another round is wanted of a request whose prompt has been launched."""
    if request.max_new_tokens == 0:
        return False
    if request.turn.session is not None and state.resolved.depth > 0:
        return True  # even if its end is certain: that round writes the last token's KV for the next turn
    return request.certain_output_len < request.max_new_tokens


def _with_room(state: State, requests: Sequence[Request], budget: int, round_width: int) -> list[Line]:
    """Those for whom there are pages, as many as one step may hold; `budget` tokens of prefill in all."""
    lines: list[Line] = []
    num_tokens, limits, reserves, row_width = 0, state.step_limits, state.resolved.reserves, state.resolved.row_width
    shares = _shares(requests, budget)
    unused = 0  # of those who sat out
    for request in requests:
        if request.mark is not Mark.NONE:  # preempted for the sake of an older one, just now
            continue
        hi = request.lease.device_len_max
        rest = _rest(request)
        share = min(rest, shares.get(request.turn.id, 0) + unused)
        chunk = limits.tokens_left(num_tokens, share) if rest > 0 else 0
        if rest > 0 and chunk == 0:
            continue
        width = chunk or round_width
        if not limits.has_place(len(lines), num_tokens, width):
            continue
        needs = [hi + (chunk or each) for each in reserves]
        if max(needs) > row_width:
            raise _too_wide(state, request, needs)
        has_room = reserve(state, request, needs)
        if has_room:
            lines.append(Line(request, chunk, width, hi))
            num_tokens += width
        if rest > 0:
            unused += shares[request.turn.id] - (chunk if has_room else 0)
    return [line for line in lines if line.request.mark is Mark.NONE]


def _rest(request: Request) -> int:
    """Tokens of a prompt that no step has; a round starts where the prompt ends, or later, and has none."""
    return max(0, request.turn.prefill_len - request.lease.device_len_max)


def _shares(requests: Sequence[Request], budget: int) -> dict[TurnId, int]:
    """How many tokens of its prompt each request that has a rest of it may run in a step."""
    waiting = [request for request in requests if request.mark is Mark.NONE and request.in_prefill]
    prompts = [WaitingPrompt(each.submit.priority, each.submit.client, _rest(each)) for each in waiting]
    return {each.turn.id: share for each, share in zip(waiting, prefill_shares(prompts, budget), strict=True)}


def _too_wide(state: State, request: Request, needs: list[int]) -> InvariantError:
    """The guard of the row: a step whose last slot lies past it is refused, instead of corrupting another's."""
    return InvariantError(
        f"request {request.id}: the step needs {max(needs)} positions (length up to {request.lease.device_len_max}, "
        f"reserve {max(state.resolved.reserves)}), the row has {state.resolved.row_width}"
    )


# --- columns ---------------------------------------------------------------------------------------------------


def _build_step(state: State, step: StepId, lines: list[Line]) -> LaunchedStep:
    """The plan's columns for chosen rows."""
    requests = tuple(line.request for line in lines)
    leases = tuple(request.lease for request in requests)
    shape, page_size = state.resolved.spec, state.resolved.page_size
    starts = [line.hi if line.chunk else -1 for line in lines]
    ends = [line.hi + line.chunk for line in lines]
    finals = [bool(line.chunk) and end == line.request.turn.prefill_len for line, end in zip(lines, ends, strict=True)]
    tokens = [
        line.request.turn.record.slice(start, end) if line.chunk else _NO_TOKENS
        for line, start, end in zip(lines, starts, ends, strict=True)
    ]
    next_tokens = [
        SAMPLED if not line.chunk or final else int(line.request.turn.record.slice(end, end + 1)[0])
        for line, end, final in zip(lines, ends, finals, strict=True)
    ]
    scored = [_scored(line) for line in lines]
    num_tops = [request.submit.num_top_logprobs for request in requests]
    books = range(len(state.resolved.books))
    plan = StepPlan(
        step=step,
        shape=shape,
        rows=_ints([request.row for request in requests]),
        epochs=_ints([lease.epoch for lease in leases]),
        is_prefill=np.array([line.chunk > 0 for line in lines], dtype=np.bool_),
        widths=_ints([line.width for line in lines]),
        starts=_ints(starts),
        his=_ints([line.hi for line in lines]),
        firsts=_ints(
            [[lease.evicted_len if book == state.store.window_book else 0 for lease in leases] for book in books]
        ),
        ends=_ints([[len(lease.pages[book]) * page_size for lease in leases] for book in books]),
        is_final=np.array(finals, dtype=np.bool_),
        next_tokens=_ints(next_tokens),
        tokens=np.concatenate(tokens),
        token_offsets=_offsets([len(each) for each in tokens]),
        num_top_logprobs=_ints([-1 if num_top is None else num_top for num_top in num_tops]),
        prompt_logprob_starts=_ints([first for first, _ in scored]),
        prompt_logprob_ends=_ints([end for _, end in scored]),
        setups=tuple(_setup(request, shape.reads_history) for request in requests if request.row_begins),
        deltas=tuple(_delta(requests, book) for book in books),
    )
    return LaunchedStep(
        plan=plan, ticket=None, requests=requests, leases=leases, chunks=tuple(line.chunk for line in lines)
    )


def _scored(line: Line) -> tuple[int, int]:
    """Positions of a chunk whose next token is a prompt token to be scored; (-1, -1) if there is none."""
    request = line.request
    if not line.chunk or request.prompt_logprobs_next is None:
        return -1, -1
    first = max(line.hi, request.prompt_logprobs_next)
    end = min(line.hi + line.chunk, request.turn.prompt_len - 1)  # nothing of the prompt follows its last token
    return (first, end) if first < end else (-1, -1)


def _setup(request: Request, reads_history: bool) -> RowSetup:
    """What the device must know of a row that begins."""
    submit, turn = request.submit, request.turn
    needs_tokens = reads_history or submit.sampling.penalises
    assert request.row is not None, request.id
    return RowSetup(
        row=request.row,
        sampling=submit.sampling,
        prompt_len=turn.prompt_len,
        min_len=turn.prompt_len + submit.min_new_tokens,
        stop_ids=tuple(sorted(submit.stop_token_ids)),
        tokens=turn.record.slice(0, len(turn.record)) if needs_tokens else _NO_TOKENS,
    )


def _delta(requests: tuple[Request, ...], book: int) -> TableDelta:
    """Table entries of one book that the device does not have yet."""
    rows, firsts, lengths, pages = [], [], [], []
    for request in requests:
        lease = request.lease
        known, entries = lease.row_synced[book], lease.pages[book]
        if known < len(entries):
            rows.append(request.row)
            firsts.append(known)
            lengths.append(len(entries) - known)
            pages.extend(entries[known:])
    return TableDelta(rows=_ints(rows), firsts=_ints(firsts), offsets=_offsets(lengths), pages=_ints(pages))


_NO_TOKENS = np.empty(0, dtype=np.int32)


def _ints(values: Sequence[object]) -> Ints:
    return np.array(values, dtype=np.int32)


def _offsets(lengths: list[int]) -> Ints:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
