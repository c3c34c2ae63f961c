"""Admission: which waiting requests start to run, and if none can, why.

The order is by priority, then by arrival; where clients have names, the client with the fewest running requests comes
first. A request is admitted when the KV pages for its whole prompt and for the worst case of its decode rounds are
available beside what the running requests were promised; no page is taken yet. While the next one waits for pages, a
few smaller ones may overtake it. Called by the loop.
"""

from roost.kv.lease import Lease
from roost.kv.page_counts import num_freed, num_held, num_spare
from roost.messages import Begun
from roost.sched.client_limits import admission_order
from roost.sched.request import Mark, Request
from roost.sched.state import AdmissionRefusal, State

OVERTAKEN_MAX = 8  # requests that may overtake one that waits for pages
LOOKED_AT_MAX = 32  # requests behind it that are considered, so that a long queue costs a tick no more


def admit(state: State) -> str:
    """Admit as many requests as fit; returns why the next one has to wait, or '' if none waits."""
    while state.queued:
        line = admission_order(state)
        if not line:
            return "each client that waits has as many requests running as it may"
        reason = _no_place(state, line[0])
        if reason:
            return reason
        reason = _refused_before(state, line[0]) or _start(state, line[0])
        if reason and not _let_one_pass(state, line):
            return reason
    return ""


def _start(state: State, request: Request) -> str:
    """Admit a request; returns why it does not fit if it does not, and remembers that."""
    lease = state.sessions.find_lease(request.turn, request.prompt_logprobs_pending)
    reason = _no_pages(state, request, lease)
    if reason:
        state.sessions.refuse_lease(request.turn, lease, state.now)
        state.last_refusal = AdmissionRefusal(
            turn=request.turn.id,
            margins=_margins(state),
            num_leases_kept=state.sessions.num_leases_kept,
            num_pinned=state.store.tree.num_pinned,
            reason=reason,
        )
        return reason
    state.sessions.begin(request.turn, lease)
    if request.prompt_logprobs_next is not None:  # inherited tokens do not run again, so they have no log-probabilities
        request.prompt_logprobs_next = max(request.prompt_logprobs_next, request.lease.settled_len)
    is_first = request.cached_len < 0
    if is_first:
        request.cached_len, request.prompt_logprobs_from = request.turn.cached_len, request.prompt_logprobs_next
    request.row, request.row_begins = state.rows.take(), True
    state.start_running(request)
    state.trace.note("admit", request.id, request.lease.settled_len, request.turn.prefill_len)
    if is_first:
        prompt_len = request.turn.prompt_len
        state.send(request, Begun(request_id=request.id, prompt_tokens=prompt_len, cached_tokens=request.cached_len))
    return ""


def _let_one_pass(state: State, line: list[Request]) -> bool:
    """Admit one request behind the first, which waits for pages, if all before it may be overtaken once more."""
    margins = _margins(state)
    for number, request in enumerate(line[1 : 1 + LOOKED_AT_MAX], 1):
        if not _may_be_overtaken(line[number - 1]) or request.submit.priority != line[0].submit.priority:
            return False
        if _fits(state, request, margins) and not _no_place(state, request):
            passed = line[:number]
            if _start(state, request):
                return False
            for each in passed:
                each.num_overtaken += 1
            return True
    return False


def _may_be_overtaken(request: Request) -> bool:
    """Whether a later request may start first: only so often, and never before one that was preempted."""
    return not request.turn.started and request.num_overtaken < OVERTAKEN_MAX


def _fits(state: State, request: Request, margins: list[int]) -> bool:
    """Whether the pages that a request may need soon are available, even if none of its prompt is cached."""
    length = request.turn.next_prefill_len
    return all(_pages_for(state, book, request, length) <= margin for book, margin in enumerate(margins))


def _refused_before(state: State, request: Request) -> str:
    """Why the head of the queue was refused last time, if nothing has improved: saves a prefix lookup every tick."""
    refusal = state.last_refusal
    if refusal is None or refusal.turn != request.turn.id or not state.running:
        return ""
    counts = (
        (state.sessions.num_leases_kept, refusal.num_leases_kept),
        (state.store.tree.num_pinned, refusal.num_pinned),
    )
    better = any(now > then for now, then in (*counts, *zip(_margins(state), refusal.margins, strict=True)))
    return "" if better else refusal.reason


def _margins(state: State) -> list[int]:
    """Per book, available pages that no running request was promised, without those of idle sessions."""
    return [_available(state, book) - _promised(state, book) for book in range(len(state.resolved.pools))]


def _no_place(state: State, request: Request) -> str:
    if len(state.running) >= state.resolved.sched.max_running:
        return f"{len(state.running)} requests run: --max-running"
    is_suspect = request.num_failures > 0  # it will run alone first, so the size of steps does not matter
    if not is_suspect and not _fits_a_step(state, len(state.running) + 1):
        return f"{len(state.running)} requests run: larger steps failed"
    if state.rows.num_free == 0:
        return "every free row is still used by a step in flight"
    if any(each.mark is not Mark.NONE for each in state.running):
        return "a running request is being preempted or ended"
    return ""


def _fits_a_step(state: State, num_running: int) -> bool:
    """Whether so many requests could decode in one step within the step limits."""
    width = state.resolved.widths.of(num_running)[0]
    return state.step_limits.has_place(num_running - 1, (num_running - 1) * width, width)


def _no_pages(state: State, request: Request, lease: Lease) -> str:
    """Why a request does not fit beside the others. Idle sessions count as available, since they can be reclaimed."""
    for book in range(len(state.resolved.pools)):
        need = _charge(state, book, request, lease, request.turn.next_prefill_len) + _promised(state, book)
        if need <= _available(state, book):
            continue
        idle = [session.lease for session in state.sessions.idle() if session.lease not in (None, lease)]
        spare = num_freed(state.store, [each for each in idle if each is not None], book)
        spare += num_spare(state.store, lease, book)
        if need > _available(state, book) + spare:
            return f"book {book}: {need} pages needed or promised, {_available(state, book) + spare} are available"
    return ""


def _promised(state: State, book: int) -> int:
    """Pages that the running requests may still need."""
    return sum(_charge(state, book, each, each.lease, each.turn.prefill_len) for each in state.running)


def _charge(state: State, book: int, request: Request, lease: Lease, prefill_len: int) -> int:
    """Pages a request may need beyond those it holds, for its prompt and for the rounds that can be in flight."""
    soon = max(prefill_len, lease.device_len_max)
    return max(0, _pages_for(state, book, request, soon) - num_held(state.store, lease, book))


def _pages_for(state: State, book: int, request: Request, length: int) -> int:
    """Pages that a request of `length` tokens may hold while rounds are in flight."""
    resolved = state.resolved
    soon = length + (1 + resolved.depth) * resolved.reserve_of(book)
    return resolved.pages_to_hold(book, min(soon, resolved.length_to_fit(book, request.length_max)))


def _available(state: State, book: int) -> int:
    """Pages that are free, retiring or evictable, and those that running requests keep for later alone."""
    ledger = state.store.ledger
    available = ledger.num_free(book) + ledger.num_retiring(book) + state.store.tree.num_evictable(book)
    return available + sum(num_spare(state.store, each.lease, book) for each in state.running)
