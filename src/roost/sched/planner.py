"""Planner: chooses the rows of the scheduler's next step and builds its plan.

Oldest request first: prefill chunks and decode (verify) rounds, together or (without `mixed`) prefill before decode;
prompts share the prefill of a step. Reserves KV pages for each row's worst case, checks it against the row's width, and
opens the claims. Keeps to the step size in force. Never reads a result. Called by the loop.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, chain
from typing import TypedDict

import numpy as np

from roost.config.options import SHARED_LOOKUP
from roost.errors import InvariantError
from roost.kv.lease import Claim, Lease, TurnId
from roost.kv.pages import BookId
from roost.sched.live import row_to_show
from roost.sched.prefill_shares import WaitingPrompt, prefill_shares
from roost.sched.request import LaunchedStep, Request
from roost.sched.reserve import reserve
from roost.sched.state import State
from roost.sched.state_columns import state_columns, states_to_keep
from roost.sched.step_budget import narrowed, prompt_budget
from roost.step import SAMPLED, Bools, Ints, RowSetup, StepId, StepPlan, TableDelta

_PREFILL_SHARE = 4  # of a step that is limited in tokens, prefill has a quarter at least

Candidate = tuple[Request, Lease, int]  # who may run, with the upper bound of its device length when the step starts


@dataclass(frozen=True, slots=True)
class Rounds:
    """How wide the rounds of the next step may be, and what is drafted for them."""

    width: int  # nodes of each, but for those whose drafts are looked up
    widest: Mapping[TurnId, int]  # at most; without an entry `width`
    lookup_widths: Mapping[TurnId, Sequence[int]]  # as a plan has them; without an entry nothing is looked up


@dataclass(frozen=True, slots=True)
class Chosen:
    """The rows of the next step, as columns: each runs a chunk of its prompt, or a round (chunk 0)."""

    rounds: Rounds
    requests: tuple[Request, ...]
    leases: tuple[Lease, ...]
    chunks: tuple[int, ...]  # prompt tokens to run
    widths: tuple[int, ...]  # tokens that the target runs: a chunk's, or a round's nodes
    device_lens_max: tuple[int, ...]  # upper bound of the device length when the step starts


def plan(state: State, step: StepId) -> LaunchedStep | None:
    """The next step, with its claims opened; None if no row can run."""
    chosen = _choose(state)
    if chosen is None:
        return None
    launched = _build_step(state, step, chosen)
    for request in chosen.requests:
        request.row_begins = False
    num_chunk_tokens = sum(chosen.chunks)
    state.prefilled_last = num_chunk_tokens > 0
    num_rounds, num_out = chosen.chunks.count(0), len(state.in_flight)
    width = chosen.rounds.width
    state.step_times.planned(step, num_rounds, width, num_chunk_tokens, num_out=num_out, now=state.now)
    if state.resolved.widths.is_auto:
        state.draft_policy.planned(num_rounds, width)
    accept_max_of = state.resolved.spec.accept_max_of
    of_rounds = {width: Claim(step=step, size=1, most=accept_max_of(width)) for width in set(chosen.widths)}
    for lease, chunk, num_nodes in zip(chosen.leases, chosen.chunks, chosen.widths, strict=True):
        state.store.claim(lease, Claim(step=step, size=chunk, most=chunk) if chunk else of_rounds[num_nodes])
    return launched


# --- which rows ------------------------------------------------------------------------------------------------


def _choose(state: State) -> Chosen | None:
    """Rows that have work and pages, oldest first."""
    ready = [request for request in state.running if not request.mark]
    suspects = [request for request in ready if request.num_failures]
    for suspect in suspects:  # one runs alone, so that a second failure can only be its own
        chosen = _choose_from(state, [suspect])
        if chosen is not None:
            return chosen
    return _choose_from(state, [request for request in ready if not request.num_failures])


def _choose_from(state: State, ready: list[Request]) -> Chosen | None:
    """Rows of one step from these requests: prefill and decode together, or prefill first."""
    prefill: list[Candidate] = []
    decode: list[Candidate] = []
    for request in ready:
        lease = request.lease
        hi = lease.device_len_max
        if hi < request.turn.prefill_len:
            prefill.append((request, lease, hi))
        elif _decodes_on(state, request, lease, hi):
            decode.append((request, lease, hi))
    width = _round_width(state, len(decode), has_prefill=bool(prefill))
    rounds = _rounds(state, decode, width, has_prefill=bool(prefill))
    if not prefill:
        return _with_room(state, decode, {}, rounds)
    if state.resolved.sched.mixed:
        shares = _shares(prefill, _budget(state, prefill, len(decode), width))
        in_order = sorted(prefill + decode, key=lambda candidate: candidate[0].order)
        return _with_room(state, in_order, shares, rounds)
    shares = _shares(prefill, _budget(state, prefill, 0, width, delays=bool(decode)))
    if state.prefilled_last:  # decode alternates with prefill, however many prompts keep coming
        return _with_room(state, decode, {}, rounds) or _with_room(state, prefill, shares, rounds)
    return _with_room(state, prefill, shares, rounds) or _with_room(state, decode, {}, rounds)


def _budget(state: State, prefill: Sequence[Candidate], num_rounds: int, width: int, *, delays: bool = False) -> int:
    """Prompt tokens of the next step."""
    num_waiting = sum(request.turn.prefill_len - hi for request, _, hi in prefill)
    budget = prompt_budget(state, num_rounds, width, num_waiting, delays=delays)
    most = state.step_limits.tokens.most
    if most is not None:
        budget = max(1, min(budget, max(most - num_rounds * width, most // _PREFILL_SHARE)))
    return max(1, budget // 2) if state.draft_policy.shortens_chunks(num_rounds) else budget


def _round_width(state: State, num_rounds: int, *, has_prefill: bool) -> int:
    """Nodes that each of so many rounds verifies: the best width, as far as the step's token limit allows it to all."""
    width, most = state.draft_policy.choose(num_rounds, has_prefill=has_prefill), state.step_limits.tokens.most
    if has_prefill and width > 1 and state.resolved.widths.is_auto and state.resolved.sched.mixed:
        width = narrowed(state, num_rounds, width)
    if most is None or not num_rounds:
        return width
    room = most - max(1, most // _PREFILL_SHARE) if has_prefill else most
    allowed = state.resolved.widths.of(num_rounds)
    return min(width, max((each for each in allowed if each * num_rounds <= room), default=min(allowed)))


def _rounds(state: State, decode: Sequence[Candidate], width: int, *, has_prefill: bool) -> Rounds:
    """The rounds of the next step, of which those that the head drafts for verify `width` nodes."""
    widths, policy, is_limited = state.resolved.widths, state.draft_policy, state.step_limits.is_in_force
    turns = [request.turn.id for request, _, _ in decode]
    widest = dict.fromkeys(turns, width)
    if not widths.shape.lookup_steps or (width == 1 and not widths.narrows):
        return Rounds(width, {}, {})
    repeating = [(request, lease, hi) for request, lease, hi in decode if request.drafts.repeat_len]
    if widths.narrows:
        most = width if is_limited else widths.widest_of(len(decode))
        widest = dict.fromkeys(turns, most)
    elif repeating and not has_prefill and not is_limited:
        repeats = [policy.repeat(request.drafts, hi - lease.settled_len) for request, lease, hi in repeating]
        wide, which = policy.widen(len(decode), width, repeats)
        widest |= {repeating[number][0].turn.id: wide for number in which}
    if not widths.shape.pair and not widths.narrows:
        return Rounds(width, widest, {})
    tables = policy.lookup_widths([request.drafts for request, _, _ in decode], width, list(widest.values()))
    if widths.narrows:  # what is not looked up needs no room
        widest = {turn: max(width, *table) for turn, table in zip(turns, tables, strict=True)}
    return Rounds(width, widest, dict(zip(turns, tables, strict=True)))


def _decodes_on(state: State, request: Request, lease: Lease, hi: int) -> bool:
    """Whether another round is wanted of a request whose prompt has been launched."""
    end_len = request.turn.prompt_len + request.max_new_tokens - 1  # of the KV: the last token of the output has none
    if hi < end_len or lease.claimed_len < end_len:
        return True
    # where steps overlap, a turn's last round writes the KV of its last token, for the next turn
    return request.turn.session is not None and state.resolved.depth > 0 and request.max_new_tokens > 0


def _with_room(
    state: State,
    candidates: Sequence[Candidate],
    shares: Mapping[TurnId, int],
    rounds: Rounds,
) -> Chosen | None:
    """Those for whom there are pages, as many as one step may hold; `shares` are the prompts' parts of the prefill."""
    rows: list[tuple[Request, Lease, int, int, int]] = []  # in the order of Chosen
    limits, row_width, reserves = state.step_limits, state.resolved.row_width, state.resolved.reserves
    reserve_max, is_limited = max(reserves), limits.is_in_force
    num_tokens = 0
    unused = 0  # prefill left over by prompts that could not run all of their share
    for request, lease, hi in candidates:
        if request.mark:  # preempted for the sake of an older one, just now
            unused += shares.get(request.turn.id, 0)
            continue
        chunk = 0
        if hi < request.turn.prefill_len:
            share = min(request.turn.prefill_len - hi, shares[request.turn.id] + unused)
            chunk = limits.tokens_left(num_tokens, share)
            if not chunk:
                continue
        width = chunk or rounds.widest.get(request.turn.id, rounds.width)
        if is_limited and not limits.has_place(len(rows), num_tokens, width):
            continue
        needs = (chunk,) * len(reserves) if chunk else reserves
        if hi + (chunk or reserve_max) > row_width:
            raise _too_wide(state, request, hi + max(needs))
        has_room = reserve(state, request, hi, needs, states_to_keep(state, request, chunk))
        if has_room:
            rows.append((request, lease, chunk, width, hi))
            num_tokens += width
        if chunk:
            unused += shares[request.turn.id] - (chunk if has_room else 0)
    return Chosen(rounds, *zip(*rows, strict=True)) if rows else None


def _shares(prefill: Sequence[Candidate], budget: int) -> dict[TurnId, int]:
    """How many tokens of its prompt each request in prefill may run in a step; `budget` in all."""
    waiting = [(request, request.turn.prefill_len - hi) for request, _, hi in prefill if not request.mark]
    wants = [WaitingPrompt(request.submit.priority, request.submit.client, rest) for request, rest in waiting]
    shares = prefill_shares(wants, budget)
    return {request.turn.id: share for (request, _), share in zip(waiting, shares, strict=True)}


def _too_wide(state: State, request: Request, end: int) -> InvariantError:
    """A step whose last slot lies past the row's end is refused, instead of corrupting another row."""
    return InvariantError(
        f"request {request.id}: the step needs {end} positions (length up to {request.lease.device_len_max}, "
        f"reserve {max(state.resolved.reserves)}), the row has {state.resolved.row_width}"
    )


# --- columns ---------------------------------------------------------------------------------------------------


def _build_step(state: State, step: StepId, chosen: Chosen) -> LaunchedStep:
    """The plan of the chosen rows."""
    requests, leases, num_rows = chosen.requests, chosen.leases, len(chosen.requests)
    shape, books, window_book = state.resolved.spec, range(len(state.resolved.books)), state.store.window_book
    if any(chosen.chunks):
        chunks = _chunk_columns(chosen)
    elif len(set(chosen.widths)) == 1:
        chunks = _round_columns(num_rows, chosen.widths[0])
    else:
        chunks = _ChunkColumns(**{**_round_columns(num_rows, 1), "query_lens": _ints(chosen.widths)})
    firsts = _zeros(len(books), num_rows)
    if window_book is not None:
        firsts = firsts.copy()
        firsts[window_book] = [lease.evicted_len for lease in leases]
    page_size = state.resolved.page_size
    plan = StepPlan(
        step=step,
        shape=shape,
        rows=_ints([request.row for request in requests]),
        epochs=_ints([lease.epoch for lease in leases]),
        device_lens_max=_ints(chosen.device_lens_max),
        firsts=firsts,
        ends=_ints([[len(lease.pages[book]) * page_size for lease in leases] for book in books]),
        num_top_logprobs=_ints(
            [-1 if request.submit.num_top_logprobs is None else request.submit.num_top_logprobs for request in requests]
        ),
        **chunks,
        setups=tuple(_setup(state, request) for request in requests if request.row_begins),
        deltas=tuple(_delta(chosen, book) for book in books),
        lookup_widths=_lookup_widths(chosen),
        head_width=chosen.rounds.width,
        states=state_columns(state, leases),
        shown_row=row_to_show(state, requests, chosen.chunks, chosen.widths),
    )
    return LaunchedStep(
        plan=plan,
        requests=requests,
        leases=leases,
        chunks=chosen.chunks,
        round_width=chosen.rounds.width,
    )


class _ChunkColumns(TypedDict):
    """The columns of a plan that say which rows are chunks, and of what."""

    is_prefill: Bools
    query_lens: Ints
    start_positions: Ints
    is_final: Bools
    next_tokens: Ints
    tokens: Ints
    token_offsets: Ints
    prompt_logprob_starts: Ints
    prompt_logprob_ends: Ints


@cache
def _round_columns(num_rows: int, round_width: int) -> _ChunkColumns:
    """Those of rounds alone: plans are read-only, so that they can share them."""
    no, none = np.zeros(num_rows, dtype=np.bool_), _full(num_rows, -1)
    return _ChunkColumns(
        is_prefill=no,
        query_lens=_full(num_rows, round_width),
        start_positions=none,
        is_final=no,
        next_tokens=_full(num_rows, SAMPLED),
        tokens=_NO_TOKENS,
        token_offsets=_zeros(num_rows + 1),
        prompt_logprob_starts=none,
        prompt_logprob_ends=none,
    )


def _chunk_columns(chosen: Chosen) -> _ChunkColumns:
    """Those of a step with chunks: as of rounds, then written over where a row runs a chunk."""
    num_rows = len(chosen.chunks)
    is_prefill, is_final = np.zeros(num_rows, dtype=np.bool_), np.zeros(num_rows, dtype=np.bool_)
    query_lens, start_positions = _ints(chosen.widths), _full(num_rows, -1)
    next_tokens = _full(num_rows, SAMPLED)
    prompt_logprob_starts, prompt_logprob_ends = _full(num_rows, -1), _full(num_rows, -1)
    tokens = []
    for i, chunk in enumerate(chosen.chunks):
        if not chunk:
            continue
        start, request = chosen.device_lens_max[i], chosen.requests[i]
        turn, end = request.turn, start + chunk
        is_prefill[i], start_positions[i] = True, start
        tokens.append(turn.record.slice(start, end))
        is_final[i] = end == turn.prefill_len
        if end < turn.prefill_len:
            next_tokens[i] = turn.record.slice(end, end + 1)[0]
        prompt_logprob_starts[i], prompt_logprob_ends[i] = _scored(request, start, end)
    return _ChunkColumns(
        is_prefill=is_prefill,
        query_lens=query_lens,
        start_positions=start_positions,
        is_final=is_final,
        next_tokens=next_tokens,
        tokens=np.concatenate(tokens),
        token_offsets=_offsets(chosen.chunks),
        prompt_logprob_starts=prompt_logprob_starts,
        prompt_logprob_ends=prompt_logprob_ends,
    )


def _lookup_widths(chosen: Chosen) -> Ints | None:
    """What is looked up for each row; None if nothing is, or nothing else is done."""
    tables = chosen.rounds.lookup_widths
    if not tables:
        return None
    none = [0] * len(next(iter(tables.values())))
    return _ints([tables.get(request.turn.id, none) for request in chosen.requests])


def _scored(request: Request, start: int, end: int) -> tuple[int, int]:
    """Positions of the chunk [start, end) whose next token is a prompt token to be scored; (-1, -1) if none is."""
    if request.prompt_logprobs_next is None:
        return -1, -1
    first = max(start, request.prompt_logprobs_next)
    last = min(end, request.turn.prompt_len - 1)  # nothing of the prompt follows its last token
    return (first, last) if first < last else (-1, -1)


def _setup(state: State, request: Request) -> RowSetup:
    """What the device must know of a row that begins."""
    submit, turn = request.submit, request.turn
    needs_tokens = state.resolved.spec.reads_history or submit.sampling.penalises or submit.grammar
    assert request.row is not None, request.id
    return RowSetup(
        row=request.row,
        sampling=submit.sampling,
        prompt_len=turn.prompt_len,
        min_len=turn.prompt_len + submit.min_new_tokens,
        stop_ids=tuple(sorted(submit.stop_token_ids)),
        tokens=turn.record.slice(0, len(turn.record)) if needs_tokens else _NO_TOKENS,
        grammar=submit.grammar,
        scope=turn.scoped_salt if state.resolved.lookup == SHARED_LOOKUP else None,
    )


def _delta(chosen: Chosen, book: BookId) -> TableDelta:
    """Page-table entries of one book that the device does not have yet."""
    changed = [
        (request.row, lease.row_synced[book], lease.pages[book])
        for request, lease in zip(chosen.requests, chosen.leases, strict=True)
        if lease.row_synced[book] < len(lease.pages[book])
    ]
    if not changed:
        return _NO_DELTA
    return TableDelta(
        rows=_ints([row for row, _, _ in changed]),
        firsts=_ints([known for _, known, _ in changed]),
        offsets=_offsets([len(entries) - known for _, known, entries in changed]),
        pages=_ints(list(chain.from_iterable(entries[known:] for _, known, entries in changed))),
    )


_NO_TOKENS = np.empty(0, dtype=np.int32)
_NO_DELTA = TableDelta(rows=_NO_TOKENS, firsts=_NO_TOKENS, offsets=np.zeros(1, dtype=np.int32), pages=_NO_TOKENS)


def _ints(values: Sequence[object]) -> Ints:
    return np.array(values, dtype=np.int32)


def _full(count: int, value: int) -> Ints:
    column = np.empty(count, dtype=np.int32)
    column.fill(value)
    return column


@cache
def _zeros(*shape: int) -> Ints:
    """Zeros that plans share."""
    return np.zeros(shape, dtype=np.int32)


def _offsets(lengths: Sequence[int]) -> Ints:
    return _ints([0, *accumulate(lengths)])
