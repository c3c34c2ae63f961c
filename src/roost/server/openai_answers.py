"""Answers of OpenAI's endpoints: chat and text completions, whole and in chunks, as its official client reads them.

Built here and nowhere else. `finish_reason` is `stop`, `length` or `tool_calls`: an output that ended otherwise is an
error, in a stream its last event. Called by `server.openai`.
"""

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from itertools import accumulate
from typing import Any

from roost.front.answer import Answer, Piece
from roost.messages import Finished, TokenLogprob
from roost.server.generation import Generation, PendingOutput, Prompt
from roost.server.refusals import aborted
from roost.server.responses import finite, usage_json
from roost.server.state import ServerState
from roost.text.language import Language
from roost.tools.openai_form import delta_of, finish_reason

_NO_LOGPROBS: dict[str, Any] = {"content": [], "refusal": None}


class ChatAnswers:
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
                "message": output.answer.message,
                "logprobs": self._logprobs(output, output.answer.tokens, output.answer.logprobs),
                "finish_reason": self._reason(output),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._base, "object": self.object, "choices": choices, "usage": usage_of(outputs)}

    async def chunks(self, *, include_usage: bool) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of a stream."""
        outputs = self.generation.outputs
        has_begun: set[int] = set()
        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.begun is not None:
                    continue
                if index not in has_begun:
                    has_begun.add(index)
                    content = None if outputs[index].answer.is_read else ""  # there may be none beside calls
                    yield self._chunk(index, {"role": "assistant", "content": content}, None, None, include_usage)
                logprobs = self._logprobs(outputs[index], piece.tokens, piece.logprobs)
                for delta in _deltas(outputs[index].answer, piece):
                    yield self._chunk(index, delta, logprobs, None, include_usage)
                    logprobs = None if logprobs is None else _NO_LOGPROBS  # the piece's, once
                if piece.finished is not None:
                    yield self._chunk(index, {}, None, self._reason(outputs[index]), include_usage)
        if include_usage:
            yield {**self._base, "object": self.chunk_object, "choices": [], "usage": usage_of(outputs)}

    def _chunk(
        self, index: int, delta: dict[str, Any], logprobs: Any, reason: str | None, include_usage: bool
    ) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        usage = {"usage": None} if include_usage else {}
        return {**self._base, "object": self.chunk_object, "choices": [choice], **usage}

    def _reason(self, output: PendingOutput) -> str:
        reason = ended_reason(self._server, output.answer.finished)
        return finish_reason(reason, has_calls=output.answer.has_calls)

    def _logprobs(self, output: PendingOutput, tokens: Any, logprobs: Any) -> dict[str, Any] | None:
        if output.prompt.options.logprobs is None:
            return None
        return {"content": scored_tokens(self._server.language, tokens, logprobs), "refusal": None}


class TextAnswers:
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
                "finish_reason": ended_reason(self._server, output.answer.finished),
            }
            for index, output in enumerate(outputs)
        ]
        return {**self._base, "choices": choices, "usage": usage_of(outputs)}

    async def chunks(self, *, include_usage: bool) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of a stream."""
        outputs = self.generation.outputs
        scored_lens: dict[int, int] = {}  # characters of scored tokens, by output that has begun
        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.begun is not None:
                    continue
                first = index not in scored_lens
                offset = scored_lens.setdefault(index, 0)
                text = (self._prompt_text(outputs[index]) if first else "") + piece.text
                if text or piece.logprobs or piece.finished is not None:
                    logprobs = self._piece_logprobs(outputs[index], piece, offset, with_prompt=first)
                    scored_lens[index] += sum(map(len, logprobs["tokens"])) if logprobs is not None else 0
                    reason = ended_reason(self._server, piece.finished) if piece.finished is not None else None
                    choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
                    yield {**self._base, "choices": [choice], **({"usage": None} if include_usage else {})}
        if include_usage:
            yield {**self._base, "choices": [], "usage": usage_of(outputs)}

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


def _deltas(answer: Answer, piece: Piece) -> list[dict[str, Any]]:
    """What a piece adds to a stream; one that has log-probabilities adds something in any case."""
    plain = [{"content": piece.text}] if piece.text else []
    deltas = [delta for event in piece.events if (delta := delta_of(event))] if answer.is_read else plain
    return deltas or ([{"content": ""}] if piece.logprobs else [])


def scored_tokens(language: Language, tokens: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[dict[str, Any]]:
    """Tokens with their log-probabilities and best alternatives."""

    def shown(token: int, logprob: float) -> dict[str, Any]:
        piece = language.tokenizer.piece(token)
        return {"token": piece.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(piece)}

    return [
        {**shown(token, entry.logprob), "top_logprobs": [shown(*other) for other in entry.top_logprobs]}
        for token, entry in zip(tokens, logprobs, strict=True)
    ]


def ended_reason(server: ServerState, finished: Finished | None) -> str:
    """OpenAI's finish_reason; raises for an aborted output, for which OpenAI has none."""
    assert finished is not None
    if finished.reason not in ("stop", "length"):
        raise aborted(is_draining=server.is_draining)
    return finished.reason


def usage_of(outputs: list[PendingOutput]) -> dict[str, Any]:
    """Tokens of all outputs; a prompt that several share counts once. Drafts are no predictions in OpenAI's sense."""
    firsts = {output.prompt.request_id: output for output in reversed(outputs)}
    usages = [each.answer.finished.usage for each in firsts.values() if each.answer.finished is not None]
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(len(output.answer.tokens) for output in outputs)
    cached = sum(usage.cached_tokens for usage in usages)
    return usage_json(prompt_tokens=prompt, cached_tokens=cached, completion_tokens=completion)
