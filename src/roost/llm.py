"""LLM: the engine as a library, in this process and without the server's packages.

Owns the engine's thread. Any thread may call; requests run side by side. Closing ends what is still running. Made by
programs, and by the command line.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from roost.config import EngineConfig
from roost.errors import CapacityError, InvariantError, RequestError
from roost.front.answer import Answer, Piece
from roost.front.options import Options, submits
from roost.messages import Abort, Command, Event, Finished, FlushCache, GetStats, Refused, Score, Stats, Submit, Usage
from roost.startup import start
from roost.weights.source import Progress, silent

Prompt = str | Sequence[int]  # text, or token ids
Messages = Sequence[dict[str, Any]]  # role and content


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One output."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str  # stop, length, abort
    matched: int | str | None  # the stop id or text that ended it
    scores: tuple[Score, ...]  # one per token, if asked for
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """Everything that came of one prompt."""

    choices: tuple[Choice, ...]  # as many as `n`
    prompt_scores: tuple[Score, ...]  # of the prompt's tokens after `prompt_logprobs_from`

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def usage(self) -> Usage:
        """What the first choice cost."""
        return self.choices[0].usage


class LLM:
    """A model in this process."""

    def __init__(
        self, model: str = "default", config: EngineConfig | None = None, *, progress: Progress = silent
    ) -> None:
        config = config or EngineConfig()
        self._running = start(replace(config, model=replace(config.model, model=model)), progress)
        self.name = self._running.name
        self.settings = self._running.settings
        self.language = self._running.language
        self._numbers = count()
        self._failure: BaseException | None = None
        self._waiting: dict[int, SimpleQueue[Event]] = {}  # who is told when the engine fails
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompt: Prompt, options: Options = Options()) -> Output:  # noqa: B008
        """What follows a prompt."""
        return self.generate_all([prompt], options)[0]

    def generate_all(self, prompts: Sequence[Prompt], options: Options = Options()) -> list[Output]:  # noqa: B008
        """What follows each of some prompts, which run side by side."""
        return self._complete([self._tokens(each) for each in prompts], options)

    def chat(self, messages: Messages, options: Options = Options()) -> Output:  # noqa: B008
        """The model's answer in a conversation."""
        return self._complete([self.language.chat_tokens(list(messages))], options)[0]

    def stream(self, prompt: Prompt, options: Options = Options()) -> Iterator[Piece]:  # noqa: B008
        """Pieces of what follows a prompt, as they come; leaving the loop ends the request."""
        return self._stream(self._tokens(prompt), options)

    def stream_chat(self, messages: Messages, options: Options = Options()) -> Iterator[Piece]:  # noqa: B008
        """Pieces of the model's answer, as they come; leaving the loop ends the request."""
        return self._stream(self.language.chat_tokens(list(messages)), options)

    def stats(self) -> Stats:
        """How things stand in the engine."""
        answer = self._ask(GetStats())
        assert isinstance(answer, Stats), answer
        return answer

    def flush_cache(self) -> None:
        """Forget every cached prefix; refused while a request runs."""
        answer = self._ask(FlushCache())
        if isinstance(answer, Refused):
            raise _refusal(answer)

    def close(self) -> None:
        """End the engine: running requests are aborted first."""
        for request_id in list(self._running.engine.state.requests):
            self._running.engine.post(Abort(request_id=request_id), _nobody)
        self._running.engine.stop()
        self._thread.join()
        self._running.executor.close()

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return self.language.prompt_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)

    def _complete(self, prompts: list[tuple[int, ...]], options: Options) -> list[Output]:
        inboxes = [[self._submit(each) for each in self._submits(tokens, options)] for tokens in prompts]
        try:
            return [
                _output([self._collect(inbox, Answer(self.language.tokenizer, options)) for inbox in group])
                for group in inboxes
            ]
        except BaseException:
            for group in inboxes:
                for inbox in group:
                    self._abort(inbox)
            raise
        finally:
            for group in inboxes:
                for inbox in group:
                    self._forget(inbox)

    def _stream(self, tokens: tuple[int, ...], options: Options) -> Iterator[Piece]:
        if options.n != 1:
            raise RequestError(400, "n", "a stream has one output; generate gives several")
        answer = Answer(self.language.tokenizer, options)
        inbox = self._submit(self._submits(tokens, options)[0])
        try:
            while True:
                piece = answer.feed(_checked(inbox.events.get()))
                if piece is not None:
                    yield piece
                    if piece.ends:
                        return
        finally:
            if answer.finished is None:
                self._abort(inbox)
            self._forget(inbox)

    def _collect(self, inbox: "_Inbox", answer: Answer) -> Answer:
        while answer.finished is None:
            answer.feed(_checked(inbox.events.get()))
        return answer

    def _submits(self, tokens: tuple[int, ...], options: Options) -> list[Submit]:
        return submits(f"llm-{next(self._numbers)}", tokens, options, self.language.tokenizer)

    def _submit(self, submit: Submit) -> "_Inbox":
        inbox = _Inbox(number=next(self._numbers), request_id=submit.request_id, events=SimpleQueue())
        self._send(submit, inbox)
        return inbox

    def _ask(self, command: Command) -> Event:
        inbox = _Inbox(number=next(self._numbers), request_id="", events=SimpleQueue())
        self._send(command, inbox)
        try:
            answer = inbox.events.get()
        finally:
            self._forget(inbox)
        if isinstance(answer, Refused) and answer.status == 500:
            raise _refusal(answer)
        return answer

    def _send(self, command: Command, inbox: "_Inbox") -> None:
        with self._lock:
            if self._failure is not None or not self._thread.is_alive():
                raise CapacityError(503, "the engine has ended") from self._failure
            self._waiting[inbox.number] = inbox.events
            self._running.engine.post(command, inbox.events.put)

    def _abort(self, inbox: "_Inbox") -> None:
        with suppress(CapacityError):
            self._running.engine.post(Abort(request_id=inbox.request_id), _nobody)

    def _forget(self, inbox: "_Inbox") -> None:
        with self._lock:
            self._waiting.pop(inbox.number, None)

    def _run(self) -> None:
        """On the engine's thread: run it, and if it fails tell everybody who waits."""
        try:
            self._running.engine.run()
        except InvariantError as error:
            self._failure = error
        with self._lock:
            for events in self._waiting.values():
                events.put(Refused(request_id="", status=500, message=f"the engine has ended: {self._failure or ''}"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inbox:
    """Where the events of one request arrive."""

    number: int
    request_id: str
    events: "SimpleQueue[Event]"


def _nobody(event: Event) -> None:
    """Nobody waits for this answer."""


def _refusal(refused: Refused) -> RequestError | CapacityError:
    if refused.param:
        return RequestError(refused.status, refused.param, refused.message.removeprefix(f"{refused.param}: "))
    return CapacityError(refused.status, refused.message)


def _checked(event: Event) -> Event:
    """An event that is not a refusal or a failure; those are raised."""
    if isinstance(event, Refused):
        raise _refusal(event)
    if isinstance(event, Finished) and event.reason == "timeout":
        raise RequestError(504, "timeout", event.message.removeprefix("timeout: "))
    if isinstance(event, Finished) and event.reason == "error":
        raise CapacityError(500, event.message)
    return event


def _output(answers: list[Answer]) -> Output:
    choices = []
    for answer in answers:
        assert answer.finished is not None
        choices.append(
            Choice(
                text=answer.text,
                tokens=tuple(answer.tokens),
                finish_reason=answer.finished.reason,
                matched=answer.finished.matched,
                scores=tuple(answer.scores),
                usage=answer.finished.usage,
            )
        )
    return Output(choices=tuple(choices), prompt_scores=tuple(answers[0].prompt_scores))
