"""OpenAI's Responses API over HTTP: responses, their input items, and conversations.

A response can be waited for, streamed, or made in the background and read later. What is stored is found by its id and
the caller's key alone. WebSockets are `server.response_socket`'s. Called by the app's routes.
"""

import asyncio
import time
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import CapacityError, RequestError
from roost.server.body_reader import read
from roost.server.detached import detached
from roost.server.event_log import EventLog
from roost.server.generation import while_connected
from roost.server.keys import caller
from roost.server.response_input import input_items, input_messages
from roost.server.response_schema import (
    ConversationBody,
    ConversationUpdateBody,
    InputTokensBody,
    ItemsBody,
    ResponseBody,
    check_include,
)
from roost.server.response_store import StoredConversation, StoredResponse, page_of
from roost.server.response_turns import ResponseTurn, check_free, count_input, new_id, prepare
from roost.server.responses import event_stream, exhaust, json_response
from roost.server.state import ServerState

ITEMS_MAX = 20  # of a conversation, in one request
_PAGE_MAX = 100
_PAGE_DEFAULT = 20


async def create(request: Request) -> Response:
    """POST /v1/responses."""
    body = await read(request, ResponseBody)
    if body.background:
        return await _create_in_background(request, body)
    turn = await prepare(request, body)
    if body.stream:
        return await event_stream(request, turn.events(), named=True)
    await while_connected(request, exhaust(turn.events()))
    return json_response(turn.stream.response)


async def retrieve(request: Request) -> Response:
    """GET /v1/responses/{id}."""
    query = request.query_params
    _check_query(request, "stream", "include", "include[]", "starting_after", "include_obfuscation")
    if query.get("include_obfuscation", "false") != "false":
        raise RequestError(400, "include_obfuscation", "must be false: events are not padded here")
    found, is_streamed = _response(request), query.get("stream", "false")
    if is_streamed not in ("true", "false"):
        raise RequestError(400, "stream", "must be true or false")
    if is_streamed == "false":
        if "starting_after" in query:
            raise RequestError(400, "starting_after", "needs stream: true")
        return json_response(found.response)
    if found.log is None:
        raise RequestError(400, "stream", "must be false: the response was not made with background and stream")
    after = _number(request, "starting_after", 0, len(found.log.events) - 1, absent=-1)
    return await event_stream(request, found.log.read(after), named=True)


async def delete(request: Request) -> Response:
    """DELETE /v1/responses/{id}."""
    server: ServerState = request.app.state.server
    found = _response(request)
    server.responses.delete(found)
    return json_response({"id": found.id, "object": "response", "deleted": True})


async def cancel(request: Request) -> Response:
    """POST /v1/responses/{id}/cancel."""
    found = _response(request)
    if not found.response["background"]:
        raise RequestError(400, "response_id", "was not made in the background: only such a response can be cancelled")
    if found.task is not None:
        found.task.cancel()
        await asyncio.wait({found.task})
    return json_response(found.response)


async def list_input_items(request: Request) -> Response:
    """GET /v1/responses/{id}/input_items."""
    found = _response(request)
    before = found.said.before.all_items() if found.said.before is not None else []
    return json_response(_page(request, [*before, *found.input_items]))


async def input_tokens(request: Request) -> Response:
    """POST /v1/responses/input_tokens."""
    body = await read(request, InputTokensBody)
    return json_response({"object": "response.input_tokens", "input_tokens": await count_input(request, body)})


async def create_conversation(request: Request) -> Response:
    """POST /v1/conversations."""
    server: ServerState = request.app.state.server
    body = await read(request, ConversationBody)
    server.check_ready()
    conversation = StoredConversation(
        id=new_id("conv"),
        client=caller(request).name,
        created_at=int(time.time()),
        metadata=body.metadata or {},
        items=_new_items(server, body.items or []),
    )
    server.responses.put(conversation)
    return json_response(conversation.shown)


async def conversation(request: Request) -> Response:
    """GET /v1/conversations/{id}."""
    return json_response(_conversation(request).shown)


async def update_conversation(request: Request) -> Response:
    """POST /v1/conversations/{id}."""
    body = await read(request, ConversationUpdateBody)
    found = _conversation(request)
    found.metadata = body.metadata or {}
    return json_response(found.shown)


async def delete_conversation(request: Request) -> Response:
    """DELETE /v1/conversations/{id}."""
    server: ServerState = request.app.state.server
    found = _conversation(request)
    server.responses.delete(found)
    return json_response({"id": found.id, "object": "conversation.deleted", "deleted": True})


async def list_items(request: Request) -> Response:
    """GET /v1/conversations/{id}/items."""
    return json_response(_page(request, _conversation(request).items))


async def add_items(request: Request) -> Response:
    """POST /v1/conversations/{id}/items."""
    server: ServerState = request.app.state.server
    body = await read(request, ItemsBody)
    check_include(body.include)
    found = _conversation(request)
    new = _new_items(server, body.items)
    found.items += new
    server.responses.put(found)
    return json_response(page_of(new, after=None, limit=len(new), order="asc"))


async def item(request: Request) -> Response:
    """GET /v1/conversations/{id}/items/{item}."""
    found = _conversation(request)
    return json_response(found.items[_place(found, request.path_params["item"])])


async def delete_item(request: Request) -> Response:
    """DELETE /v1/conversations/{id}/items/{item}."""
    server: ServerState = request.app.state.server
    found = _conversation(request)
    del found.items[_place(found, request.path_params["item"])]
    server.responses.put(found)
    return json_response(found.shown)


async def _create_in_background(request: Request, body: ResponseBody) -> Response:
    """Start a response that nobody waits for; where it is streamed, its reader may leave and come again."""
    turn = replace(await prepare(detached(request), body), log=EventLog() if body.stream else None)
    server: ServerState = request.app.state.server
    check_free(turn.before.conversation)
    begun = turn.stream.queued()
    if turn.log is not None:
        turn.log.add(*begun)
    stored = turn.stored()
    server.responses.put(stored)
    stored.task = server.follow(asyncio.create_task(_run_in_background(server, turn, stored)))
    await asyncio.sleep(0)  # from now on it can be cancelled, and says so
    if turn.log is None:
        return json_response(stored.response)
    return await event_stream(request, turn.log.read(), named=True)


async def _run_in_background(server: ServerState, turn: ResponseTurn, stored: StoredResponse) -> None:
    """Run a response to its end, and keep how it ended."""
    error: dict[str, Any] | None = None
    status = "failed"
    try:
        async with aclosing(turn.events()) as events:
            async for event in events:
                stored.response = event.get("response", stored.response)
                if turn.log is not None:
                    turn.log.add(event)
        status = turn.stream.response["status"]
    except asyncio.CancelledError:
        status = "cancelled"
    except (RequestError, CapacityError) as failure:
        error = {"code": "server_error", "message": str(failure)}
    if status in ("failed", "cancelled") and turn.stream.response["status"] not in ("failed", "cancelled"):
        last = turn.stream.end(status=status, incomplete_reason=None, error=error, usage=None)
        if turn.log is not None:
            turn.log.add(*last)
    if turn.log is not None:
        turn.log.close()
    stored.task = None
    if server.responses.has(stored.id, stored.client) and status in ("failed", "cancelled"):
        stored.response = turn.stream.response


def _response(request: Request) -> StoredResponse:
    server: ServerState = request.app.state.server
    server.check_alive()
    return server.responses.response(request.path_params["id"], caller(request).name)


def _conversation(request: Request) -> StoredConversation:
    server: ServerState = request.app.state.server
    server.check_alive()
    return server.responses.conversation(request.path_params["id"], caller(request).name)


def _new_items(server: ServerState, given: list[dict[str, Any]]) -> list[dict[str, Any]]:
    if len(given) > ITEMS_MAX:
        raise RequestError(400, "items", f"must be at most {ITEMS_MAX}, got {len(given)}")
    items = input_items(given, new_id, path="items")
    input_messages(items, path="items")  # refuses what could not be said
    server.responses.check_size(items, "items")
    return items


def _place(found: StoredConversation, id: str) -> int:
    for place, each in enumerate(found.items):
        if each["id"] == id:
            return place
    raise RequestError(404, "item_id", f"there is no item {id[:100]!r} in this conversation")


def _page(request: Request, items: list[dict[str, Any]]) -> dict[str, Any]:
    """The page of a list that a query asks for."""
    query = request.query_params
    _check_query(request, "after", "limit", "order", "include", "include[]")
    order = query.get("order", "desc")
    if order not in ("asc", "desc"):
        raise RequestError(400, "order", "must be asc or desc")
    limit = _number(request, "limit", 1, _PAGE_MAX, absent=_PAGE_DEFAULT)
    return page_of(items, after=query.get("after"), limit=limit, order=order)


def _number(request: Request, name: str, least: int, most: int, *, absent: int) -> int:
    """A number of a query."""
    given = request.query_params.get(name)
    if given is None:
        return absent
    is_number = given.isascii() and given.isdigit() and len(given) <= len(str(most))
    if not is_number or not least <= int(given) <= most:
        raise RequestError(400, name, f"must be in [{least}, {most}], got {given[:100]!r}")
    return int(given)


def _check_query(request: Request, *known: str) -> None:
    """Refuse parameters of a query that nothing is done about."""
    for name in request.query_params:
        if name not in known:
            raise RequestError(400, name[:100], "is not a parameter of this endpoint")
    check_include([*request.query_params.getlist("include"), *request.query_params.getlist("include[]")])
