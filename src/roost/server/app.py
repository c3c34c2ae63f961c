"""App: routes, who may use them, and what errors look like.

State changes only by POST or DELETE. A caller's key is checked before its body is read. An error tells the caller what
to do about it and reveals nothing internal. Built by `serve`, which wraps it in the host check and the request log.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from roost.errors import CapacityError, RequestError
from roost.server import health, models, native, native_sessions, openai, openapi, sessions, tokens
from roost.server.generation import ClientGone
from roost.server.host_check import AllowedOrigins, is_same_origin
from roost.server.responses import error_at, error_body, error_of, json_response
from roost.server.state import ServerState

_OPEN = ("/health", "/ready")  # probes: need no key, and reveal nothing about users

Endpoint = Callable[[Request], Awaitable[Response]]


def make_app(server: ServerState) -> Starlette:
    """The server's application."""

    def route(path: str, endpoint: Endpoint, method: str) -> Route:
        async def guarded(request: Request) -> Response:
            if path not in _OPEN:
                request.state.client = server.keys.client_of(request.headers.get("authorization", ""))
            if method != "GET":
                check_origin(request)
            return await endpoint(request)

        return Route(path, guarded, methods=[method])

    routes = [
        route("/v1/models", models.models, "GET"),
        route("/v1/models/{model:path}", models.model, "GET"),
        route("/v1/chat/completions", openai.chat, "POST"),
        route("/v1/completions", openai.completions, "POST"),
        route("/generate", native.generate, "POST"),
        route("/abort_request", native.abort_request, "POST"),
        route("/flush_cache", native.flush_cache, "POST"),
        route("/open_session", native_sessions.open_session, "POST"),
        route("/close_session", native_sessions.close_session, "POST"),
        route("/v1/sessions", sessions.sessions, "GET"),
        route("/v1/sessions", sessions.open_session, "POST"),
        route("/v1/sessions/{id}", sessions.session, "GET"),
        route("/v1/sessions/{id}", sessions.close_session, "DELETE"),
        route("/v1/sessions/{id}/append", sessions.append, "POST"),
        route("/v1/sessions/{id}/generate", sessions.generate, "POST"),
        route("/v1/sessions/{id}/rewind", sessions.rewind, "POST"),
        route("/v1/sessions/{id}/fork", sessions.fork, "POST"),
        route("/health", health.health, "GET"),
        route("/ready", health.ready, "GET"),
        route("/server_info", health.server_info, "GET"),
        route("/get_server_info", health.server_info, "GET"),
        route("/model_info", models.model_info, "GET"),
        route("/get_model_info", models.model_info, "GET"),
        route("/health_generate", health.health_generate, "GET"),
        route("/version", health.version, "GET"),
        route("/metrics", health.metrics, "GET"),
        route("/tokenize", tokens.tokenize, "POST"),
        route("/detokenize", tokens.detokenize, "POST"),
        route("/openapi.json", openapi.openapi, "GET"),
    ]
    handlers: dict[Any, Any] = {
        RequestError: _refuse,
        CapacityError: _refuse,
        HTTPException: _http_error,
        ClientGone: _client_gone,
        ClientDisconnect: _client_gone,
        Exception: _internal_error,
    }
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False  # a redirect would point to whatever the Host header says
    app.state.server = server
    app.state.origins = AllowedOrigins(server.config.allow_origin)
    return app


def check_origin(request: Request) -> None:
    """Refuse a request of another site's page: browsers send simple ones unasked, and only guard the response."""
    origins: AllowedOrigins = request.app.state.origins
    origin = request.headers.get("origin")
    if (
        origin is not None
        and not is_same_origin(origin, request.headers.get("host"))
        and not origins.cors_headers(origin)
    ):
        raise RequestError(403, "origin", "pages of other origins are not allowed; --allow-origin adds one")


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError | CapacityError)
    status, body = error_at(request, error.status, error_of(error))
    response = json_response(body, status)
    if error.status in (429, 503):
        response.headers["retry-after"] = "1"
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    return response


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status, body = error_at(request, error.status_code, error_body(error.status_code, error.detail, None))
    response = json_response(body, status)
    response.headers.update(error.headers or {})
    return response


async def _client_gone(request: Request, error: Exception) -> Response:
    """The client has disconnected: nobody will read this response."""
    return Response(status_code=499)


async def _internal_error(request: Request, error: Exception) -> Response:
    """A bug of the server; the request log reports it."""
    status, body = error_at(request, 500, error_body(500, "internal error; the server's log has more", None))
    return json_response(body, status)
