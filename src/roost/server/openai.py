"""OpenAI's endpoints: chat and text completions, as its official client expects them.

Answers are built here and nowhere else. `finish_reason` is `stop` or `length`: an output that ended otherwise is an
error, in a stream its last event. Called by the app's routes.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.front.answer import Piece
from roost.front.options import Options
from roost.messages import Finished, TokenLogprob
from roost.server.body_reader import read
from roost.server.dialects import OPENAI
from roost.server.generation import Generation, PendingOutput, Prompt, while_connected
from roost.server.inputs import check_no_session, plain_messages, session_turn
from roost.server.keys import caller
from roost.server.models import check_model
from roost.server.refusals import aborted
from roost.server.responses import event_stream, finite, json_response, usage_json
from roost.server.schema import ChatBody, CompletionBody, OpenAiBody, openai_options, refuse_unsupported
from roost.server.state import ServerState

_NAMES = {**OPENAI.names, "tokens": "messages"}
_TOP_LOGPROBS_MAX = 20


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    server: ServerState = request.app.state.server
    body = await read(request, ChatBody)
    _check(server, body)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(400, "max_tokens", "is the older name of max_completion_tokens: give one of them")
    if body.add_special_tokens:
        raise RequestError(400, "add_special_tokens", "must be false: special tokens are the chat template's")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(400, "top_logprobs", "needs logprobs: true")
    if not 0 <= (body.top_logprobs or 0) <= _TOP_LOGPROBS_MAX:
        raise RequestError(400, "top_logprobs", f"must be in [0, {_TOP_LOGPROBS_MAX}], got {body.top_logprobs}")
    options = openai_options(body)
    names = {**_NAMES, "request_id": "rid" if body.rid is not None else "request_id"}
    if body.max_completion_tokens is not None:
        options = replace(options, max_new_tokens=body.max_completion_tokens)
        names["max_new_tokens"] = "max_completion_tokens"
    if body.logprobs:
        options = replace(options, logprobs=body.top_logprobs or 0)
    request_id, messages = _request_id("chatcmpl", body), await plain_messages(server, body.messages)
    if body.session_id is None:
        check_no_session(body)
        tokens = await server.chat_tokens(messages, "messages")
        prompt = Prompt(request_id=request_id, tokens=tokens, options=options, names=names, client=caller(request).name)
        return await _answer(request, body, _Chat(server, [prompt], body.service_tier))
    async with session_turn(
        request, body.session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        tokens = await turn.input_tokens(messages=messages)
        return await _answer(
            request, body, _Chat(server, [turn.prompt(request_id, tokens, options, names)], body.service_tier)
        )


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    server: ServerState = request.app.state.server
    body = await read(request, CompletionBody)
    _check(server, body)
    if not body.add_special_tokens:
        raise RequestError(400, "add_special_tokens", "must be true: send token ids for a prompt as it is")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(400, "best_of", "must be n: choosing among more outputs is not supported")
    options = openai_options(body)
    if body.max_tokens is None:
        options = replace(options, max_new_tokens=16)
    options = replace(options, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        options = replace(options, prompt_logprobs_from=0)
    given = "rid" if body.rid is not None else "request_id"
    request_id, names = _request_id("cmpl", body), {**_NAMES, "tokens": "prompt", "request_id": given}
    if body.session_id is not None:
        return await _session_completion(request, body, request_id, options, names)
    check_no_session(body)
    prompts = [
        Prompt(
            request_id=request_id if number == 0 else f"{request_id}-{number}",
            tokens=tokens,
            options=options,
            names=names,
            client=caller(request).name,
        )
        for number, tokens in enumerate(await server.prompt_tokens(body.prompt, "prompt"))
    ]
    return await _answer(request, body, _Text(server, prompts, echo=bool(body.echo)))


async def _session_completion(
    request: Request, body: CompletionBody, request_id: str, options: Options, names: dict[str, str]
) -> Response:
    """A turn of a session, whose prompt is new input."""
    if body.echo:
        raise RequestError(400, "echo", "is not for a session: what it held before is not at hand")
    assert body.session_id is not None
    async with session_turn(
        request, body.session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        if isinstance(body.prompt, str):
            tokens = await turn.input_tokens(text=body.prompt, param="prompt")
        else:
            tokens = await turn.input_tokens(ids=body.prompt, param="prompt")
        return await _answer(
            request, body, _Text(turn.server, [turn.prompt(request_id, tokens, options, names)], echo=False)
        )


def _check(server: ServerState, body: OpenAiBody) -> None:
    """Refuse what is asked of another model, or of another server."""
    check_model(server, body.model)
    refuse_unsupported(body)
    if body.stream_options is not None:
        refuse_unsupported(body.stream_options, "stream_options.")
        if not body.stream:
            raise RequestError(400, "stream_options", "needs stream: true")


def _request_id(kind: str, body: ChatBody | CompletionBody) -> str:
    """What a request is called, as the client says or by a name of its own."""
    if body.rid is not None and body.request_id is not None:
        raise RequestError(400, "request_id", "is the same as rid: give one of them")
    return body.rid or f"{kind}-{body.request_id or uuid4().hex}"


async def _answer(request: Request, body: OpenAiBody, kind: "_Chat | _Text") -> Response:
    if not body.stream:
        outputs = await while_connected(request, kind.generation.finish())
        return json_response(kind.response(outputs))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return await event_stream(request, kind.chunks(include_usage=include_usage))


class _Chat:
    """Answers of a chat completion."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, server: ServerState, prompts: list[Prompt], service_tier: Any) -> None:
        self._server = server
        self._base = {"id": prompts[0].request_id, "created": int(time.time()), "model": server.model_name}
        if service_tier is not None:  # who asks for one is told which it was
            self._base["service_tier"] = "default"
        self.generation = Generation(server.engine, server.language, server.metrics, prompts)

    def response(self, outputs: list[PendingOutput]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": output.answer.text, "refusal": None},
                "logprobs": self._logprobs(output, output.answer.tokens, output.answer.logprobs),
                "finish_reason": _reason(self._server, output.answer.finished),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._base, "object": self.object, "choices": choices, "usage": _usage(outputs)}

    async def chunks(self, *, include_usage: bool) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of a stream."""
        outputs = self.generation.outputs
        has_begun: set[int] = set()
        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                if index not in has_begun:
                    has_begun.add(index)
                    yield self._chunk(index, {"role": "assistant", "content": ""}, None, None, include_usage)
                if piece.text or piece.logprobs:
                    logprobs = self._logprobs(outputs[index], piece.tokens, piece.logprobs)
                    yield self._chunk(index, {"content": piece.text}, logprobs, None, include_usage)
                if piece.finished is not None:
                    yield self._chunk(index, {}, None, _reason(self._server, piece.finished), include_usage)
        if include_usage:
            yield {**self._base, "object": self.chunk_object, "choices": [], "usage": _usage(outputs)}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None, include_usage: bool
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if include_usage else {}
        return {**self._base, "object": self.chunk_object, "choices": [choice], **usage}

    def _logprobs(self, output: PendingOutput, tokens: Any, logprobs: Any) -> dict[str, Any] | None:
        if output.prompt.options.logprobs is None:
            return None
        content = [
            {
                **self._token(token, entry.logprob),
                "top_logprobs": [self._token(other, logprob) for other, logprob in entry.top_logprobs],
            }
            for token, entry in zip(tokens, logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        piece = self._server.language.tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(piece)}


class _Text:
    """Answers of a text completion."""

    object = "text_completion"

    def __init__(self, server: ServerState, prompts: list[Prompt], *, echo: bool) -> None:
        self._server = server
        self._echo = echo
        self._base = {
            "id": prompts[0].request_id,
            "object": self.object,
            "created": int(time.time()),
            "model": server.model_name,
        }
        self.generation = Generation(server.engine, server.language, server.metrics, prompts)

    def response(self, outputs: list[PendingOutput]) -> dict[str, Any]:
        """The answer that is not streamed."""
        choices = [
            {
                "index": index,
                "text": self._prompt_text(output) + output.answer.text,
                "logprobs": self._logprobs(output),
                "finish_reason": _reason(self._server, output.answer.finished),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._base, "choices": choices, "usage": _usage(outputs)}

    async def chunks(self, *, include_usage: bool) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of a stream."""
        outputs = self.generation.outputs
        scored_lens: dict[int, int] = {}  # characters of scored tokens, by output that has begun
        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                first = index not in scored_lens
                offset = scored_lens.setdefault(index, 0)
                text = (self._prompt_text(outputs[index]) if first else "") + piece.text
                if text or piece.logprobs or piece.finished is not None:
                    logprobs = self._piece_logprobs(outputs[index], piece, offset, with_prompt=first)
                    scored_lens[index] += sum(map(len, logprobs["tokens"])) if logprobs is not None else 0
                    reason = _reason(self._server, piece.finished) if piece.finished is not None else None
                    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
                    yield {**self._base, "choices": [choice], **({"usage": None} if include_usage else {})}
        if include_usage:
            yield {**self._base, "choices": [], "usage": _usage(outputs)}

    def _prompt_text(self, output: PendingOutput) -> str:
        tokenizer = self._server.language.tokenizer
        return tokenizer.decode(output.prompt.tokens, skip_special=True, at_start=True) if self._echo else ""

    def _logprobs(self, output: PendingOutput) -> dict[str, Any] | None:
        if output.prompt.options.logprobs is None:
            return None
        answer, prompt = output.answer, output.prompt.tokens
        before: list[tuple[int, TokenLogprob | None]] = []
        if self._echo:
            before = list(zip(prompt, [None, *self._prompt_logprobs(output)], strict=False))
        return self._columns([*before, *zip(answer.tokens, answer.logprobs, strict=True)])

    def _piece_logprobs(
        self, output: PendingOutput, piece: Piece, offset: int, *, with_prompt: bool
    ) -> dict[str, Any] | None:
        if output.prompt.options.logprobs is None:
            return None
        before: list[tuple[int, TokenLogprob | None]] = []
        if self._echo and with_prompt:
            before = list(zip(output.prompt.tokens, [None, *self._prompt_logprobs(output)], strict=False))
        return self._columns([*before, *zip(piece.tokens, piece.logprobs, strict=True)], offset)

    def _prompt_logprobs(self, output: PendingOutput) -> list[TokenLogprob]:
        """The log-probabilities of an output's prompt, which the first output of that prompt got for all."""
        first = next(each for each in self.generation.outputs if each.prompt is output.prompt)
        return first.answer.prompt_logprobs

    def _columns(self, scored: list[tuple[int, TokenLogprob | None]], offset: int = 0) -> dict[str, Any]:
        texts = [self._text(token) for token, _ in scored]
        return {
            "tokens": texts,
            "token_logprobs": [None if entry is None else finite(entry.logprob) for _, entry in scored],
            "top_logprobs": [None if entry is None else self._top(entry) for _, entry in scored],
            "text_offset": [*accumulate(map(len, texts), initial=offset)][:-1],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        return {self._text(token): finite(logprob) for token, logprob in reversed(entry.top_logprobs)}

    def _text(self, token: int) -> str:
        return self._server.language.tokenizer.piece(token).decode("utf-8", "replace")


def _reason(server: ServerState, finished: Finished | None) -> str:
    """OpenAI's finish_reason; raises for an aborted output, for which OpenAI has none."""
    assert finished is not None
    if finished.reason not in ("stop", "length"):
        raise aborted(is_draining=server.is_draining)
    return finished.reason


def _usage(outputs: list[PendingOutput]) -> dict[str, Any]:
    """Tokens of all outputs; a prompt that several share counts once. Drafts are no predictions in OpenAI's sense."""
    firsts = {output.prompt.request_id: output for output in reversed(outputs)}
    usages = [each.answer.finished.usage for each in firsts.values() if each.answer.finished is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(len(output.answer.tokens) for output in outputs)
    cached = sum(usage.cached_tokens for usage in usages)
    return usage_json(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
