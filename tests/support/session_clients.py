"""Clients of sessions on a real engine, who write down what they were told and what must follow from it.

Each turn's usage is held against the prediction, each session's record, KV and pages against what was committed, and
all text against one dense pass over the same conversation. Used by the scenes of sessions.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from roost.config.options import SessionConfig
from roost.front.speculation import total
from roost.kv.page_counts import own_pages
from roost.kv.pages import ceil_div
from roost.messages import (
    Abort,
    CloseSession,
    Command,
    Event,
    Finished,
    FlushCache,
    OpenSession,
    PromptLogprobs,
    Refused,
    SessionClosed,
    Submit,
    Tokens,
)
from roost.models.model import Head
from roost.sched.request import Mark
from roost.text.stream import StopFinder
from tests.sim.script import accounts
from tests.support.forced_drafts import model_of
from tests.support.session_matrix import PREEMPT_TICKS, Cell
from tests.support.slow_reference import slow_logits, slow_logprobs
from tests.support.spec_engines import NEAR, NEAR_CODES, TOKENIZER
from tests.support.stand_in_heads import NULL
from tests.support.tiny_models import DEVICE, VOCAB, Served

Prompt = tuple[int, ...]


@dataclass(slots=True, kw_only=True, eq=False)
class Talk:
    """What a client knows of its session."""

    tokens: Prompt = ()  # committed
    num_turns: int = 0
    kept: int = 0  # tokens whose KV the session has
    is_exact: bool = False  # whether it has them all, or at most that many


@dataclass(slots=True, kw_only=True, eq=False)
class Asked:
    """A request under way."""

    submit: Submit
    tokens: Prompt = ()  # as they arrive
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)
    scored: list[Tokens] = field(default_factory=list)
    end: Finished | Refused | None = None

    def hear(self, event: Event) -> None:
        """Take an event; none comes after the end."""
        assert self.end is None, (self.submit.request_id, event)
        match event:
            case Tokens():
                self.tokens += event.tokens
                self.scored.append(event)
            case PromptLogprobs():
                self.prompt_logprobs.append(event)
            case Finished() | Refused():
                self.end = event

    @property
    def finished(self) -> Finished:
        """How it ended."""
        assert isinstance(self.end, Finished), self.end
        return self.end

    @property
    def refused(self) -> Refused:
        """Why it was not taken."""
        assert isinstance(self.end, Refused), self.end
        return self.end


class Talks(Served):
    """A cell's engine and its clients."""

    def __init__(self, cell: Cell, head: Head | None = None, limits: SessionConfig | None = None, **sizes: int) -> None:
        super().__init__(
            model_of(cell.kind),
            replace(cell.config(**sizes), session=limits or SessionConfig()),
            head=head or cell.head,
            new_stop_finder=lambda stops, in_special: StopFinder(TOKENIZER, stops, skip_special=not in_special),
        )
        self.cell = cell
        self.talks: dict[str, Talk] = {}
        self.asked: list[Asked] = []
        self._num_taken = 0  # of those, whose ends were looked at
        self._random = Random(cell.name)
        self._num_ticks = 0
        self._checks: list[tuple[Prompt, int]] = []  # texts, and where their outputs start

    # --- asking ------------------------------------------------------------------------------------------------

    def prompt(self, length: int, *, first: bool = False) -> Prompt:
        """New input that repeats itself; its very first token is one that nobody looks at."""
        phrase = self._random.sample(range(1, VOCAB), 7)
        tokens = [*phrase, *self._random.choices(range(1, VOCAB), k=3)] * ceil_div(length, 10)
        return ((NULL, *tokens) if first else tuple(tokens))[:length]

    def begin(self, *names: str, **options: Any) -> None:
        """Open sessions."""
        for name in names:
            self.post(OpenSession(session_id=name, **options))
            self.talks[name] = Talk()
        self.tick()

    def say(self, session: str | None, num_in: int | Prompt, num_new: int, **options: Any) -> Asked:
        """Ask for a turn, or for a generation without a session."""
        is_first = session is None or session not in self.talks or not self.talks[session].tokens
        tokens = num_in if isinstance(num_in, tuple) else self.prompt(num_in, first=is_first)
        name = f"r{len(self.asked)}"
        submit = Submit(request_id=name, tokens=tokens, max_new_tokens=num_new, session_id=session, **options)
        self.asked.append(Asked(submit=submit))
        self.engine.post(submit, self.asked[-1].hear)
        return self.asked[-1]

    def turn(self, session: str, num_in: int | Prompt, num_new: int, **options: Any) -> Asked:
        """One turn, to its end."""
        asked = self.say(session, num_in, num_new, **options)
        self.finish_all()
        assert asked.finished.reason != "error", asked.end
        return asked

    def abort(self, asked: Asked) -> None:
        """A client goes away."""
        self.post(Abort(request_id=asked.submit.request_id))

    def answer(self, command: Command) -> Event:
        """What a command is answered."""
        events: list[Event] = []
        self.engine.post(command, events.append)
        self.tick()
        (event,) = events
        return event

    def end(self, *sessions: str) -> None:
        """Close sessions; each is told so once."""
        events: list[Event] = []
        for session in sessions:
            self.engine.post(CloseSession(session_id=session), events.append)
            del self.talks[session]
        self.finish_all()
        assert [type(event) for event in events] == [SessionClosed] * len(sessions), events

    def tick(self, num_ticks: int = 1) -> None:
        """Some turns of the loop, under the cell's load."""
        for _ in range(num_ticks):
            self.engine.tick()
            self._num_ticks += 1
            if self.cell.load == "preemptions" and self._num_ticks % PREEMPT_TICKS == 0:
                for request in self.engine.state.running:
                    self.engine.state.mark(request, Mark.PREEMPT)

    def finish_all(self) -> None:
        """Tick until nothing is left to do, and look at how everything ended."""
        for _ in range(4000):
            if not self.engine.has_work:
                break
            self.tick()
        assert not self.engine.has_work, self.engine.waiting_for
        for asked in self.asked[self._num_taken :]:
            assert asked.end is not None, asked.submit
            if isinstance(asked.end, Finished):
                self._take(asked, asked.end)
            else:
                assert not asked.tokens, asked.end
        self._num_taken = len(self.asked)

    # --- what must follow --------------------------------------------------------------------------------------

    def _take(self, asked: Asked, end: Finished) -> None:
        """Hold an end against the session it belongs to, and note what the session must have now."""
        submit, usage = asked.submit, end.usage
        talk = self.talks.get(submit.session_id) if submit.session_id is not None else Talk()
        assert usage.completion_tokens == len(asked.tokens) <= (submit.max_new_tokens or 0)
        if talk is None:  # it was closed under this turn
            assert end.reason == "abort", end
            return
        before = talk.tokens + submit.tokens
        self._checks.append((before + asked.tokens, len(before)))
        self._assert_logprobs(asked, before)
        is_suspended = self._noted("suspend", submit.request_id)
        if submit.session_id is not None:
            self._assert_inherited(talk, submit, end, len(before))
        if end.reason != "abort":
            assert usage.prompt_tokens == len(before), (submit, usage)
            talk.tokens, talk.num_turns = before + asked.tokens, talk.num_turns + 1
            # what the last token lacks: its round was cut short of its bonus, or a later step had been launched
            lacks = bool(asked.tokens) and self.cell.depth == 0 and end.spec.overshoot == 0
            talk.kept, talk.is_exact = len(talk.tokens) - lacks, True
        elif self._noted("admit", submit.request_id):  # it ran the last token of what was there before
            talk.kept, talk.is_exact = len(talk.tokens), talk.is_exact and not is_suspended

    def _assert_inherited(self, talk: Talk, submit: Submit, end: Finished, prompt_len: int) -> None:
        """The turn found what was predicted; at most that, after a preemption that was aborted or a reclaim."""
        assert submit.session_id is not None
        if self._was_reclaimed(submit.session_id):
            talk.is_exact = False
        if not talk.tokens or (end.reason == "abort" and not self._noted("admit", submit.request_id)):
            return  # what the tree has of a first prompt is not the session's; and this one never started
        expected, found = min(talk.kept, prompt_len - 1), end.usage.cached_tokens
        assert found == expected if talk.is_exact else found <= max(expected, 0), (submit, found, expected)

    def _noted(self, kind: str, name: str) -> bool:
        return any(note[0] == kind and note[1] == name for note in self.notes)

    def _was_reclaimed(self, name: str) -> bool:
        return self._noted("reclaim", name) or self._noted("over_limit", name)

    def _assert_logprobs(self, asked: Asked, before: Prompt) -> None:
        """Every log-probability that was asked for came once, and is that of a dense pass."""
        submit, cell = asked.submit, self.cell
        tokens = before + asked.tokens
        own = [entry for event in asked.scored for entry in event.logprobs]
        assert len(own) == (0 if submit.num_top_logprobs is None else len(asked.tokens)), submit
        places = {len(before) + number: entry for number, entry in enumerate(own)}
        for event in asked.prompt_logprobs:
            assert submit.prompt_logprobs_from is not None and not places.keys() & {event.start}
            places |= {event.start + number: entry for number, entry in enumerate(event.logprobs)}
        if submit.prompt_logprobs_from is not None and isinstance(asked.end, Finished):
            first = max(submit.prompt_logprobs_from, asked.end.usage.cached_tokens)
            scored = sorted(place for place in places if place < len(before))
            assert not scored or scored == list(range(scored[0], len(before)))
            stale = 1 if cell.shape.pair else 0  # a pair drafter may run the last inherited token again
            start = scored[0] - 1 if scored else len(before) - 1
            assert asked.end.reason == "abort" or first - stale <= start <= first, (submit, scored)
        rows = slow_logprobs(cell.kind, tokens, cell.kv_cache_dtype) if places else ()
        may_part = cell.kv_cache_dtype != "auto" and DEVICE.type == "cuda"
        near = NEAR_CODES if may_part else NEAR
        for place, entry in places.items():
            assert entry.logprob == pytest.approx(rows[place - 1][tokens[place]], abs=near), (submit, place)
            if may_part:
                continue
            best = (-rows[place - 1]).argsort(kind="stable")[: submit.num_top_logprobs or 0]
            assert [token for token, _ in entry.top_logprobs] == best.tolist(), (submit, place)

    # --- at rest -----------------------------------------------------------------------------------------------

    def assert_at_rest(self) -> None:
        """Nothing runs: rows are free, idle sessions hold what was committed, and nobody else holds a page."""
        state = self.engine.state
        assert not (state.requests or state.running or state.queued or state.in_flight or state.close_replies)
        assert state.rows.num_free == state.resolved.num_rows
        assert set(state.sessions.table) == set(self.talks)
        for name, session in state.sessions.table.items():
            talk, lease = self.talks[name], session.lease
            assert tuple(session.record.slice(0, len(session.record)).tolist()) == talk.tokens, name
            assert (session.turn, len(session.turns), list(session.waiting)) == (None, talk.num_turns, []), name
            settled = 0 if lease is None else lease.settled_len
            is_exact = talk.is_exact and not self._was_reclaimed(name)
            assert settled == talk.kept if is_exact else settled <= talk.kept, (name, settled, talk.kept)
            if lease is not None:
                assert len(lease.pages[0]) == ceil_div(settled, state.resolved.page_size), name
        leases = [session.lease for session in state.sessions.table.values() if session.lease is not None]
        assert {lease.id for lease in leases} == set(state.store.leases)
        for book, sizes in enumerate(state.resolved.books):
            held = accounts(state, book)
            assert held["leased"] == sum(len(own_pages(state.store, lease, book)) for lease in leases), (book, held)
            assert held["retiring"] == 0 and sum(held.values()) == sizes.num_pages - 1, (book, held)

    def assert_all_said_is_right(self) -> None:
        """Every output is that of the same conversation sent as one prompt; what clients were told adds up."""
        for text, start in self._checks:
            best = slow_logits(self.cell.kind, text, self.cell.kv_cache_dtype).argmax(axis=-1)[start - 1 : -1]
            assert tuple(best.tolist()) == text[start:], (start, text)
        self._checks.clear()
        ends: Iterable[Finished] = (asked.end for asked in self.asked if isinstance(asked.end, Finished))
        assert total(end.spec for end in ends) == self.engine.state.spec_counters.snapshot()

    def wind_up(self) -> None:
        """All sessions closed and the cache flushed, every page is free."""
        self.assert_at_rest()
        self.assert_all_said_is_right()
        self.end(*self.talks)
        self.assert_at_rest()
        self.answer(FlushCache())
        state = self.engine.state
        for book, sizes in enumerate(state.resolved.books):
            assert accounts(state, book)["free"] == sizes.num_pages - 1, book
