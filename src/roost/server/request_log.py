"""Request log: one line for each finished request, and the one place that reports a request that failed with a bug.

A line has method, path, status, time, tokens and client; never a prompt, a query or a key. Wraps the whole application;
`serve` puts it there.
"""

import logging
import time
from contextvars import ContextVar
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from roost.server.keys import Client
from roost.server.logs import REQUESTS

_PROBES = ("/health", "/ready", "/metrics")
_PATH_LEN_MAX = 200
_SWITCHED = 101  # the status with which a WebSocket begins
_ENDS = ("http.response.body", "websocket.close")
_log = logging.getLogger("roost.server")
_request_log = logging.getLogger(REQUESTS)


@dataclass(slots=True)
class _LoggedResponse:
    """What is known so far of a response."""

    began: float
    status: int = 0
    is_whole: bool = False
    prompt_tokens: int = 0
    completion_tokens: int = 0


_answer: ContextVar[_LoggedResponse | None] = ContextVar("answer", default=None)


def count_tokens(prompt: int, completion: int) -> None:
    """Add an output's tokens to the request that this task, or the task that started it, answers."""
    if (answer := _answer.get()) is not None:
        answer.prompt_tokens += prompt
        answer.completion_tokens += completion


class RequestLog:
    """Wraps an application and logs its requests: `all`, `none`, the `failed` ones, or `usual`: all but good probes."""

    def __init__(self, app: ASGIApp, which: str) -> None:
        self._app = app
        self._which = which

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, then log it."""
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = _LoggedResponse(time.monotonic())

        async def noted(message: Message) -> None:
            await send(message)
            answer.status = _SWITCHED if message["type"] == "websocket.accept" else message.get("status", answer.status)
            answer.is_whole = message["type"].endswith(_ENDS) and not message.get("more_body", False)

        token = _answer.set(answer)
        try:
            await self._app(scope, receive, noted)
        except Exception:  # noqa: BLE001 (the client has its 500; uvicorn would report it a second time)
            _log.exception("%s %s failed", _method(scope), _short(scope["path"]))
        finally:
            _answer.reset(token)
            if self._is_logged(scope["path"], answer.status):
                took_s = time.monotonic() - answer.began
                fields = _fields(scope, answer, took_s)
                _request_log.info("%s", _line(scope, answer, took_s), extra={"fields": fields})

    def _is_logged(self, path: str, status: int) -> bool:
        is_good = 0 < status < 400
        if self._which == "usual":
            return not (is_good and path in _PROBES)
        return self._which == "all" or (self._which == "failed" and not is_good)


def _line(scope: Scope, answer: _LoggedResponse, took_s: float) -> str:
    parts = [f"{_method(scope)} {_short(scope['path'])} {answer.status or 'unanswered'} {took_s:.3f} s"]
    if answer.status and not answer.is_whole:
        parts.append("cut short")
    if answer.prompt_tokens or answer.completion_tokens:
        parts.append(f"{answer.prompt_tokens} + {answer.completion_tokens} tokens")
    if scope["client"] is not None:
        parts.append(scope["client"][0])
    if name := _key_name(scope):
        parts.append(name)
    return ", ".join(parts)


def _fields(scope: Scope, answer: _LoggedResponse, took_s: float) -> dict[str, object]:
    """The same as the line, by name; a status of 0: unanswered."""
    fields: dict[str, object] = {"method": _method(scope), "path": _short(scope["path"]), "status": answer.status}
    fields |= {"ms": round(took_s * 1000, 3), "client": scope["client"][0] if scope["client"] else None}
    if name := _key_name(scope):
        fields["key"] = name
    if answer.prompt_tokens or answer.completion_tokens:
        fields |= {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
    return {**fields, "is_cut_short": True} if answer.status and not answer.is_whole else fields


def _key_name(scope: Scope) -> str:
    """What the client of the request's key is called; '' without a name."""
    client: Client | None = scope.get("state", {}).get("client")
    return "" if client is None else client.name


def _method(scope: Scope) -> str:
    return str(scope.get("method", "WEBSOCKET"))


def _short(path: str) -> str:
    return path if len(path) <= _PATH_LEN_MAX else path[:_PATH_LEN_MAX] + "…"
