"""Waiting: nobody waits in the queue while there is room, and nobody goes back there without need.

The first in line starts as soon as a row is free and its worst case fits beside what the running requests were
promised; while it waits for pages, whoever behind it may overtake it and needs fewer does. A request is suspended only
if it was preempted or was in a step that broke. Reads the engine's state; never changes it.
"""

from collections import Counter
from itertools import pairwise

import numpy as np

from roost.kv.page_counts import num_freed, num_held, num_spare
from roost.sched.request import Mark, Request
from roost.sched.state import State
from roost.session.record import key_of
from tests.sim.checker import Broken
from tests.sim.waste import pages_wanted

OVERTAKEN_MAX = 8  # requests that start before one that waits for pages
LOOKED_AT_MAX = 32  # requests behind it that may be among them


class Waiting:
    """Watches the queue of one engine."""

    def __init__(self, state: State) -> None:
        self._state, self._resolved = state, state.resolved
        self._num_overtaken: Counter[str] = Counter()  # how often somebody behind a request started first
        self._leaving: set[str] = set()  # preempted, and not suspended yet
        self._broken_from: int | None = None  # the step that broke in this tick
        self._step: int | None = None  # the one that was launched in it
        self._has_reclaimed = False  # whether an idle session lost its pages in it

    # --- back to the queue -------------------------------------------------------------------------------------

    def preempted(self, request_id: str) -> None:
        """A request was marked for preemption."""
        self._leaving.add(request_id)

    def broke(self, first_step: int) -> None:
        """A step broke, and those after it are void."""
        self._broken_from = first_step

    def suspended(self, request: Request) -> None:
        """A request goes back to the queue: it was preempted, or a step that broke named it."""
        is_named = self._broken_from is not None and request.lease.last_step >= self._broken_from
        if request.id not in self._leaving and not is_named:
            raise Broken(f"preempt: {request.id} is suspended, though nobody needs its pages and no step of it broke")
        self._leaving.discard(request.id)

    # --- the queue ---------------------------------------------------------------------------------------------

    def admitted(self, request: Request) -> None:
        """A request was admitted: as many as run now may run, and could all decode in one step."""
        if len(self._state.running) > self._resolved.sched.max_running:
            raise Broken(f"limit: {[each.id for each in self._state.running]} run")
        if not request.num_failures and not self._is_small(len(self._state.running)):
            raise Broken(f"limit: {request.id} starts, {self._state.step_limits} has no place for one more")
        self._num_overtaken.update(each.id for each in self._state.queued if each.order < request.order)

    def launched(self, step: int) -> None:
        """A step was launched."""
        self._step = step

    def after_tick(self) -> None:
        """Whoever could have started when the tick admitted requests has started."""
        has_broken = self._broken_from is not None
        self._check_queue(has_broken)
        self._broken_from, self._step, self._has_reclaimed = None, None, False

    def reclaimed(self) -> None:
        """An idle session lost its pages to a running request."""
        self._has_reclaimed = True

    def _check_queue(self, has_broken: bool) -> None:
        state = self._state
        for session in state.sessions.table.values():
            if session.waiting and session.turn is None:
                raise Broken(f"idle: a turn waits for {session.id}, which is free")
        if not state.queued or has_broken:  # a launch that fails comes after admission
            return
        if not state.running and not state.in_flight:
            raise Broken(f"idle: {[each.id for each in state.queued]} wait, nobody runs")
        line = self._line()
        if not line or not self._has_place(line[0]):
            return
        margins = self._margins()
        if self._fits(line[0], margins, may_reclaim=True):
            raise Broken(f"idle: {line[0].id} waits, {margins} pages are promised to nobody")
        if self._has_reclaimed:  # since then: those behind the first reclaim nothing
            return
        for before, each in pairwise(line[: 1 + LOOKED_AT_MAX]):
            if not self._may_be_overtaken(before) or each.submit.priority != line[0].submit.priority:
                return
            if self._has_place(each) and self._fits(each, margins, may_reclaim=False):
                raise Broken(f"idle: {each.id} waits behind {line[0].id}, {margins} pages are promised to nobody")

    def _line(self) -> list[Request]:
        """Who may start, in order: by priority, then whose client runs least, then by arrival."""
        limits = self._resolved.clients
        runs = Counter(each.submit.client for each in self._state.running)
        most = {name: limits[name].running for name in limits}
        may_start = [
            each
            for each in self._state.queued
            if most.get(each.submit.client) is None or runs[each.submit.client] < (most[each.submit.client] or 0)
        ]
        if not limits:
            return may_start
        return sorted(may_start, key=lambda each: (-each.submit.priority, runs[each.submit.client], each.arrival))

    def _has_place(self, request: Request) -> bool:
        """Whether a row is free and one more could decode beside the others, and nobody is about to leave."""
        state, num_running = self._state, len(self._state.running) + 1
        if num_running > self._resolved.sched.max_running or not state.rows.num_free:
            return False
        if any(each.mark is not Mark.NONE for each in state.running):
            return False
        return self._is_small(num_running) or request.num_failures > 0

    def _is_small(self, num_rounds: int) -> bool:
        """Whether the step limits allow a step of so many rounds, as narrow as they can be; one always goes."""
        rows, tokens = self._state.step_limits.rows.most, self._state.step_limits.tokens.most
        num_tokens = num_rounds * min(self._resolved.widths.of(num_rounds))
        has_rows, has_tokens = rows is None or num_rounds <= rows, tokens is None or num_tokens <= tokens
        return num_rounds == 1 or (has_rows and has_tokens)

    def _may_be_overtaken(self, request: Request) -> bool:
        """Whether a request never ran and was not overtaken too often, as counted here where there is one line."""
        num_overtaken = request.num_overtaken if self._resolved.clients else self._num_overtaken[request.id]
        return not request.turn.started and num_overtaken < OVERTAKEN_MAX

    def _margins(self) -> list[int]:
        """Per book: pages free, on their way or evictable that the running ones were not promised before this step."""
        store, margins = self._state.store, []
        for book in range(len(self._resolved.pools)):
            available = store.ledger.num_free(book) + store.ledger.num_retiring(book) + store.tree.num_evictable(book)
            available += sum(num_spare(store, each.lease, book) for each in self._state.running)
            margins.append(available - sum(self._promised(each, book) for each in self._state.running))
        return margins

    def _promised(self, request: Request, book: int) -> int:
        lease = request.lease
        launched = sum(claim.most for claim in lease.claims if claim.step == self._step)  # since requests were admitted
        length = max(request.turn.prefill_len, lease.device_len_max - launched)
        return max(0, pages_wanted(self._resolved, request, length, book) - num_held(self._state.store, lease, book))

    def _fits(self, request: Request, margins: list[int], *, may_reclaim: bool) -> bool:
        """Whether a request fits even if nothing of its prompt is cached.

        The first in line may reclaim idle sessions for that, or else share what others keep in the cache.
        """
        session, length = request.turn.session, request.turn.next_prefill_len
        own = session.lease if session is not None and may_reclaim else None
        idle = [each.lease for each in self._state.sessions.idle() if each.lease not in (None, own)]
        for book, margin in enumerate(margins):
            need = pages_wanted(self._resolved, request, max(length, own.device_len_max if own else 0), book)
            need -= num_held(self._state.store, own, book) if own else 0
            need -= num_spare(self._state.store, own, book) if own else 0
            if need <= margin:
                continue
            spare = num_freed(self._state.store, [each for each in idle if each], book) if may_reclaim else 0
            shared = self._num_shared(request) if may_reclaim and own is None else 0
            if need > margin + max(spare, shared):
                return False
        return True

    def _num_shared(self, request: Request) -> int:
        """Pages with the beginning of a request's prompt that others keep in the cache."""
        turn, tree, pair = request.turn, self._state.store.tree, self._resolved.spec.pair
        if self._state.store.window_book is not None:
            return 0  # whether the window behind it is cached, too, is another matter
        tokens = turn.record.slice(0, len(turn.record))
        if not turn.started:
            tokens = np.concatenate([tokens, np.array(turn.input_tokens, dtype=np.int32)])
        key = key_of(tokens if pair else tokens[:-1], pair)[: request.prompt_logprobs_pending]
        match = tree.match(turn.scoped_salt, key)
        node, length = (match.node, match.length) if match is not None else (None, 0)
        while node is not None and not node.pins:
            node, length = node.parent, node.start
        return length // self._resolved.page_size if node is not None else 0
