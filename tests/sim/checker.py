"""Checker: compares everything that clients are told with what the oracle predicts, token by token and turn by turn.

It keeps its own state of every request and session, from the commands sent and the events received. It never looks into
the engine to find out what should have happened, except for which step ended a turn.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce

import numpy as np

from roost.clients import ClientLimits, scoped, unscoped
from roost.config.resolved import Resolved
from roost.messages import (
    Begun,
    Event,
    Finished,
    PromptLogprobs,
    Refused,
    SpecStats,
    Stats,
    Submit,
    TokenLogprob,
    Tokens,
    Usage,
)
from tests.sim.automaton import expected_output
from tests.sim.model import U64, Model, mix, states_of
from tests.sim.round_counts import RoundCounts, total
from tests.sim.wishes import first_stop


class Broken(AssertionError):
    """A check failed; the first word of the message names the check."""


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A client's view of a session."""

    id: str  # unique among all clients' sessions
    client: str = ""
    cache_salt: str = ""
    ttl_ms: int | None = None
    max_tokens: int | None = None
    shares: bool = False
    tokens: list[int] = field(default_factory=list)  # its history: what its finished turns add up to
    turns: list[tuple[int, Usage]] = field(default_factory=list)  # of each: length of the history after it, and usage
    cached: tuple[int, int] | None = (0, 0)  # tokens the next turn must inherit, at least and at most; None: who knows
    shared_max: int = 0  # upper bound of the tokens whose pages others may share
    window_from: int = 0  # from this length on a cut keeps its KV, since the window is held
    state_ends: list[int] = field(default_factory=list)  # ends of turns at which a state of recurrent layers is kept
    opened: bool = False  # whether the engine has confirmed it
    closing: bool = False
    expired: bool = False
    num_open_turns: int = 0
    last_used: int = 0  # of the clock

    @property
    def name(self) -> str:
        """What its client calls it."""
        return unscoped(self.client, self.id)


@dataclass(slots=True, kw_only=True)
class Ask:
    """A client's view of a request."""

    submit: Submit
    conversation: Conversation | None
    number: int  # how many were sent before it
    deadline: int | None  # of the clock
    output: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of the output
    prompt_logprobs_next: int | None = None  # where the next token of its prompt to be scored is, once it has started
    prompt_logprobs_first: int | None = None
    lost_states: bool = False  # whether states that are kept for rewinds were let go while it was open
    history: list[int] | None = None  # tokens before its input, known once it produces something
    begun: Begun | None = None
    ended: bool = False
    counts: RoundCounts = field(default_factory=RoundCounts)  # of its live rounds
    num_open: int = 0  # requests that had not ended when it was sent
    met_busy: bool = False  # its session had a turn that had not ended
    aborted: bool = False
    poisoned_at: int | None = None  # every step in which it reaches this position fails
    last_launch: int = -1  # last step that named it
    overshot: bool = False  # its last round was cut before the bonus token
    sat_out_at: int = -9  # last tick in which it had no pages for its step
    disturbed: bool = False  # it was suspended, or a step with it failed

    @property
    def order(self) -> tuple[int, int]:
        """Its place in the order: by priority, then by arrival."""
        return -self.submit.priority, self.number

    @property
    def is_foreign(self) -> bool:
        """Whether it names another salt than its session's."""
        return self.conversation is not None and self.submit.cache_salt not in ("", self.conversation.cache_salt)

    @property
    def prompt(self) -> list[int]:
        """History and input; final once it has started."""
        if self.history is not None:
            return self.history + list(self.submit.tokens)
        return (self.conversation.tokens if self.conversation else []) + list(self.submit.tokens)


class Checker:
    """All requests and sessions of one run."""

    def __init__(self, model: Model, resolved: Resolved, has_step_faults: bool) -> None:
        self._model = model
        self._resolved = resolved
        self._page_size = resolved.page_size
        self._has_step_faults = has_step_faults
        self._num_open = 0
        self.now = 0  # of the clock, at the start of the tick
        self.told_at = 0  # the same, or when the last step was collected, if that was later
        self.usage = Usage(prompt_tokens=0, cached_tokens=0, completion_tokens=0)  # sums of what was told
        self.asks: dict[str, Ask] = {}
        self.fresh: list[Ask] = []  # sent and not read yet
        self.conversations: dict[str, Conversation] = {}
        self.spec_sum = SpecStats(histogram=(0,) * resolved.spec.accept_max)
        self.counts: dict[str, int] = {}
        self.num_tokens = 0

    def sent(self, submit: Submit, taken_at: int) -> Ask:
        """A request goes out under a fresh name; the engine reads it when the clock says `taken_at`."""
        conversation = self.conversation_of(submit)
        ask = Ask(
            submit=submit,
            conversation=conversation,
            number=len(self.asks),
            deadline=None if submit.timeout_ms is None else taken_at + submit.timeout_ms * 1_000_000,
            num_open=self._num_open,
        )
        self._num_open += 1
        self.fresh.append(ask)
        if conversation is not None:
            ask.met_busy = conversation.num_open_turns > 0
        self.asks[submit.request_id] = ask
        if conversation is not None:
            conversation.num_open_turns += 1
        return ask

    def conversation_of(self, submit: Submit) -> Conversation | None:
        """The session that a turn names: its own client's."""
        return self.conversations.get(scoped(submit.client, submit.session_id)) if submit.session_id else None

    def event(self, ask: Ask, event: Event, collecting: int) -> None:
        """Something came back; `collecting` is the step whose result is being taken over."""
        if ask.ended:
            raise Broken(f"terminal: {ask.submit.request_id} had ended when it got {event}")
        match event:
            case Begun():
                self._know_history(ask)
            case Tokens():
                self._know_history(ask)
                self._check_all_scored(ask)
                if len(event.logprobs) != (0 if ask.submit.num_top_logprobs is None else len(event.tokens)):
                    raise Broken(f"logprobs: {ask.submit.request_id} got {event}")
                ask.output.extend(event.tokens)
                ask.logprobs.extend(event.logprobs)
            case PromptLogprobs():
                self._know_history(ask)
                self._prompt_logprobs(ask, event)
            case Finished():
                self._finished(ask, event, collecting)
            case Refused():
                self._check_refused(ask, event)
                self._end(ask, f"refused {event.status}")
            case _:
                raise Broken(f"terminal: unexpected {event} for {ask.submit.request_id}")

    def _know_history(self, ask: Ask) -> None:
        if ask.history is None:
            ask.history = list(ask.conversation.tokens) if ask.conversation else []

    # --- logprobs ------------------------------------------------------------------------------------------------

    def admitted(self, ask: Ask, inherited_len: int) -> None:
        """A request starts: its prompt is scored from where it asked, or after what its session inherits."""
        if ask.submit.prompt_logprobs_from is not None and ask.prompt_logprobs_next is None:
            ask.prompt_logprobs_next = ask.prompt_logprobs_first = max(ask.submit.prompt_logprobs_from, inherited_len)

    def _prompt_logprobs(self, ask: Ask, event: PromptLogprobs) -> None:
        """Each prompt token is scored once, in order, before the output, and as the oracle says."""
        prompt, first = ask.prompt, event.start - 1
        if (
            first != ask.prompt_logprobs_next
            or not event.logprobs
            or event.start + len(event.logprobs) > len(prompt)
            or ask.output
        ):
            raise Broken(
                f"logprobs: {ask.submit.request_id} got {event}, next is {ask.prompt_logprobs_next} of {len(prompt)}"
            )
        ask.prompt_logprobs_next = first + len(event.logprobs)
        states = states_of(self._model, np.array(prompt, dtype=np.int64))
        self._check_logprobs(ask, event.logprobs, states[first : ask.prompt_logprobs_next], prompt[event.start :])

    def _check_all_scored(self, ask: Ask) -> None:
        if ask.submit.prompt_logprobs_from is not None and (ask.prompt_logprobs_next or 0) < len(ask.prompt) - 1:
            raise Broken(
                f"logprobs: {ask.submit.request_id} has output, but its prompt is scored to {ask.prompt_logprobs_next}"
            )

    def _check_logprobs(self, ask: Ask, logprobs: Sequence[TokenLogprob], states: U64, tokens: Sequence[int]) -> None:
        top = ask.submit.num_top_logprobs or 0
        for entry, state, token in zip(logprobs, states.tolist(), tokens, strict=False):
            expected = TokenLogprob(
                logprob=self._model.logprob(state, token), top_logprobs=tuple(self._model.top(state, top))
            )
            if entry != expected:
                raise Broken(f"logprobs: {ask.submit.request_id} got {entry} for token {token}, expected {expected}")

    def check_stats(self, stats: Stats) -> None:
        """The engine's sums are those of what clients were told; the accounts of a pool make the pool."""
        endings = {how: count for how, count in self.counts.items() if not how.startswith("refused")}
        output_len = sum(len(ask.output) for ask in self.asks.values())
        told = (self.usage.prompt_tokens, self.usage.cached_tokens, output_len, tuple(sorted(endings.items())))
        counted = (stats.prompt_tokens, stats.cached_tokens, stats.completion_tokens, stats.endings)
        if told != counted:
            raise Broken(f"stats: {counted} were counted, {told} were told")
        for told_pool, pool in zip(stats.pools, self._resolved.pools, strict=True):
            parts = (told_pool.free, told_pool.leased, told_pool.cached, told_pool.retiring)
            if sum(parts) != told_pool.total or told_pool.total != pool.num_pages - 1 or min(parts) < 0:
                raise Broken(f"stats: {told_pool} of {pool}")

    # --- ends --------------------------------------------------------------------------------------------------

    def _check_refused(self, ask: Ask, event: Refused) -> None:
        """A refusal has a cause that is known to the client."""
        submit, conversation = ask.submit, ask.conversation
        history = len(conversation.tokens) if conversation else 0
        most = self._most_new(history + len(submit.tokens), conversation)
        done = len(conversation.turns) if conversation else 0
        taken = submit.turn is not None and submit.turn < done
        early = submit.turn is not None and submit.turn > done and event.param == "turn"
        queued = self._limits(submit.client).queued
        bad = {
            "cache_salt": ask.is_foreign,
            "min_new_tokens": submit.max_new_tokens is None and submit.min_new_tokens > most,
            "tokens": not submit.tokens and history == 0,
        }
        explained = {
            403: self._is_too_urgent(submit),
            400: bad.get(event.param, False),
            404: submit.session_id is not None and (conversation is None or conversation.closing),
            409: taken or early or (ask.met_busy and not submit.queue),
            410: conversation is not None and conversation.closing,
            413: most < (submit.max_new_tokens or 0) or most < 1,
            429: ask.num_open >= min(self._resolved.sched.max_queued, math.inf if queued is None else queued),
        }
        if not explained.get(event.status, False):
            raise Broken(f"refusal: {submit.request_id} got {event} with {history} tokens before it, for no reason")
        param = {400: event.param, 403: "priority", 413: "tokens", 429: ""}.get(event.status, "session_id")
        if event.status == 409 and (taken or early):
            param = "turn"
        if event.param != param:
            raise Broken(f"param: {submit.request_id} got {event}, {param!r} is at fault")
        usage = conversation.turns[submit.turn or 0][1] if event.status == 409 and conversation and taken else None
        if event.usage != usage:
            raise Broken(f"retry: {submit.request_id} got {event}, the turn with its number cost {usage}")

    def _limits(self, client: str) -> ClientLimits:
        return self._resolved.clients.get(client, ClientLimits(name=client))

    def _is_too_urgent(self, submit: Submit) -> bool:
        """Whether a request asks for a priority that its client may not have, or for one below."""
        limits = self._limits(submit.client)
        least = -math.inf if limits.priority_min is None else limits.priority_min
        most = math.inf if limits.priority_max is None else limits.priority_max
        return not least <= submit.priority <= most

    def _most_new(self, prompt_len: int, conversation: Conversation | None) -> int:
        """Most new tokens that context, session and pools allow."""
        resolved, most = self._resolved, self._resolved.context - prompt_len
        if conversation is not None and conversation.max_tokens is not None:
            most = min(most, conversation.max_tokens - prompt_len)
        while most >= 0 and not all(
            resolved.pages_to_hold(book, resolved.length_to_fit(book, prompt_len + most)) <= spec.num_pages - 1
            for book, spec in enumerate(resolved.books)
        ):
            most -= 1
        return most

    def _end(self, ask: Ask, how: str) -> None:
        ask.ended = True
        self._num_open -= 1
        self.counts[how] = self.counts.get(how, 0) + 1
        if ask.conversation is not None:
            ask.conversation.num_open_turns -= 1

    def _finished(self, ask: Ask, event: Finished, collecting: int) -> None:
        self._end(ask, event.reason)
        self._know_history(ask)
        if ask.conversation is not None:
            ask.conversation.last_used = self.told_at
        prompt_logprobs_from = (
            ask.submit.prompt_logprobs_from if ask.prompt_logprobs_first is None else ask.prompt_logprobs_first
        )
        if event.prompt_logprobs_from != prompt_logprobs_from:
            raise Broken(
                f"logprobs: {ask.submit.request_id} from {prompt_logprobs_from}, told {event.prompt_logprobs_from}"
            )
        prompt = ask.prompt
        self._check_output(ask, event, prompt)
        if (wrong := ask.counts.differ(event.spec)) is not None:
            raise Broken(f"statistics: {ask.submit.request_id} had {wrong}: {event.spec}")
        self.spec_sum = total(self.spec_sum, event.spec)
        self._check_cause(ask, event)
        if event.usage.completion_tokens != len(ask.output):
            raise Broken(f"usage: {len(ask.output)} tokens came, {event.usage} was told")
        self.usage = Usage(
            prompt_tokens=self.usage.prompt_tokens + event.usage.prompt_tokens,
            cached_tokens=self.usage.cached_tokens + event.usage.cached_tokens,
            completion_tokens=self.usage.completion_tokens + event.usage.completion_tokens,
        )
        if event.reason in ("stop", "length"):
            self._check_all_scored(ask)
            self._check_usage(ask, event, prompt)
            self._commit(ask, event, prompt, collecting)
        elif ask.conversation is not None:
            kept = len(ask.conversation.tokens)
            before = ask.conversation.cached  # its last token may have been about to run again
            ask.conversation.cached = None if before is None or ask.disturbed else (max(0, before[0] - 1), kept)
            # while the turn ran, the window was kept behind its commit point alone
            behind = max(0, kept - 1) // self._page_size * self._page_size
            ask.conversation.window_from = max(ask.conversation.window_from, behind)

    def _check_cause(self, ask: Ask, event: Finished) -> None:
        """An abort was asked for, an error was injected, and an absent limit was filled in as allowed."""
        closing = ask.conversation is not None and ask.conversation.closing
        if event.reason == "abort" and not (ask.aborted or closing):
            raise Broken(f"cause: {ask.submit.request_id} was aborted, but nobody asked for it")
        if ask.is_foreign:
            raise Broken(f"salt: {ask.submit.request_id} was taken: its session has '{ask.conversation}'")
        if self._is_too_urgent(ask.submit):
            raise Broken(f"limit: {ask.submit} was taken, its priority is not {self._limits(ask.submit.client)}")
        if ask.aborted and event.reason != "abort":
            raise Broken(f"abort: {ask.submit.request_id} ended with {event.reason} after its abort was read")
        late = ask.deadline is not None and self.now >= ask.deadline
        if (event.reason == "timeout") != late and event.reason != "abort":
            raise Broken(f"deadline: {ask.submit.request_id} ended with {event.reason} at {self.now}: {ask.deadline}")
        if event.reason == "error" and not (self._has_step_faults or ask.poisoned_at is not None):
            raise Broken(
                f"cause: {ask.submit.request_id} ended with an error, but no step of its own could break twice"
            )
        if event.reason in ("stop", "length"):
            asked = ask.submit.max_new_tokens
            allowed = self._most_new(event.usage.prompt_tokens, ask.conversation) if asked is None else asked
            if event.max_new_tokens != allowed or ask.submit.min_new_tokens > allowed:
                raise Broken(f"limit: {ask.submit.request_id} was allowed {event.max_new_tokens} tokens, not {allowed}")
        if not 0 <= event.usage.cached_tokens <= event.usage.prompt_tokens:
            raise Broken(f"usage: {event.usage} for {ask.submit.request_id}")

    def _check_output(self, ask: Ask, event: Finished, prompt: list[int]) -> None:
        """Every token is the oracle's, and the end is where and why it should be."""
        output = ask.output
        self.num_tokens += len(output)
        if output:
            states = states_of(self._model, np.array(prompt + output, dtype=np.int64))
            before = states[len(prompt) - 1 : -1].tolist()
            expected, grammar = [self._model.next_token(state) for state in before], ask.submit.grammar
            expected = expected_output(self._model, before, output, grammar) if grammar else expected
            if expected != output:
                raise Broken(f"tokens: {ask.submit.request_id} got {output}, the oracle says {expected}")
            self._check_logprobs(ask, ask.logprobs, states[len(prompt) - 1 :], output)
        if len(output) > event.max_new_tokens:
            raise Broken(f"end: {len(output)} tokens, {event.max_new_tokens} were allowed")
        stopped = (len(output), event.matched) if event.reason == "stop" else None
        if first_stop(ask.submit, output) != stopped or (event.reason != "stop" and event.matched is not None):
            raise Broken(f"end: {event} with {output}, the oracle says {first_stop(ask.submit, output)}: {ask.submit}")
        if event.reason == "length" and len(output) != event.max_new_tokens:
            raise Broken(f"end: length with {len(output)} of {event.max_new_tokens} tokens")

    def _check_usage(self, ask: Ask, event: Finished, prompt: list[int]) -> None:
        if event.usage.prompt_tokens != len(prompt):
            raise Broken(f"history: prompt of {len(prompt)}, {event.usage} was told")
        conversation = ask.conversation
        if conversation is None or conversation.cached is None or not conversation.tokens:
            return
        low, high = (min(bound, len(prompt) - 1) for bound in conversation.cached)
        if not ask.submit.tokens:  # its last page may be shared, and is not written then
            low = min(low, max(0, len(prompt) - 2) // self._page_size * self._page_size)
        if not low <= event.usage.cached_tokens <= high:
            raise Broken(
                f"inheritance: {ask.submit.request_id} found {event.usage.cached_tokens} of {len(prompt)} cached, "
                f"expected {(low, high)}"
            )

    def _commit(self, ask: Ask, event: Finished, prompt: list[int], collecting: int) -> None:
        """A finished turn becomes history; whether the KV of its last token was written is predicted."""
        conversation = ask.conversation
        if conversation is None:
            return
        if conversation.tokens != ask.history:
            raise Broken(f"history: {ask.submit.request_id} began before another turn of {conversation.id} ended")
        number = len(conversation.turns)
        if ask.submit.turn not in (None, number):
            raise Broken(f"retry: {ask.submit.request_id} is turn {number} of {conversation.id}, not as it asked")
        if conversation.cached is None or not ask.history:  # it may have started on the tree's pages
            conversation.shared_max = len(prompt)
        is_known = conversation.cached is not None and not (ask.disturbed or ask.lost_states or conversation.shares)
        self._keep_end(conversation, len(ask.history) if is_known and ask.history else None)
        if ask.disturbed or conversation.shares:  # and gone on from them, with output that was published
            conversation.shared_max = len(prompt) + len(ask.output)
        conversation.tokens = prompt + ask.output
        conversation.turns.append((len(conversation.tokens), event.usage))
        written = ask.overshot or ask.last_launch > collecting or event.max_new_tokens == 0
        length = len(conversation.tokens) - (0 if written else 1)
        conversation.cached = (length, length)
        conversation.window_from = max(0, length - 1) // self._page_size * self._page_size

    def rewound(self, conversation: Conversation, length: int, num_turns: int) -> None:
        """A session was cut; where nobody else has its pages and its window is held, its KV is cut exactly there."""
        del conversation.tokens[length:], conversation.turns[num_turns:]
        before, size = conversation.cached, self._page_size
        is_held = length > conversation.window_from or length in conversation.state_ends
        if before is None or (any(book.window is not None for book in self._resolved.books) and not is_held):
            conversation.cached = None
            return
        least = length
        if self._resolved.states is not None:
            is_far = length - conversation.window_from > (self._resolved.books[-1].window or 0)
            least = conversation.window_from if is_far and length not in conversation.state_ends else length
            conversation.window_from = max(conversation.window_from, length)  # going back by one later may be dear
            least, length = (max(0, each - self._resolved.spec.pair) for each in (least, length))
        low, high = min(before[0], least), length if before[1] < length else min(before[1], length)
        if length <= conversation.shared_max:  # a shared page is not written; with pairs its last slot is another's
            low = max(0, low - self._resolved.spec.pair) // size * size
        # if nothing is left, the next turn looks its tokens up in the prefix tree
        conversation.cached = (low, high) if low else None

    def _keep_end(self, conversation: Conversation, end: int | None) -> None:
        """The state at a turn's end, past which the next one has come, is kept with those before it."""
        num_turns = 0 if self._resolved.states is None else self._resolved.states.num_turns
        ends = [] if end is None else [*(each for each in conversation.state_ends if each < end), end]
        conversation.state_ends = ends[max(0, len(ends) - num_turns) :]

    def forked(self, conversation: Conversation, new_id: str, length: int, num_turns: int) -> Conversation:
        """A session was forked: both share its whole pages from now on."""
        conversation.shared_max = len(conversation.tokens)
        conversation.state_ends = []  # the tree has some of these states now, and may let go of them
        return Conversation(
            id=new_id,
            client=conversation.client,
            cache_salt=conversation.cache_salt,
            ttl_ms=conversation.ttl_ms,
            max_tokens=conversation.max_tokens,
            shares=conversation.shares,
            tokens=conversation.tokens[:length],
            turns=conversation.turns[:num_turns],
            cached=None,
            opened=True,
            last_used=self.now,
        )

    def reopened(self, conversation: Conversation) -> None:
        """A session has a name whose owner's time is just up: what was sent behind it and not read yet means this one.

        What was sent before it has been refused by now.
        """
        for ask in self.fresh:
            is_meant = self.conversation_of(ask.submit) is conversation
            if is_meant and not ask.ended and ask.conversation is not conversation:
                ask.conversation, ask.met_busy = conversation, conversation.num_open_turns > 0
                conversation.num_open_turns += 1

    def disturbed(self, request_id: str) -> None:
        """A request was suspended: what its session finds next is not predicted."""
        self.asks[request_id].disturbed = True

    def dropped_states(self) -> None:
        """Somebody let go of the states that are kept for rewinds: which is not known."""
        for conversation in self.conversations.values():
            conversation.state_ends = []
        for ask in self.asks.values():
            ask.lost_states = ask.lost_states or not ask.ended

    def lost_residence(self, session_id: str) -> None:
        """A session was reclaimed, or a step broke: what it finds next depends on the tree."""
        self.conversations[session_id].cached = None

    def closed(self, conversation: Conversation) -> None:
        """A session was closed; no turn of it may be left."""
        del self.conversations[conversation.id]
        if conversation.num_open_turns:
            raise Broken(f"close: {conversation.id} closed with {conversation.num_open_turns} turns open")

    def digest(self) -> int:
        """A hash of everything that happened; two runs of one seed have the same."""
        digest = 0
        for name in sorted(self.asks):
            digest = reduce(mix, self.asks[name].output, digest)
        return digest
