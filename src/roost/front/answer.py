"""Answer: one output as it comes in, from the engine's events to text.

Owns the text so far, what is held back of it, and the log-probabilities. Text is given out only when it is certain:
whole characters, and nothing that may be the beginning of a stop. Called by whoever waits for the output.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from roost.errors import CapacityError, RequestError
from roost.front.options import Options
from roost.messages import GRAMMAR_FAULT, Begun, Event, Finished, PromptLogprobs, Refused, TokenLogprob, Tokens, Usage
from roost.text.stream import StopCutter, TextStream
from roost.text.tokenizer import Tokenizer
from roost.tools.answer_form import AnswerForm
from roost.tools.call_ids import new_call_id
from roost.tools.events import Content, ToolEvent
from roost.tools.machine import joined
from roost.tools.openai_form import message_of

AcceptedEvent = Begun | Tokens | PromptLogprobs | Finished  # what a request that was not refused gets


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one event added."""

    text: str = ""
    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    events: tuple[ToolEvent, ...] = ()  # what the text adds to content, reasoning and calls, where they are told apart
    begun: Begun | None = None  # comes first and alone, when the request leaves the queue: no text, no tokens
    finished: Finished | None = None  # nothing comes after it


class RepeatedTurn(RequestError):
    """A turn whose number a committed turn has already; `usage` is what that one cost."""

    def __init__(self, status: int, param: str, message: str, usage: Usage) -> None:
        super().__init__(status, param, message)
        self.usage = usage


def refusal(refused: Refused) -> RequestError | CapacityError:
    """A refusal of the engine's as an exception."""
    if refused.param:
        said = refused.message.removeprefix(f"{refused.param}: ")
        if refused.usage is not None:
            return RepeatedTurn(refused.status, refused.param, said, refused.usage)
        return RequestError(refused.status, refused.param, said)
    return CapacityError(refused.status, refused.message)


def checked(event: Event) -> AcceptedEvent:
    """An event of an accepted request; a refusal, a timeout or an error of the engine is raised."""
    if isinstance(event, Refused):
        raise refusal(event)
    if isinstance(event, Finished) and event.reason == "timeout":
        raise RequestError(504, "timeout", event.message.removeprefix("timeout: "))
    if isinstance(event, Finished) and event.reason == "error" and event.message.startswith(GRAMMAR_FAULT):
        raise RequestError(400, "grammar", event.message.removeprefix("grammar: "))
    if isinstance(event, Finished) and event.reason == "error":
        raise CapacityError(500, event.message or "the engine failed on this request")
    assert isinstance(event, AcceptedEvent), event
    return event


class Answer:
    """One output."""

    def __init__(self, tokenizer: Tokenizer, options: Options, form: AnswerForm | None = None) -> None:
        self._options = options
        self._tokenizer = tokenizer
        self._machine = None if form is None else form.machine(partial(new_call_id, os.urandom))
        kept = frozenset[int]() if form is None or self._machine is None else form.kept_tokens(tokenizer)
        self._kept = kept if options.skip_special_tokens else frozenset()  # shown although they are special
        self._stream = TextStream(tokenizer, skip_special=options.skip_special_tokens, kept=kept)
        self._cutter = StopCutter(options.stop)
        self._last_token: int | None = None  # kept back: it may be the stop that is not shown
        self.text = ""
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.prompt_logprobs: list[TokenLogprob] = []
        self.events: list[ToolEvent] = []
        self.prompt_logprobs_start: int | None = None  # the prompt position of the first of them
        self.finished: Finished | None = None

    def feed(self, event: AcceptedEvent) -> Piece | None:
        """Take an event; returns what it adds for the reader, None if nothing."""
        match event:
            case Begun():
                return Piece(begun=event)
            case Tokens():
                self.tokens.extend(event.tokens)
                logprobs = tuple(event.logprobs)
                self.logprobs.extend(logprobs)
                text = self._shown(event.tokens)
                return Piece(text=text, tokens=event.tokens, logprobs=logprobs, events=self._read(text))
            case PromptLogprobs():
                if self.prompt_logprobs_start is None:
                    self.prompt_logprobs_start = event.start
                self.prompt_logprobs.extend(event.logprobs)
                return None
            case Finished():
                self.finished = event
                text = self._rest(event)
                return Piece(text=text, finished=event, events=self._read(text, is_last=True))

    @property
    def message(self) -> dict[str, Any]:
        """The answer so far as a message of its conversation."""
        return message_of(self.events if self.is_read else [Content(text=self.text)] if self.text else [])

    @property
    def is_read(self) -> bool:
        """Whether content, reasoning and calls are told apart, in `events`."""
        return self._machine is not None

    @property
    def has_calls(self) -> bool:
        """Whether there are tool calls so far, all of them complete."""
        return self._machine is not None and self._machine.has_calls

    def shown_text(self, tokens: Sequence[int]) -> str:
        """The text of tokens as this answer shows it."""
        stream = TextStream(self._tokenizer, skip_special=self._options.skip_special_tokens, kept=self._kept)
        return stream.feed(tuple(tokens)) + stream.flush()

    def _read(self, text: str, *, is_last: bool = False) -> tuple[ToolEvent, ...]:
        """Add text; returns what it adds to content, reasoning and calls, if they are told apart."""
        self.text += text
        if self._machine is None:
            return ()
        events = joined([*self._machine.feed(text), *(self._machine.end() if is_last else ())])
        self.events += events
        return tuple(events)

    def _shown(self, tokens: tuple[int, ...]) -> str:
        """Text that is certain after these tokens."""
        options, free = self._options, self._options.min_new_tokens
        before = len(self.tokens) - len(tokens)
        unchecked = max(0, min(len(tokens), free - before))  # nothing stops here, so nothing is held back
        text = self._stream.feed(tokens[:unchecked])
        rest = tokens[unchecked:]
        if rest and rest[-1] in self._stop_ids():
            self._last_token, rest = rest[-1], rest[:-1]
        return text + (self._stream.feed(rest) if options.no_stop_trim else self._cut(rest))

    def _cut(self, tokens: tuple[int, ...]) -> str:
        """Text that is certain, with stop strings looked for where the engine does: not in special tokens."""
        if self._kept.isdisjoint(tokens):
            return self._cutter.feed(self._stream.feed(tokens))
        shown = ""
        for token in tokens:
            text = self._stream.feed((token,))
            shown += self._cutter.skip(text) if token in self._kept else self._cutter.feed(text)
        return shown

    def _rest(self, finished: Finished) -> str:
        """The text that was held back, up to the stop."""
        last = self._last_token
        if last is not None and (finished.matched != last or self._options.no_stop_trim):
            tail = self._stream.feed((last,)) + self._stream.flush()
        else:
            tail = self._stream.flush()
        if self._options.no_stop_trim:
            return tail
        matched = finished.matched if isinstance(finished.matched, str) else None
        return self._cutter.feed(tail) + self._cutter.finish(matched)

    def _stop_ids(self) -> frozenset[int]:
        own = frozenset(self._options.stop_token_ids)
        return own if self._options.ignore_eos else own | self._tokenizer.eos_ids
