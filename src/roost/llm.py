"""LLM: the engine as a library, in this process and without the server's packages.

Owns the engine's thread. Any thread may call; requests run side by side. Closing ends what is still running. Made by
programs, and by the command line.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from roost.config import EngineConfig
from roost.errors import CapacityError, RequestError
from roost.front.answer import Answer, Piece, checked, refusal
from roost.front.options import Options, submits
from roost.messages import (
    Abort,
    Command,
    Event,
    FlushCache,
    GetStats,
    Refused,
    Score,
    SpecStats,
    Stats,
    Submit,
    Usage,
)
from roost.progress import Progress, silent
from roost.startup import start

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
    spec: SpecStats  # what speculation did for it


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

    @property
    def spec(self) -> SpecStats:
        """What speculation did for the first choice."""
        return self.choices[0].spec


class LLM:
    """A model in this process."""

    def __init__(
        self, model: str | None = None, config: EngineConfig | None = None, *, progress: Progress = silent
    ) -> None:
        config = config or EngineConfig()
        if model is not None:  # else the configuration's
            config = replace(config, model=replace(config.model, model=model))
        self._running = start(config, progress)
        self.name = self._running.name
        self.settings = self._running.settings
        self.language = self._running.language
        self._numbers = count()
        self._failure: BaseException | None = None
        self._waiting: dict[int, _Inbox] = {}  # who is told when the engine ends
        self._closed = False  # nothing more is sent
        self._lock = threading.RLock()  # of those three; an abandoned stream may be collected while it is held
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
        self._ask(FlushCache())

    def close(self) -> None:
        """End the engine: running requests are aborted first."""
        with self._lock:  # so that each abort comes after its request, and nothing after the last one
            self._closed = True
            for inbox in list(self._waiting.values()):
                self._abort(inbox)
        self._running.engine.stop()
        self._thread.join()
        self._running.executor.close()

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return self.language.prompt_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)

    def _complete(self, prompts: list[tuple[int, ...]], options: Options) -> list[Output]:
        groups = [self._submits(tokens, options) for tokens in prompts]
        asked = [submit for group in groups for submit in group]
        answers = {submit.request_id: Answer(self.language.tokenizer, options) for submit in asked}
        with self._asked(asked) as events:
            num_left = len(asked)
            while num_left:
                event = checked(events.get())
                piece = answers[event.request_id].feed(event)
                num_left -= piece is not None and piece.finished is not None
        return [_output([answers[submit.request_id] for submit in group]) for group in groups]

    def _stream(self, tokens: tuple[int, ...], options: Options) -> Iterator[Piece]:
        if options.n != 1:
            raise RequestError(400, "n", "a stream has one output; generate gives several")
        answer = Answer(self.language.tokenizer, options)
        with self._asked(self._submits(tokens, options)) as events:
            while answer.finished is None:
                piece = answer.feed(checked(events.get()))
                if piece is not None:
                    yield piece

    @contextmanager
    def _asked(self, asked: list[Submit]) -> Iterator["SimpleQueue[Event]"]:
        """The events of some requests; leaving before they have ended ends them."""
        inbox = _Inbox(number=next(self._numbers), request_ids=tuple(submit.request_id for submit in asked))
        try:
            for submit in asked:
                self._send(submit, inbox)
            yield inbox.events
        except BaseException:
            self._abort(inbox)
            raise
        finally:
            self._forget(inbox)

    def _submits(self, tokens: tuple[int, ...], options: Options) -> list[Submit]:
        return submits(f"llm-{next(self._numbers)}", tokens, options, self.language.tokenizer)

    def _ask(self, command: Command) -> Event:
        inbox = _Inbox(number=next(self._numbers))
        self._send(command, inbox)
        try:
            answer = inbox.events.get()
        finally:
            self._forget(inbox)
        if isinstance(answer, Refused):
            raise refusal(answer)
        return answer

    def _send(self, command: Command, inbox: "_Inbox") -> None:
        with self._lock:
            if self._closed:
                raise CapacityError(503, "the engine has ended") from self._failure
            self._waiting[inbox.number] = inbox
            self._running.engine.post(command, inbox.events.put)

    def _abort(self, inbox: "_Inbox") -> None:
        for request_id in inbox.request_ids:
            self._running.engine.post(Abort(request_id=request_id), _nobody)

    def _forget(self, inbox: "_Inbox") -> None:
        with self._lock:
            self._waiting.pop(inbox.number, None)

    def _run(self) -> None:
        """On the engine's thread: run it, and when it ends tell everybody who still waits."""
        try:
            self._running.engine.run()
        except Exception as error:  # noqa: BLE001 (whatever it was, those who wait must not wait for ever)
            self._failure = error
        with self._lock:
            self._closed = True
            for inbox in list(self._waiting.values()):
                inbox.events.put(Refused(request_id="", status=503, message=_ended(self._failure)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Inbox:
    """Where the events of one call's requests arrive."""

    number: int
    request_ids: tuple[str, ...] = ()
    events: "SimpleQueue[Event]" = field(default_factory=SimpleQueue)


def _ended(failure: BaseException | None) -> str:
    return "the engine has ended" + ("" if failure is None else f": {failure}")


def _nobody(event: Event) -> None:
    """Nobody waits for this answer."""


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
                spec=answer.finished.spec,
            )
        )
    return Output(choices=tuple(choices), prompt_scores=tuple(answers[0].prompt_scores))
