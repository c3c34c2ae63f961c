"""Responses: how answers and errors leave the server, as JSON or as server-sent events.

A stream ends with its reader: what feeds it is closed, however it ends. Called by the endpoints.
"""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from dataclasses import asdict
from typing import Any

import msgspec
from starlette.requests import HTTPConnection, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from roost.errors import CapacityError, RequestError
from roost.front.answer import RepeatedTurn
from roost.server.generation import while_connected
from roost.server.output_log import log_refusal
from roost.server.refusals import error_for_path
from roost.server.state import ServerState

LOGPROB_LEAST = -9999.0  # as OpenAI reports it


def json_response(value: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def finite(logprob: float) -> float:
    """A log-probability as JSON: minus infinity, of an impossible token, becomes -9999."""
    return max(logprob, LOGPROB_LEAST)


def error_body(status: int, message: str, param: str | None) -> dict[str, Any]:
    """An error as OpenAI's client reads it."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_of(error: RequestError | CapacityError) -> dict[str, Any]:
    """The body of an error of ours, which is logged."""
    log_refusal(error)
    if not isinstance(error, RequestError):
        return error_body(error.status, str(error), None)
    body = error_body(error.status, str(error), error.param)
    return {**body, "usage": usage_json(**asdict(error.usage))} if isinstance(error, RepeatedTurn) else body


def error_at(request: HTTPConnection, status: int, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in the form of the API that the request speaks."""
    server: ServerState = request.app.state.server
    context = 0 if server.engine.started is None else server.engine.started.context
    return error_for_path(request.scope["path"], status, body, context)


def usage_json(*, prompt_tokens: int, cached_tokens: int, completion_tokens: int) -> dict[str, Any]:
    """What something cost, as OpenAI says it."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


async def event_stream(request: Request, chunks: AsyncGenerator[Any, None], *, named: bool = False) -> Response:
    """Server-sent events; the first is awaited, so that a refusal is an answer of its own and not part of a stream.

    `named`: each has its type as its name, and the last one says that it is the last.
    """
    server: ServerState = request.app.state.server
    first = await while_connected(request, anext(chunks, None))  # None: there is nothing to tell
    lines = _named_lines(first, chunks, request) if named else _lines(first, chunks, request)
    return _EventStream(lines, chunks, server.config.stall_s)


async def exhaust(chunks: AsyncGenerator[Any, None]) -> None:
    """Read what nobody wants to see in pieces."""
    async with aclosing(chunks) as every:
        async for _ in every:
            pass


class _EventStream(StreamingResponse):
    """A stream that ends with its reader: what is behind it is closed, however it ends."""

    def __init__(self, lines: AsyncGenerator[bytes, None], chunks: AsyncGenerator[Any, None], stall_s: int) -> None:
        self._chunks = chunks
        self._stall_s = stall_s
        self._lines = lines
        headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
        super().__init__(self._lines, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it all; a reader that takes nothing for too long is given up."""

        async def send_in_time(message: Message) -> None:
            async with asyncio.timeout(self._stall_s):
                await send(message)

        try:
            with suppress(TimeoutError):
                await super().__call__(scope, receive, send_in_time)
        finally:
            await self._lines.aclose()
            await self._chunks.aclose()


async def _lines(first: Any, chunks: AsyncGenerator[Any, None], request: Request) -> AsyncGenerator[bytes, None]:
    try:
        yield _event(first)
        async for chunk in chunks:
            yield _event(chunk)
    except (RequestError, CapacityError) as error:
        yield _event(error_at(request, error.status, error_of(error))[1])
    yield b"data: [DONE]\n\n"


async def _named_lines(first: Any, chunks: AsyncGenerator[Any, None], request: Request) -> AsyncGenerator[bytes, None]:
    try:
        if first is not None:
            yield _named_event(first)
        async for chunk in chunks:
            yield _named_event(chunk)
    except (RequestError, CapacityError) as error:
        yield _named_event({"type": "error", **error_at(request, error.status, error_of(error))[1]})


def _named_event(chunk: dict[str, Any]) -> bytes:
    return f"event: {chunk['type']}\n".encode() + _event(chunk)


def _event(chunk: Any) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
