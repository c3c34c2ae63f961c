"""OpenAPI: a description of every endpoint, made from the routes and the schemas that are used to answer them.

Owns one sentence and one example for each route; fields, types and limits come from the schemas, and the accepted
values of unsupported fields from `compat`. Checks nothing. Called by the app's routes.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import roost
from roost.server.compat import NO_OP_VALUES
from roost.server.message_schema import MESSAGE_UNSUPPORTED, CountTokensBody, MessagesBody
from roost.server.response_schema import (
    RESPONSE_UNSUPPORTED,
    ConversationBody,
    ConversationUpdateBody,
    InputTokensBody,
    ItemsBody,
    ResponseBody,
)
from roost.server.responses import json_response
from roost.server.schema import (
    UNSUPPORTED,
    AbortBody,
    AppendBody,
    ChatBody,
    CloseNativeBody,
    CompletionBody,
    DetokenizeBody,
    FlushBody,
    ForkBody,
    GenerateBody,
    OpenBody,
    OpenNativeBody,
    RewindBody,
    TokenizeBody,
    TurnBody,
)

_REF = "#/components/schemas/{name}"
_JSON = "application/json"
_PATH_PARAM = re.compile(r"\{(\w+)(?::\w+)?\}")  # of a parameter in a path


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """The description of one route."""

    summary: str
    body: type[msgspec.Struct] | None = None
    example: Any = None  # a valid body
    answers: str = "JSON"  # what the response to a valid request holds
    media: tuple[str, ...] = (_JSON,)
    status: int = 200


class ErrorDetail(msgspec.Struct, kw_only=True):
    """What is wrong with a request."""

    message: str
    type: str
    param: str | None  # the message names it, too
    code: str | int | None  # a word or null on OpenAI's endpoints, elsewhere the status


class ErrorResponse(msgspec.Struct, kw_only=True):
    """The body of an error of every endpoint but Anthropic's, which have an envelope of their own."""

    error: ErrorDetail


_STREAMS = (_JSON, "text/event-stream")
ALL_UNSUPPORTED = UNSUPPORTED | RESPONSE_UNSUPPORTED | MESSAGE_UNSUPPORTED  # fields, by body
_HELLO = {"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 32}
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/v1/models"): Operation(summary="The model by the name it is served by, with its max_model_len"),
    ("GET", "/v1/models/{model}"): Operation(summary="The model of one of its names"),
    ("POST", "/v1/chat/completions"): Operation(
        summary="OpenAI's chat completions", body=ChatBody, example=_HELLO, media=_STREAMS
    ),
    ("POST", "/v1/completions"): Operation(
        summary="OpenAI's text completions",
        body=CompletionBody,
        example={"prompt": "The sea was", "max_tokens": 16, "temperature": 0},
        media=_STREAMS,
    ),
    ("POST", "/v1/messages"): Operation(
        summary="Anthropic's messages",
        body=MessagesBody,
        example={"model": "default", "max_tokens": 32, "messages": [{"role": "user", "content": "Hello"}]},
        media=_STREAMS,
    ),
    ("POST", "/v1/messages/count_tokens"): Operation(
        summary="How many tokens a message's input has",
        body=CountTokensBody,
        example={"model": "default", "messages": [{"role": "user", "content": "Hello"}]},
    ),
    ("POST", "/v1/responses"): Operation(
        summary="OpenAI's responses; with GET and an upgrade a WebSocket",
        body=ResponseBody,
        example={"input": "What is the capital of France?", "max_output_tokens": 32},
        media=_STREAMS,
    ),
    ("POST", "/v1/responses/input_tokens"): Operation(
        summary="How many tokens a response's input has", body=InputTokensBody, example={"input": "The sea was"}
    ),
    ("GET", "/v1/responses/{id}"): Operation(summary="A stored response"),
    ("DELETE", "/v1/responses/{id}"): Operation(summary="Forget a response"),
    ("POST", "/v1/responses/{id}/cancel"): Operation(summary="End a response that is made in the background"),
    ("GET", "/v1/responses/{id}/input_items"): Operation(summary="The input of a response, with what came before"),
    ("POST", "/v1/conversations"): Operation(
        summary="A conversation that responses are added to", body=ConversationBody, example={"metadata": {"of": "me"}}
    ),
    ("GET", "/v1/conversations/{id}"): Operation(summary="A conversation"),
    ("POST", "/v1/conversations/{id}"): Operation(
        summary="Other metadata for a conversation", body=ConversationUpdateBody, example={"metadata": {}}
    ),
    ("DELETE", "/v1/conversations/{id}"): Operation(summary="Forget a conversation"),
    ("GET", "/v1/conversations/{id}/items"): Operation(summary="The items of a conversation"),
    ("POST", "/v1/conversations/{id}/items"): Operation(
        summary="Add items to a conversation",
        body=ItemsBody,
        example={"items": [{"type": "message", "role": "user", "content": "Hello"}]},
    ),
    ("GET", "/v1/conversations/{id}/items/{item}"): Operation(summary="An item of a conversation"),
    ("DELETE", "/v1/conversations/{id}/items/{item}"): Operation(summary="Take an item out of a conversation"),
    ("POST", "/generate"): Operation(
        summary="SGLang's generation: text or ids, one or many",
        body=GenerateBody,
        example={"text": "One, two, three,", "sampling_params": {"max_new_tokens": 8, "temperature": 0}},
        media=_STREAMS,
    ),
    ("POST", "/abort_request"): Operation(
        summary="End a request by its name, or all of them", body=AbortBody, example={"rid": "mine", "abort_all": False}
    ),
    ("POST", "/flush_cache"): Operation(summary="Empty the prefix cache", body=FlushBody, example={}),
    ("POST", "/open_session"): Operation(
        summary="Open a session in SGLang's form",
        body=OpenNativeBody,
        example={"capacity_of_str_len": 1000, "streaming": True},
        answers="its name",
    ),
    ("POST", "/close_session"): Operation(
        summary="Close a session in SGLang's form", body=CloseNativeBody, example={"session_id": "walk"}, media=()
    ),
    ("GET", "/v1/sessions"): Operation(summary="The states of all sessions"),
    ("POST", "/v1/sessions"): Operation(summary="Open a session", body=OpenBody, example={"id": "walk"}, status=201),
    ("GET", "/v1/sessions/{id}"): Operation(summary="The state of a session"),
    ("DELETE", "/v1/sessions/{id}"): Operation(summary="Close a session"),
    ("POST", "/v1/sessions/{id}/append"): Operation(
        summary="Add to a session; prefilled at once", body=AppendBody, example={"text": "A long document."}
    ),
    ("POST", "/v1/sessions/{id}/generate"): Operation(
        summary="A turn of a session", body=TurnBody, example={"text": "In short:", "max_tokens": 32}, media=_STREAMS
    ),
    ("POST", "/v1/sessions/{id}/rewind"): Operation(
        summary="Cut a session back to a turn or a length", body=RewindBody, example={"turn": 1}
    ),
    ("POST", "/v1/sessions/{id}/fork"): Operation(
        summary="A copy of a session", body=ForkBody, example={"id": "another"}, status=201
    ),
    ("POST", "/tokenize"): Operation(
        summary="The tokens of a prompt or of messages", body=TokenizeBody, example={"prompt": "The sea was"}
    ),
    ("POST", "/detokenize"): Operation(
        summary="The text of tokens", body=DetokenizeBody, example={"tokens": [504, 3145]}
    ),
    ("GET", "/health"): Operation(summary="Healthy: steps are completed while there is work"),
    ("GET", "/health_generate"): Operation(summary="Healthy: a token was generated"),
    ("GET", "/ready"): Operation(summary="The model is loaded and requests are taken"),
    ("GET", "/version"): Operation(summary="The server's version"),
    ("GET", "/server_info"): Operation(summary="Settings, and what the engine counts"),
    ("GET", "/get_server_info"): Operation(summary="The same, by SGLang's older name"),
    ("GET", "/model_info"): Operation(summary="The model as SGLang describes one"),
    ("GET", "/get_model_info"): Operation(summary="The same, by SGLang's older name"),
    ("GET", "/metrics"): Operation(summary="What Prometheus reads", answers="text", media=("text/plain",)),
    ("GET", "/v1/pages"): Operation(summary="Who owns each page of the KV pools, and the sums of the same moment"),
    ("GET", "/live"): Operation(summary="A page to chat and to watch the engine", answers="text", media=("text/html",)),
    ("GET", "/live/{file}"): Operation(summary="A file of that page", answers="text", media=("text/javascript",)),
    ("GET", "/live/frames"): Operation(
        summary="What the engine is doing, four times a second", answers="text", media=("text/event-stream",)
    ),
    ("GET", "/openapi.json"): Operation(summary="This description"),
}


async def openapi(request: Request) -> Response:
    """GET /openapi.json."""
    return json_response(description(route for route in request.app.routes if isinstance(route, Route)))


def description(routes: Iterable[Route]) -> dict[str, Any]:
    """Every route, and what its body may hold."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        path = _PATH_PARAM.sub(r"{\1}", route.path)
        for method in sorted((route.methods or set()) - {"HEAD"}):
            paths.setdefault(path, {})[method.lower()] = _operation(method, path)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Roost", "version": roost.__version__},
        "paths": paths,
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],  # a server may ask for keys, or not
    }


def _operation(method: str, path: str) -> dict[str, Any]:
    about = OPERATIONS[method, path]
    params = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in _path_params(path)
    ]
    answer: dict[str, Any] = {"description": about.answers}
    if about.media:
        answer["content"] = {media: {} for media in about.media}
    operation: dict[str, Any] = {
        "summary": about.summary,
        "operationId": "_".join([method.lower(), *re.findall(r"\w+", path)]),
        "responses": {
            str(about.status): answer,
            "default": {"description": "an error", "content": {_JSON: {"schema": _ref(ErrorResponse)}}},
        },
    }
    if params:
        operation["parameters"] = params
    if about.body is not None:
        content = {_JSON: {"schema": _ref(about.body), "example": about.example}}
        operation["requestBody"] = {"required": about.body is not FlushBody, "content": content}
    return operation


def _path_params(path: str) -> Iterator[str]:
    yield from (found.group(1) for found in _PATH_PARAM.finditer(path))


def _ref(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": _REF.format(name=kind.__name__)}


def _schemas() -> dict[str, Any]:
    """The schemas of all bodies, by name; unsupported fields list the values that they may have."""
    bodies = [each.body for each in OPERATIONS.values() if each.body is not None]
    _, components = msgspec.json.schema_components([*bodies, ErrorResponse], ref_template=_REF)
    for kind, names in ALL_UNSUPPORTED.items():
        for name in names if kind.__name__ in components else ():
            allowed = [None, *NO_OP_VALUES.get(name, ())]
            components[kind.__name__]["properties"][name] = {"enum": allowed, "default": None}
    text = msgspec.json.encode(components).decode().replace(r"\\Z", "$")  # JSON Schema's patterns are JavaScript's
    schemas: dict[str, Any] = msgspec.json.decode(text)
    return schemas
