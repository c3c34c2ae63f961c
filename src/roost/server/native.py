"""SGLang's native endpoints: generate, abort_request, flush_cache, so that its clients work here.

A stream repeats the whole text so far in each event, as they expect. The new tokens of a session's turn come from
`native_sessions`; all else is the same for it. Called by the app's routes.
"""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.front.answer import refusal
from roost.front.options import Options
from roost.messages import Finished, FlushCache, Flushed, Refused, SpecStats, TokenLogprob
from roost.server.answer_grammars import native_grammar, with_grammar
from roost.server.body_reader import convert, read, read_bytes
from roost.server.generation import Generation, PendingOutput, Prompt, renamed, while_connected
from roost.server.keys import caller, check_admin
from roost.server.native_sessions import one_input, session_prompt
from roost.server.responses import event_stream, finite, json_response
from roost.server.schema import (
    REQUEST_ID_LEN_MAX,
    AbortBody,
    FlushBody,
    GenerateBody,
    SamplingBody,
    SessionParams,
    cache_salt,
    native_options,
    refuse_unsupported,
)
from roost.server.state import ServerState


async def generate(request: Request) -> Response:
    """POST /generate."""
    server: ServerState = request.app.state.server
    body = await read(request, GenerateBody)
    refuse_unsupported(body)
    if body.stream and body.stream_output:
        raise RequestError(400, "stream_output", "must be false in a stream: each event repeats the whole text so far")
    server.check_ready()
    if body.session_params is not None:
        return await _turn(request, server, body, body.session_params)
    inputs, is_list = await _inputs(server, body)
    options = await _options(request, body, len(inputs))
    request_ids = _request_ids(body, len(inputs))
    prompts = [
        Prompt(
            request_id=request_id,
            tokens=tokens,
            options=each,
            names=_names(body, number),
            client=caller(request).name,
        )
        for number, (request_id, tokens, each) in enumerate(zip(request_ids, inputs, options, strict=True))
    ]
    return await _answer(
        request, _NativeAnswers(server, body, prompts, is_list=is_list or any(each.n > 1 for each in options))
    )


async def _turn(request: Request, server: ServerState, body: GenerateBody, params: SessionParams) -> Response:
    """One turn of a session; the session is as it was if anything is refused."""
    text, ids = one_input(body)
    (options,), (request_id,), names = await _options(request, body, 1), _request_ids(body, 1), _names(body, 0)
    names |= {"session_id": "session_params.id"}
    asked = Prompt(request_id=request_id, options=options, names=names, client=caller(request).name)
    try:
        async with session_prompt(request, params, text, ids, asked) as prompt:
            return await _answer(request, _NativeAnswers(server, body, [prompt], is_list=False))
    except RequestError as error:
        if error.status != 413:
            raise renamed(error, names) from error
        raise renamed(RequestError(400, error.param, error.reason), names) from error  # all that its clients know


async def _answer(request: Request, answers: "_NativeAnswers") -> Response:
    if not answers.streams:
        outputs = await while_connected(request, answers.generation.finish())
        return json_response(answers.response(outputs))
    return await event_stream(request, answers.chunks())


async def abort_request(request: Request) -> Response:
    """POST /abort_request."""
    server: ServerState = request.app.state.server
    body = await read(request, AbortBody)
    refuse_unsupported(body)
    server.check_alive()
    if not body.abort_all and not body.rid:
        raise RequestError(400, "rid", "must be given, or abort_all: true")
    client = caller(request)
    whose = None if body.abort_all and client.is_admin else client.name
    server.engine.abort_where(lambda request_id: body.abort_all or request_id.partition("#")[0] == body.rid, whose)
    return json_response({"success": True})


async def flush_cache(request: Request) -> Response:
    """POST /flush_cache."""
    server: ServerState = request.app.state.server
    check_admin(request)
    data = await read_bytes(request)
    if data:
        await server.offload.run(len(data), lambda: convert(data, FlushBody))
    server.check_ready()
    answer = await server.ask(FlushCache())
    if isinstance(answer, Refused):
        raise refusal(answer)
    assert isinstance(answer, Flushed)
    return json_response({"success": True, "num_pages": answer.num_pages})


async def _inputs(server: ServerState, body: GenerateBody) -> tuple[list[tuple[int, ...]], bool]:
    """Token ids of every prompt, and whether a list was given."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError(400, "text", "give either text or input_ids")
    if body.text is not None:
        return await server.prompt_tokens(body.text, "text"), isinstance(body.text, list)
    assert body.input_ids is not None
    if any(isinstance(each, str) for each in body.input_ids):
        raise RequestError(400, "input_ids", "must be a list of token ids, or a list of such lists")
    is_list = bool(body.input_ids) and isinstance(body.input_ids[0], list)
    return await server.prompt_tokens(body.input_ids, "input_ids"), is_list


async def _options(request: Request, body: GenerateBody, num_prompts: int) -> list[Options]:
    """The options of each prompt."""
    given = body.sampling_params if body.sampling_params is not None else SamplingBody()
    if isinstance(given, list) and len(given) != num_prompts:
        raise RequestError(400, "sampling_params", f"a list must have an entry for each of the {num_prompts} prompts")
    if body.logprob_start_len is not None and body.logprob_start_len < -1:
        raise RequestError(400, "logprob_start_len", f"must be at least -1, got {body.logprob_start_len}")
    start = None if body.logprob_start_len == -1 else body.logprob_start_len
    asked_for = {
        "top_logprobs_num": bool(body.top_logprobs_num),
        "logprob_start_len": start is not None,
        "return_text_in_logprobs": bool(body.return_text_in_logprobs),
    }
    for name, is_asked_for in asked_for.items():
        if is_asked_for and not body.return_logprob:
            raise RequestError(400, name, "needs return_logprob: true")
    if not isinstance(given, list):
        return [await _options_of(request, body, given, 0, start)] * num_prompts
    return [await _options_of(request, body, params, number, start) for number, params in enumerate(given)]


async def _options_of(
    request: Request, body: GenerateBody, params: SamplingBody, number: int, start: int | None
) -> Options:
    """The options of the prompt of this number, or of all."""
    path = _params_path(body, number)
    refuse_unsupported(params, path)
    try:
        usual = native_options(params)
    except RequestError as error:
        raise renamed(error, _names(body, number)) from error
    usual = await with_grammar(request, usual, native_grammar(params, path))
    asked = replace(usual, priority=body.priority or 0, cache_salt=cache_salt(body))
    if body.return_logprob:
        asked = replace(asked, logprobs=body.top_logprobs_num or 0, prompt_logprobs_from=start)
    return asked


def _request_ids(body: GenerateBody, num_prompts: int) -> list[str]:
    if body.rid is None:
        first = uuid4().hex
        return [first if number == 0 else f"{first}-{number}" for number in range(num_prompts)]
    request_ids = body.rid if isinstance(body.rid, list) else [body.rid]
    if len(request_ids) != num_prompts or len(set(request_ids)) != num_prompts:
        raise RequestError(400, "rid", f"must be a different name for each of the {num_prompts} prompts")
    if not all(0 < len(each) <= REQUEST_ID_LEN_MAX and "#" not in each for each in request_ids):
        raise RequestError(400, "rid", f"must have 1 to {REQUEST_ID_LEN_MAX} characters, none of them #")
    return request_ids


def _params_path(body: GenerateBody, number: int) -> str:
    """Where the client put the options of a prompt."""
    return f"sampling_params[{number}]." if isinstance(body.sampling_params, list) else "sampling_params."


def _names(body: GenerateBody, number: int) -> dict[str, str]:
    """The client's names of the engine's parameters."""
    path = _params_path(body, number)
    names = {name: path + name for name in SamplingBody.__struct_fields__}
    source = "text" if body.text is not None else "input_ids"
    given = body.sampling_params[number] if isinstance(body.sampling_params, list) else body.sampling_params
    grammar = "grammar" if given is None else native_grammar(given, path).param
    return {**names, "grammar": grammar, "tokens": source, "logprobs": "top_logprobs_num", "request_id": "rid"}


class _NativeAnswers:
    """What goes back for a GenerateBody."""

    def __init__(self, server: ServerState, body: GenerateBody, prompts: list[Prompt], *, is_list: bool) -> None:
        self._server = server
        self._body = body
        self._is_list = is_list
        self.streams = bool(body.stream)
        self._began = time.monotonic()
        self.generation = Generation(server.engine, server.language, server.metrics, prompts)

    def response(self, outputs: list[PendingOutput]) -> Any:
        """The answer that is not streamed: an object, or a list of them."""
        answers = [self._one(output, output.answer.finished) for output in outputs]
        return answers if self._is_list else answers[0]

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a stream, each with the whole text so far."""
        outputs = self.generation.outputs
        async with aclosing(self.generation.pieces()) as pieces:
            async for index, piece in pieces:
                if piece.text or piece.tokens or piece.finished is not None:
                    answer = self._one(outputs[index], piece.finished)
                    yield {**answer, "index": index} if self._is_list else answer

    def _one(self, output: PendingOutput, finished: Finished | None) -> dict[str, Any]:
        answer = output.answer
        meta: dict[str, Any] = {
            "id": output.request_id,
            "finish_reason": None if finished is None else _reason(finished),
            "prompt_tokens": output.prompt.offset + len(output.prompt.tokens),
            "completion_tokens": len(answer.tokens),
            "cached_tokens": 0 if finished is None else finished.usage.cached_tokens,
            "e2e_latency": time.monotonic() - self._began,
        }
        if finished is not None:
            meta |= _speculation(finished.spec)
        if self._body.return_logprob:
            meta |= self._logprobs(output, finished)
        return {"text": answer.text, "output_ids": list(answer.tokens), "meta_info": meta}

    def _logprobs(self, output: PendingOutput, finished: Finished | None) -> dict[str, Any]:
        answer, start = output.answer, output.prompt.options.prompt_logprobs_from
        scored = list(zip(answer.tokens, answer.logprobs, strict=True))
        columns: dict[str, Any] = {
            "output_token_logprobs": [self._entry(token, entry.logprob) for token, entry in scored],
            "output_top_logprobs": [self._top(entry) for _, entry in scored],
        }
        if start is not None and output.submit.prompt_logprobs_from is not None:
            columns |= self._prompt_logprobs(output, start, finished)
        return columns

    def _prompt_logprobs(self, output: PendingOutput, start: int, finished: Finished | None) -> dict[str, Any]:
        """Those of the prompt's tokens from `start` on; of a session's turn only those that are new and were run."""
        answer, prompt = output.answer, output.prompt
        if finished is not None and finished.prompt_logprobs_from is not None:
            start = max(start, finished.prompt_logprobs_from)
        first_scored = start + 1 if answer.prompt_logprobs_start is None else answer.prompt_logprobs_start
        first = max(start, prompt.offset)
        logprobs: list[TokenLogprob | None] = [None] if first < first_scored else []
        logprobs += answer.prompt_logprobs[max(0, first - first_scored) :]
        entries = list(zip(prompt.tokens[first - prompt.offset :], logprobs, strict=False))
        return {
            "logprob_start_len": first,
            "input_token_logprobs": [
                self._entry(token, None if entry is None else entry.logprob) for token, entry in entries
            ],
            "input_top_logprobs": [None if entry is None else self._top(entry) for _, entry in entries],
        }

    def _top(self, entry: TokenLogprob) -> list[list[Any]]:
        return [self._entry(token, logprob) for token, logprob in entry.top_logprobs]

    def _entry(self, token: int, logprob: float | None) -> list[Any]:
        text = None
        if self._body.return_text_in_logprobs:
            text = self._server.language.tokenizer.piece(token).decode("utf-8", "replace")
        return [None if logprob is None else finite(logprob), token, text]


def _reason(finished: Finished) -> dict[str, Any]:
    """How it ended, as SGLang says it."""
    if finished.reason == "length":
        return {"type": "length", "length": finished.max_new_tokens}
    if finished.reason == "stop":
        return {"type": "stop", "matched": finished.matched}
    return {"type": "abort", "message": finished.message or "aborted"}


def _speculation(spec: SpecStats) -> dict[str, Any]:
    """What speculation did, by the names SGLang gives it; like there, nothing if no draft was offered."""
    if not spec.drafts_offered:
        return {}
    histogram = list(spec.histogram)  # rounds by right drafts
    return {
        "spec_verify_ct": spec.rounds,
        "spec_accept_length": spec.accept_length,
        "spec_accept_rate": spec.drafts_accepted / spec.drafts_offered,
        "spec_num_correct_drafts": spec.drafts_accepted,
        "spec_num_proposed_drafts": spec.drafts_offered,
        "spec_correct_drafts_histogram": histogram,
        # the names until 0.5.9, which many clients still read
        "spec_accept_token_num": spec.drafts_accepted,
        "spec_draft_token_num": spec.drafts_offered,
        "spec_accept_histogram": histogram,
        "spec_forced": spec.drafts_forced,  # ours: accepted drafts that a grammar left no choice about
        "spec_overshoot": spec.overshoot,  # ours: accepted tokens past the end of the output
        # ours: what was looked up beside a head
        "spec_lookup_rounds": spec.lookup_rounds,
        "spec_num_correct_lookup_drafts": spec.lookup_accepted,
        "spec_num_proposed_lookup_drafts": spec.lookup_offered,
    }
