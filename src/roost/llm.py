"""LLM: the engine as a library, in this process and without the server's packages.

Owns the model and its engine. Any thread may call; requests run side by side. Closing ends what is still running. Made
by programs, and by the command line.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from uuid import uuid4

from roost.config import EngineConfig
from roost.dialogue import Messages, Prompt, Session
from roost.errors import RequestError
from roost.front.answer import Answer, Piece, checked
from roost.front.options import Options, milliseconds, submits
from roost.line import Line
from roost.messages import FlushCache, GetStats, OpenSession, Score, SpecStats, Stats, Submit, Usage
from roost.progress import Progress, silent
from roost.startup import start


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
        self._line = Line(self._running.engine)

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

    def session(
        self, *, id: str | None = None, ttl_s: float | None = None, max_tokens: int | None = None, salt: str = ""
    ) -> Session:
        """A new session: a conversation that keeps its KV from turn to turn. Close it, or use it in a `with`."""
        ttl_ms = None if ttl_s is None else milliseconds("ttl_s", ttl_s)
        name = id if id is not None else uuid4().hex  # one that nobody would give to another
        self._line.ask(OpenSession(session_id=name, salt=salt, ttl_ms=ttl_ms, max_tokens=max_tokens))
        return Session(self._line, self.language, name)

    def stats(self) -> Stats:
        """How things stand in the engine."""
        answer = self._line.ask(GetStats())
        assert isinstance(answer, Stats), answer
        return answer

    def flush_cache(self) -> None:
        """Forget every cached prefix; refused while a request runs."""
        self._line.ask(FlushCache())

    def close(self) -> None:
        """End the engine: running requests are aborted first."""
        self._line.close()
        self._running.executor.close()

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return self.language.prompt_tokens(prompt) if isinstance(prompt, str) else tuple(prompt)

    def _complete(self, prompts: list[tuple[int, ...]], options: Options) -> list[Output]:
        groups = [self._submits(tokens, options) for tokens in prompts]
        asked = [submit for group in groups for submit in group]
        answers = {submit.request_id: Answer(self.language.tokenizer, options) for submit in asked}
        with self._line.asked(asked) as events:
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
        with self._line.asked(self._submits(tokens, options)) as events:
            while answer.finished is None:
                piece = answer.feed(checked(events.get()))
                if piece is not None:
                    yield piece

    def _submits(self, tokens: tuple[int, ...], options: Options) -> list[Submit]:
        return submits(self._line.new_id("llm"), tokens, options, self.language.tokenizer)


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
