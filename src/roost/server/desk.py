"""Desk: what every endpoint of the server shares, and how answers leave it.

Owns the link to the engine, the model's language and the measurements. Called by the endpoints.
"""

import time
from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from roost.config import ServerConfig
from roost.errors import CapacityError, RequestError
from roost.server.generation import while_connected
from roost.server.link import Link
from roost.server.metrics import Metrics
from roost.text.language import Language

PROMPTS_MAX = 256  # in one request


class Desk:
    """The server's state."""

    def __init__(self, config: ServerConfig, link: Link) -> None:
        self.config = config
        self.link = link
        self.metrics = Metrics()
        self.began = int(time.time())
        self.is_draining = False
        self._language: Language | None = None

    def open(self) -> None:
        """The engine is ready."""
        assert self.link.started is not None
        self._language = Language.from_json(self.link.started.language)

    def check_alive(self) -> None:
        """Refuse to say that all is well when the engine is not there."""
        if self.link.is_gone.is_set():
            raise CapacityError(503, "the engine is not running")
        if self._language is None:
            raise CapacityError(503, "the model is loading")

    def check_ready(self) -> None:
        """Refuse work that cannot be done now."""
        self.check_alive()
        if self.is_draining:
            raise CapacityError(503, "the server is stopping")

    @property
    def language(self) -> Language:
        """The model's tokenizer and chat template."""
        self.check_ready()
        assert self._language is not None
        return self._language

    @property
    def model_name(self) -> str:
        """The name the model is served by."""
        assert self.link.started is not None
        return self.link.started.model_name

    def prompts(self, given: Any, param: str) -> list[tuple[int, ...]]:
        """The tokens of one or several prompts, given as text or as ids."""
        if isinstance(given, str):
            return [self.tokens(given, param)]
        if given and all(isinstance(each, int) and not isinstance(each, bool) for each in given):
            return [tuple(given)]
        if not 1 <= len(given) <= PROMPTS_MAX:
            raise RequestError(400, param, f"must hold 1 to {PROMPTS_MAX} prompts, got {len(given)}")
        return [self.tokens(each, param) for each in given]

    def tokens(self, given: Any, param: str) -> tuple[int, ...]:
        """The tokens of one prompt, given as text or as ids."""
        if isinstance(given, str):
            try:
                return self.language.prompt_tokens(given)
            except RequestError as error:
                raise RequestError(error.status, param, error.reason) from error
        is_ids = isinstance(given, list) and all(isinstance(each, int) and not isinstance(each, bool) for each in given)
        if not is_ids:
            raise RequestError(400, param, "must be a text, a list of token ids, or a list of either")
        return tuple(given)


def json_response(value: Any, status: int = 200) -> Response:
    """An answer in JSON."""
    return Response(msgspec.json.encode(value), status_code=status, media_type="application/json")


def error_body(status: int, message: str, param: str | None) -> dict[str, Any]:
    """An error as OpenAI's client reads it."""
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error"
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def error_of(error: RequestError | CapacityError) -> dict[str, Any]:
    """The body of an error of ours."""
    return error_body(error.status, str(error), error.param if isinstance(error, RequestError) else None)


async def events(request: Request, chunks: AsyncGenerator[Any, None]) -> Response:
    """Server-sent events; the first is awaited, so that a refusal is an answer of its own and not part of a stream."""
    first = await while_connected(request, anext(chunks))

    async def stream() -> AsyncGenerator[bytes, None]:
        try:
            yield _event(first)
            async for chunk in chunks:
                yield _event(chunk)
        except (RequestError, CapacityError) as error:
            yield _event(error_of(error))
        finally:
            await chunks.aclose()
        yield b"data: [DONE]\n\n"

    headers = {"cache-control": "no-cache", "x-accel-buffering": "no"}
    return StreamingResponse(stream(), media_type="text/event-stream", headers=headers)


def _event(chunk: Any) -> bytes:
    return b"data: " + msgspec.json.encode(chunk) + b"\n\n"
