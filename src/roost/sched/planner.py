"""Planner: turns what is running into the next step.

Oldest first: prefill chunks and decode rounds, together or (without `mixed`) prefill before decode. Reserves each
row's worst case, guards the row's width, and opens the claims. Never reads a result. Called by the loop.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roost.errors import InvariantError
from roost.kv.lease import Claim
from roost.sched.request import Flight, Mark, Request
from roost.sched.room import reserve
from roost.sched.state import State
from roost.step import SAMPLED, Ints, StepId, StepPlan, TableDelta

_PREFILL_SHARE = 4  # a mixed step leaves at least chunk / 4 tokens to prefill


@dataclass(frozen=True, slots=True)
class Line:
    """One row of the step to be: a chunk of `chunk` new tokens, or a round (chunk 0)."""

    request: Request
    chunk: int
    hi: int  # device length at most, when the step starts


def plan(state: State, step: StepId) -> Flight | None:
    """The next step, with its claims opened; None if no row can go."""
    lines = _choose(state)
    if not lines:
        return None
    flight = _flight(state, step, lines)
    shape = state.resolved.spec
    for line in lines:
        size, most = (line.chunk, line.chunk) if line.chunk else (1, shape.accept_max)
        state.store.claim(line.request.lease, Claim(step=step, size=size, most=most))
    return flight


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
    in_prefill = [request for request in ready if request.in_prefill]
    in_decode = [request for request in ready if not request.in_prefill and _decodes_on(state, request)]
    chunk, mixed = state.resolved.sched.chunk, state.resolved.sched.mixed
    if mixed:
        width = state.resolved.spec.tokens
        budget = max(chunk - len(in_decode) * width, chunk // _PREFILL_SHARE, 1)
        oldest_first = sorted(in_prefill + in_decode, key=lambda request: request.arrival)
        return _with_room(state, oldest_first, budget)
    return _with_room(state, in_prefill, chunk) or _with_room(state, in_decode, chunk)


def _decodes_on(state: State, request: Request) -> bool:
    """Whether another round is wanted of a request whose prompt has been launched."""
    if request.max_new_tokens == 0:
        return False
    if request.turn.session is not None and state.resolved.depth > 0:
        return True  # even if its end is certain: that round writes the last token's KV for the next turn
    return request.certain_output_len < request.max_new_tokens


def _with_room(state: State, requests: Sequence[Request], budget: int) -> list[Line]:
    """Those for whom there are pages; `budget` tokens of prefill in all."""
    lines = []
    for request in requests:
        if request.mark is not Mark.NONE:  # retracted for the sake of an older one, just now
            continue
        lease, in_prefill = request.lease, request.in_prefill
        if in_prefill and budget == 0:
            continue
        hi = lease.hi_len
        chunk = min(budget, request.turn.prefill_len - hi) if in_prefill else 0
        needs = [hi + (chunk or each) for each in state.resolved.reserves]
        _guard(state, request, needs)
        if reserve(state, request, needs):
            lines.append(Line(request, chunk, hi))
            budget -= chunk
    return [line for line in lines if line.request.mark is Mark.NONE]


def _guard(state: State, request: Request, needs: list[int]) -> None:
    """Refuse a step whose last slot lies past the row, instead of corrupting another's."""
    width = state.resolved.row_width
    if max(needs) > width:
        raise InvariantError(
            f"request {request.id}: the step needs {max(needs)} positions (length up to {request.lease.hi_len}, "
            f"reserve {max(state.resolved.reserves)}), the row has {width}"
        )


# --- columns ---------------------------------------------------------------------------------------------------


def _flight(state: State, step: StepId, lines: list[Line]) -> Flight:
    """The plan's columns for chosen rows."""
    requests = tuple(line.request for line in lines)
    leases = tuple(request.lease for request in requests)
    shape, page_size = state.resolved.spec, state.resolved.page_size
    starts = [line.hi if line.chunk else -1 for line in lines]
    ends = [line.hi + line.chunk for line in lines]
    finals = [bool(line.chunk) and end == line.request.turn.prefill_len for line, end in zip(lines, ends, strict=True)]
    widths = [line.chunk or shape.tokens for line in lines]
    tokens = [
        line.request.turn.record.slice(start, end) if line.chunk else _NO_TOKENS
        for line, start, end in zip(lines, starts, ends, strict=True)
    ]
    next_tokens = [
        SAMPLED if not line.chunk or final else int(line.request.turn.record.slice(end, end + 1)[0])
        for line, end, final in zip(lines, ends, finals, strict=True)
    ]
    books = range(len(state.resolved.books))
    plan = StepPlan(
        step=step,
        shape=shape,
        rows=_ints([request.row for request in requests]),
        epochs=_ints([lease.epoch for lease in leases]),
        is_prefill=np.array([line.chunk > 0 for line in lines], dtype=np.bool_),
        widths=_ints(widths),
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
        deltas=tuple(_delta(requests, book) for book in books),
    )
    return Flight(plan=plan, ticket=None, requests=requests, leases=leases, chunks=tuple(line.chunk for line in lines))


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
            lease.row_synced[book] = len(entries)
    return TableDelta(rows=_ints(rows), firsts=_ints(firsts), offsets=_offsets(lengths), pages=_ints(pages))


_NO_TOKENS = np.empty(0, dtype=np.int32)


def _ints(values: Sequence[object]) -> Ints:
    return np.array(values, dtype=np.int32)


def _offsets(lengths: list[int]) -> Ints:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
