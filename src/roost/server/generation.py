"""Generation: the outputs of one HTTP request, from prompts to pieces of text.

Owns the exchanges with the engine, one per output; when one is refused, or the reader leaves, all of them end.
Measures times on the way. Called by the endpoints.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request

from roost.errors import RequestError
from roost.front.answer import Answer, Piece, checked
from roost.front.engine_client import Observer
from roost.front.options import Options, TurnOf, submits
from roost.messages import Finished, Submit
from roost.server.engine_process import EngineProcess
from roost.server.metrics import LatencyTimer, Metrics
from roost.server.request_log import count_tokens
from roost.text.language import Language
from roost.tools.answer_form import AnswerForm

OUTPUTS_MAX = 256  # of one request, all prompts together
Value = TypeVar("Value")
Merged = asyncio.Queue[tuple[int, Piece | BaseException]]


class ClientGone(Exception):
    """The client has closed its connection: nobody reads an answer."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prompt:
    """One prompt and what is asked of it."""

    request_id: str
    tokens: tuple[int, ...] = ()
    options: Options
    form: AnswerForm | None = None  # of its answers, where content, reasoning and calls are told apart
    names: dict[str, str] = field(default_factory=dict)  # the client's names of parameters, where they differ
    turn: TurnOf | None = None  # of a session: then `tokens` are the new ones
    offset: int = 0  # tokens that the session holds before these
    known_len: int | None = None  # the same, where it may have gone on elsewhere: then the turn is refused
    note: str = ""  # for the journal
    client: str = ""  # whose it is
    observer: Observer | None = None  # sees all its events, also those that nobody waits for
    on_answer: Callable[[Answer], None] | None = None  # told of each output that has come to its end


@dataclass(slots=True, kw_only=True, eq=False)
class PendingOutput:
    """One output on its way."""

    request_id: str  # the client's; the engine has an id of its own, so that no client can name another's request
    prompt: Prompt
    submit: Submit
    answer: Answer


class Generation:
    """All outputs of one request."""

    def __init__(self, engine: EngineProcess, language: Language, metrics: Metrics, prompts: list[Prompt]) -> None:
        self._engine = engine
        self._metrics = metrics
        self.outputs: list[PendingOutput] = []
        for prompt in prompts:
            try:
                self.outputs += _outputs(prompt, engine.new_id(), language)
                if len(self.outputs) > OUTPUTS_MAX:
                    raise RequestError(400, "n", f"all prompts together may have {OUTPUTS_MAX} outputs")
            except RequestError as error:
                raise renamed(error, prompt.names) from error

    async def pieces(self) -> AsyncGenerator[tuple[int, Piece], None]:
        """(number of the output, piece) as they come; if one output is refused all end, and that is raised."""
        merged: Merged = asyncio.Queue()
        tasks = [asyncio.create_task(self._follow(number, merged)) for number in range(len(self.outputs))]
        for number, task in enumerate(tasks):
            task.add_done_callback(partial(_pass_on_failure, merged, number))
        open_outputs = len(tasks)
        try:
            while open_outputs:
                number, piece = await merged.get()
                if isinstance(piece, BaseException):
                    raise piece
                if piece.finished is not None:
                    open_outputs -= 1
                yield number, piece
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def finish(self) -> list[PendingOutput]:
        """Every output once all have ended."""
        async with aclosing(self.pieces()) as pieces:
            async for _ in pieces:
                pass
        return self.outputs

    async def _follow(self, number: int, merged: Merged) -> None:
        output, watch = self.outputs[number], LatencyTimer(self._metrics)
        try:
            async with aclosing(
                self._engine.stream_events(output.submit, output.request_id, output.prompt.observer)
            ) as events:
                async for event in events:
                    watch.observe(event)
                    if isinstance(event, Finished):
                        count_tokens(event.usage.prompt_tokens, event.usage.completion_tokens)
                    piece = output.answer.feed(checked(event))
                    if output.answer.finished is not None and output.prompt.on_answer is not None:
                        output.prompt.on_answer(output.answer)
                    if piece is not None:
                        merged.put_nowait((number, piece))
        except RequestError as error:
            raise renamed(error, output.prompt.names) from error


def _outputs(prompt: Prompt, engine_id: str, language: Language) -> list[PendingOutput]:
    return [
        PendingOutput(
            request_id=prompt.request_id + submit.request_id.removeprefix(engine_id),
            prompt=prompt,
            submit=replace(submit, client=prompt.client, known_len=prompt.known_len, note=prompt.note),
            answer=Answer(language.tokenizer, prompt.options, prompt.form),
        )
        for submit in submits(engine_id, prompt.tokens, prompt.options, language.tokenizer, prompt.turn)
    ]


def _pass_on_failure(merged: Merged, number: int, task: "asyncio.Task[None]") -> None:
    """Raise where the pieces are read whatever ended a task."""
    error = None if task.cancelled() else task.exception()
    if error is not None:
        merged.put_nowait((number, error))


def renamed(error: RequestError, names: dict[str, str]) -> RequestError:
    """An error that names the parameter as the client does."""
    return RequestError(error.status, names[error.param], error.reason) if error.param in names else error


async def while_connected(request: Request, work: Awaitable[Value], timeout_s: float | None = None) -> Value:
    """The result of some work, unless the client leaves first or its time is up: then the work is cancelled."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_disconnected(request))
    try:
        await asyncio.wait({task, watcher}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone if watcher.done() else TimeoutError
    finally:
        for each in (task, watcher):
            if not each.done():
                each.cancel()
                with suppress(asyncio.CancelledError):
                    await each


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
