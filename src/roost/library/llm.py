"""LLM: the engine as a library, in this process and without the server's packages.

Owns the model and its engine. Any thread may call; requests run side by side. Closing ends what is still running. Made
by programs, and by the command line.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import TracebackType
from typing import Any
from uuid import uuid4

from roost.config.options import EngineConfig
from roost.errors import CapacityError, ConfigError, RequestError, RoostError
from roost.front.answer import Answer, Piece, checked
from roost.front.options import Options, milliseconds, submits
from roost.front.session import ClientSession
from roost.front.turn_notes import session_of
from roost.library.batch import RequestBatch
from roost.library.conversation import ChatArguments, ChatCall, Schema, ToolChoice, Tools, compiled_options, read_chat
from roost.library.engine_thread import EngineThread
from roost.library.session import Messages, Prompt, Session, as_messages
from roost.messages import (
    Finished,
    FlushCache,
    GetHistory,
    GetStats,
    OpenSession,
    Refused,
    SessionHistory,
    SpecStats,
    Stats,
    Submit,
    TokenLogprob,
    Usage,
)
from roost.progress import Progress, silent
from roost.sched.intake import check_alone
from roost.startup import start
from roost.terminal import counting_bar
from roost.tools.answer_form import AnswerForm
from roost.tools.model_formats import formats_of
from roost.tools.registry import DETECTED
from roost.values import shown, token_ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One output."""

    text: str
    tokens: tuple[int, ...]
    finish_reason: str  # stop, length, abort
    matched: int | str | None  # the stop id or text that ended it
    logprobs: tuple[TokenLogprob, ...]  # one per token, if asked for
    usage: Usage
    spec: SpecStats  # what speculation did for it
    message: dict[str, Any]  # the answer as a message of its conversation: content, reasoning_content, tool_calls


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """All outputs of one prompt."""

    choices: tuple[Choice, ...]  # as many as `n`
    prompt_logprobs: tuple[TokenLogprob, ...]  # of the prompt's tokens after `prompt_logprobs_from`

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def message(self) -> dict[str, Any]:
        """The first choice as a message, to go on with."""
        return self.choices[0].message

    @property
    def usage(self) -> Usage:
        """What the first choice cost."""
        return self.choices[0].usage

    @property
    def spec(self) -> SpecStats:
        """What speculation did for the first choice."""
        return self.choices[0].spec


class BatchError(RoostError):
    """Some of several prompts failed; `outputs` has those of the others."""

    def __init__(self, outputs: "list[Output | None]", errors: dict[int, RequestError | CapacityError]) -> None:
        number, first = min(errors.items())
        super().__init__(f"{len(errors)} of {len(outputs)} prompts failed, the first of them prompt {number}: {first}")
        self.outputs = outputs  # in the order of the prompts; None where one failed
        self.errors = errors  # by the prompt's number


class LLM:
    """A model in this process, or shared by it and others that it starts."""

    def __init__(
        self,
        model: str | None = None,
        config: EngineConfig | None = None,
        *,
        tp: int | None = None,
        tool_format: str = DETECTED,
        reasoning_format: str = DETECTED,
        progress: Progress = silent,
    ) -> None:
        """Load a model, shared by `tp` ranks: this process and others that it starts.

        How it writes tool calls and reasoning is asked of its chat template, unless named here.
        """
        config = config or EngineConfig()
        if model is not None:  # else the configuration's
            config = replace(config, model=replace(config.model, model=model))
        if tp is not None:
            config = replace(config, model=replace(config.model, tp=tp))
        self._running = start(config, progress)
        self.name = self._running.name
        self.settings = self._running.settings
        self.language = self._running.language
        try:
            self.formats = formats_of(self.language, tool_format=tool_format, reasoning_format=reasoning_format)
        except ConfigError:
            self._running.executor.close()
            raise
        self._engine = EngineThread(self._running.engine)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompt: Prompt, options: Options = Options()) -> Output:  # noqa: B008
        """The model's continuation of a prompt."""
        return self.generate_all([prompt], options)[0]

    def generate_all(
        self,
        prompts: Sequence[Prompt],
        options: Options = Options(),  # noqa: B008
        *,
        show_progress: bool = False,
    ) -> list[Output]:
        """The continuation of each prompt, in their order; as many run side by side as the engine takes.

        A prompt that can never be served is refused (RequestError) before anything starts. If prompts fail later, by a
        timeout or a broken step, the others are finished first, and are in the BatchError.
        """
        if isinstance(prompts, str | bytes) or not isinstance(prompts, Sequence):
            raise RequestError(400, "prompts", f"must be a list of texts or token ids, got {shown(prompts)}")
        with counting_bar("prompts", len(prompts), is_shown=show_progress) as report:
            return self._complete(prompts, compiled_options(self._engine, options), report)

    def chat(
        self,
        messages: Messages,
        options: Options = Options(),  # noqa: B008
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        schema: Schema | None = None,
    ) -> Output:
        """The model's answer in a conversation; it may call tools, or must be JSON by a schema or a pydantic model."""
        asked = ChatArguments(options=options, tools=tools, tool_choice=tool_choice, schema=schema)
        call = read_chat(self._engine, self.formats, self.language.tokenizer, asked)
        return self._complete([self._chat_tokens(messages, call)], call.options, form=call.form)[0]

    def stream(self, prompt: Prompt, options: Options = Options()) -> Iterator[Piece]:  # noqa: B008
        """Pieces of the continuation of a prompt, as they come; leaving the loop ends the request."""
        return self._stream(self._tokens(prompt), compiled_options(self._engine, options))

    def stream_chat(
        self,
        messages: Messages,
        options: Options = Options(),  # noqa: B008
        *,
        tools: Tools | None = None,
        tool_choice: ToolChoice | None = None,
        schema: Schema | None = None,
    ) -> Iterator[Piece]:
        """Pieces of the model's answer, as they come; leaving the loop ends the request."""
        asked = ChatArguments(options=options, tools=tools, tool_choice=tool_choice, schema=schema)
        call = read_chat(self._engine, self.formats, self.language.tokenizer, asked)
        return self._stream(self._chat_tokens(messages, call), call.options, call.form)

    def session(
        self, *, id: str | None = None, ttl_s: float | None = None, max_tokens: int | None = None, cache_salt: str = ""
    ) -> Session:
        """A new session: a conversation that keeps its KV from turn to turn. Close it, or use it in a `with`."""
        ttl_ms = None if ttl_s is None else milliseconds("ttl_s", ttl_s)
        name = id if id is not None else uuid4().hex  # which nobody else has
        self._engine.ask(OpenSession(session_id=name, cache_salt=cache_salt, ttl_ms=ttl_ms, max_tokens=max_tokens))
        return Session(self._engine, self.language, self.formats, ClientSession(name))

    def resume(self, id: str) -> Session:
        """A session that is open already: here, or in an engine that has ended and had the same journal."""
        history = self._engine.ask(GetHistory(session_id=id))
        assert isinstance(history, SessionHistory), history
        return Session(self._engine, self.language, self.formats, session_of(id, history, self.language))

    def stats(self) -> Stats:
        """How things stand in the engine."""
        answer = self._engine.ask(GetStats())
        assert isinstance(answer, Stats), answer
        return answer

    def flush_cache(self) -> None:
        """Forget every cached prefix; refused while a request runs."""
        self._engine.ask(FlushCache())

    def close(self) -> None:
        """End the engine: running requests are aborted first."""
        self._engine.close()
        self._running.executor.close()
        if self._running.compiler is not None:
            self._running.compiler.close()

    def _tokens(self, prompt: Prompt) -> tuple[int, ...]:
        return self.language.prompt_tokens(prompt) if isinstance(prompt, str) else token_ids("prompt", prompt)

    def _chat_tokens(self, messages: Messages, call: ChatCall) -> tuple[int, ...]:
        plain = self.formats.messages(as_messages(messages), call.tools)
        return self.language.chat_tokens(plain, tools=self.formats.template_tools(call.tools))

    def _complete(
        self,
        prompts: Sequence[Prompt],
        options: Options,
        report: Callable[[int], None] = lambda num_done: None,
        form: AnswerForm | None = None,
    ) -> list[Output]:
        groups = self._prepared(prompts, options)
        asked = {submit.request_id: number for number, group in enumerate(groups) for submit in group}
        answers = {request_id: Answer(self.language.tokenizer, options, form) for request_id in asked}
        num_left = Counter(asked.values())  # outputs of each prompt that have not ended
        errors: dict[int, RequestError | CapacityError] = {}
        batch = RequestBatch(self._engine, list(chain(*groups)), self._running.resolved.sched.max_queued)
        try:
            for event in batch.events():
                number = asked[event.request_id]
                try:
                    answers[event.request_id].feed(checked(event))
                except (RequestError, CapacityError) as error:
                    errors.setdefault(number, error)
                if isinstance(event, Finished | Refused):
                    num_left[number] -= 1
                    report(sum(not each for each in num_left.values()))
        except CapacityError as error:  # the engine has ended: what is still open fails
            for number in num_left:
                if num_left[number]:
                    errors.setdefault(number, error)
        outputs = [
            None if number in errors else _output([answers[submit.request_id] for submit in group])
            for number, group in enumerate(groups)
        ]
        done = [output for output in outputs if output is not None]
        if errors:
            raise BatchError(outputs, errors) if done else errors[min(errors)]
        return done

    def _prepared(self, prompts: Sequence[Prompt], options: Options) -> list[list[Submit]]:
        """The requests for each prompt; what can never be served is refused here, before anything runs."""
        groups = []
        for number, prompt in enumerate(prompts):
            try:
                groups.append(self._submits(self._tokens(prompt), options))
                check_alone(self._running.resolved, groups[-1][0])
            except RequestError as error:
                which = f" (prompt {number} of {len(prompts)})" if len(prompts) > 1 else ""
                raise RequestError(error.status, error.param, error.reason + which) from error
        return groups

    def _stream(self, tokens: tuple[int, ...], options: Options, form: AnswerForm | None = None) -> Iterator[Piece]:
        if options.n != 1:
            raise RequestError(400, "n", "a stream has one output; generate gives several")
        answer = Answer(self.language.tokenizer, options, form)
        with self._engine.submit(self._submits(tokens, options)) as events:
            while answer.finished is None:
                piece = answer.feed(checked(events.get()))
                if piece is not None and piece.begun is None:
                    yield piece

    def _submits(self, tokens: tuple[int, ...], options: Options) -> list[Submit]:
        return submits(self._engine.new_id(), tokens, options, self.language.tokenizer)


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
                logprobs=tuple(answer.logprobs),
                usage=answer.finished.usage,
                spec=answer.finished.spec,
                message=answer.message,
            )
        )
    return Output(choices=tuple(choices), prompt_logprobs=tuple(answers[0].prompt_logprobs))
