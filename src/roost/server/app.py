"""App: routes, who may use them, and what errors look like.

State changes only by POST or DELETE. A caller's key is checked before its body is read. An error tells the caller what
to do about it and reveals nothing internal. Built by `serve`, which wraps it in the host check and the request log.
"""

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, HTTPConnection, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from roost.errors import CapacityError, RequestError
from roost.server import (
    anthropic,
    health,
    live_page,
    models,
    native,
    native_sessions,
    openai,
    openai_responses,
    openapi,
    response_socket,
    sessions,
    tokens,
)
from roost.server.generation import ClientGone
from roost.server.host_check import AllowedOrigins, is_same_origin
from roost.server.keys import sent_key
from roost.server.responses import error_at, error_body, error_of, json_response
from roost.server.state import ServerState

# need no key, and reveal nothing about users: probes, and the live page without what it shows
_OPEN = ("/health", "/ready", "/live", "/live/{file}")

Endpoint = Callable[[Request], Awaitable[Response]]


ROUTES: tuple[tuple[str, str, Endpoint], ...] = (
    ("GET", "/v1/models", models.models),
    ("GET", "/v1/models/{model:path}", models.model),
    ("POST", "/v1/chat/completions", openai.chat),
    ("POST", "/v1/completions", openai.completions),
    ("POST", "/v1/messages", anthropic.messages),
    ("POST", "/v1/messages/count_tokens", anthropic.count_tokens),
    ("POST", "/v1/responses", openai_responses.create),
    ("POST", "/v1/responses/input_tokens", openai_responses.input_tokens),
    ("GET", "/v1/responses/{id}", openai_responses.retrieve),
    ("DELETE", "/v1/responses/{id}", openai_responses.delete),
    ("POST", "/v1/responses/{id}/cancel", openai_responses.cancel),
    ("GET", "/v1/responses/{id}/input_items", openai_responses.list_input_items),
    ("POST", "/v1/conversations", openai_responses.create_conversation),
    ("GET", "/v1/conversations/{id}", openai_responses.conversation),
    ("POST", "/v1/conversations/{id}", openai_responses.update_conversation),
    ("DELETE", "/v1/conversations/{id}", openai_responses.delete_conversation),
    ("GET", "/v1/conversations/{id}/items", openai_responses.list_items),
    ("POST", "/v1/conversations/{id}/items", openai_responses.add_items),
    ("GET", "/v1/conversations/{id}/items/{item}", openai_responses.item),
    ("DELETE", "/v1/conversations/{id}/items/{item}", openai_responses.delete_item),
    ("POST", "/generate", native.generate),
    ("POST", "/abort_request", native.abort_request),
    ("POST", "/flush_cache", native.flush_cache),
    ("POST", "/open_session", native_sessions.open_session),
    ("POST", "/close_session", native_sessions.close_session),
    ("GET", "/v1/sessions", sessions.sessions),
    ("POST", "/v1/sessions", sessions.open_session),
    ("GET", "/v1/sessions/{id}", sessions.session),
    ("DELETE", "/v1/sessions/{id}", sessions.close_session),
    ("POST", "/v1/sessions/{id}/append", sessions.append),
    ("POST", "/v1/sessions/{id}/generate", sessions.generate),
    ("POST", "/v1/sessions/{id}/rewind", sessions.rewind),
    ("POST", "/v1/sessions/{id}/fork", sessions.fork),
    ("GET", "/health", health.health),
    ("GET", "/ready", health.ready),
    ("GET", "/server_info", health.server_info),
    ("GET", "/get_server_info", health.server_info),
    ("GET", "/model_info", models.model_info),
    ("GET", "/get_model_info", models.model_info),
    ("GET", "/health_generate", health.health_generate),
    ("GET", "/version", health.version),
    ("GET", "/metrics", health.metrics),
    ("GET", "/v1/pages", live_page.pages),
    ("GET", "/live", live_page.page),
    ("GET", "/live/frames", live_page.frames),
    ("GET", "/live/{file}", live_page.asset),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("GET", "/openapi.json", openapi.openapi),
)


def make_app(server: ServerState) -> Starlette:
    """The application over one engine."""
    routes: list[BaseRoute] = [WebSocketRoute("/v1/responses", _socket)]
    routes += [Route(path, _guarded(endpoint, path, method), methods=[method]) for method, path, endpoint in ROUTES]
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


def _guarded(endpoint: Endpoint, path: str, method: str) -> Endpoint:
    """An endpoint for clients that are known, and that no other site's page sends a request to."""

    async def guarded(request: Request) -> Response:
        if path not in _OPEN:
            _identify(request)
        if method != "GET":
            check_origin(request)
        return await endpoint(request)

    return guarded


async def _socket(websocket: WebSocket) -> None:
    """A WebSocket of a known client; another is told why it is refused, before the upgrade."""
    server: ServerState = websocket.app.state.server
    try:
        _identify(websocket)
        check_origin(websocket)
        server.check_ready()
    except (RequestError, CapacityError) as error:
        status, body = error_at(websocket, error.status, error_of(error))
        await websocket.send_denial_response(json_response(body, status))
        return
    await response_socket.responses_socket(websocket)


def _identify(connection: HTTPConnection) -> None:
    """Say who the client is, by its key."""
    server: ServerState = connection.app.state.server
    connection.state.client = server.keys.client_of(sent_key(connection.headers))


def check_origin(request: HTTPConnection) -> None:
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
    server: ServerState = request.app.state.server
    server.metrics.refuse(error.status)
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
