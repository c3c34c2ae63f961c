"""SGLang's sessions: opened and closed at its endpoints, used by /generate with session_params.

A streaming session is the engine's: append only, its KV stays with it. One that does not stream consists of the tokens
of its ended requests, kept by the server; continuing one, from any of its tokens, is a plain request, whose KV is found
in the prefix cache. What is refused leaves the session as it is. Called by the app's routes and by /generate.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.front.session import ClientSession
from roost.messages import OpenSession
from roost.sched.sessions import TTL_MS_MAX
from roost.server.body_reader import read
from roost.server.generation import Prompt
from roost.server.inputs import session_turn
from roost.server.keys import caller
from roost.server.request_history import RequestHistory, RunningRequest
from roost.server.responses import json_response
from roost.server.schema import CloseNativeBody, GenerateBody, OpenNativeBody, SessionParams
from roost.server.session_table import ServerSession
from roost.server.sessions import close_in_engine, open_in_engine
from roost.server.state import ServerState


async def open_session(request: Request) -> Response:
    """POST /open_session."""
    server: ServerState = request.app.state.server
    body = await read(request, OpenNativeBody)
    server.check_ready()
    if body.capacity_of_str_len < 0:
        raise RequestError(400, "capacity_of_str_len", f"must be at least 0, got {body.capacity_of_str_len}")
    name, streams = body.session_id or uuid4().hex, bool(body.streaming)
    ttl_ms = None if body.timeout is None else int(body.timeout * 1000)
    if not streams:
        ttl_ms = TTL_MS_MAX  # the engine does not see it being used: the server keeps its time
    said = {"given": body.capacity_of_str_len, "effect": "none: a session grows as it is used, up to its limits"}
    notes = {"capacity_of_str_len": said, "streaming": streams}
    client = caller(request).name
    timeout_s = body.timeout if body.timeout is not None else server.engine.limits_of(client).session_ttl_s
    history = None if streams else RequestHistory(timeout_s)
    session = ServerSession(ClientSession(name), client=client, notes=notes, history=history)
    try:
        command = OpenSession(session_id=name, ttl_ms=ttl_ms, client=client, journaled=streams)
        await open_in_engine(server, command, session)
    except RequestError as error:
        raise RequestError(400 if error.status == 409 else error.status, error.param, error.reason) from error
    return json_response(name)


async def close_session(request: Request) -> Response:
    """POST /close_session."""
    server: ServerState = request.app.state.server
    body = await read(request, CloseNativeBody)
    server.check_alive()
    await close_in_engine(server, body.session_id, caller(request).name)
    return Response(status_code=200)


def one_input(body: GenerateBody) -> tuple[str | None, list[int] | None]:
    """The text, or the ids, that a turn is given."""
    if (body.text is None) == (body.input_ids is None):
        raise RequestError(400, "text", "give either text or input_ids")
    if isinstance(body.text, list):
        raise RequestError(400, "text", "must be one text: a turn of a session has one prompt")
    if body.input_ids is not None and not all(type(each) is int for each in body.input_ids):
        raise RequestError(400, "input_ids", "must be one list of token ids: a turn of a session has one prompt")
    if isinstance(body.sampling_params, list):
        raise RequestError(400, "sampling_params", "must be an object: a turn of a session has one prompt")
    return body.text, body.input_ids


@asynccontextmanager
async def session_prompt(
    request: Request, params: SessionParams, text: str | None, ids: list[int] | None, prompt: Prompt
) -> AsyncIterator[Prompt]:
    """The prompt of a turn, with its tokens; a streaming session is locked meanwhile."""
    server: ServerState = request.app.state.server
    if prompt.options.n != 1:
        raise RequestError(400, "n", f"must be 1: a turn of a session has one output, got {prompt.options.n}")
    server.close_expired()
    await server.learn_of(params.id, prompt.client)
    history = server.sessions.find(params.id, prompt.client).history
    if history is not None:
        new = ids if ids is not None else await _encoded(server, text or "")
        yield _continuing(server, history, params, new, prompt)
        return
    _check_appends(params)
    async with session_turn(request, params.id, timeout_s=prompt.options.timeout_s) as turn:
        if ids is not None and turn.length_before:
            ids = _without_bos(server, ids)
        tokens = await turn.input_tokens(text=text, ids=ids)
        yield turn.prompt(prompt.request_id, tokens, prompt.options, prompt.names)


def _check_appends(params: SessionParams) -> None:
    """Refuse what a streaming session cannot do."""
    edits = {
        "offset": params.offset,
        "replace": params.replace,
        "drop_previous_output": params.drop_previous_output,
    }
    for name, value in edits.items():
        if value:
            reason = "is not for a streaming session, which is only appended to; POST /v1/sessions/{id}/rewind cuts it"
            raise RequestError(400, f"session_params.{name}", reason)


def _continuing(
    server: ServerState, history: RequestHistory, params: SessionParams, new: list[Any], prompt: Prompt
) -> Prompt:
    """The prompt of a request that continues an ended one, or begins a new branch."""
    request_id, replaces = prompt.request_id, bool(params.replace)
    before: tuple[int, ...] = ()
    parent = None
    if params.rid:
        parent = history.number_of(params.rid, may_run=replaces)
        before = history.find(params.rid, with_output=not params.drop_previous_output, may_run=replaces)
        before, new = before[: params.offset or None], _without_bos(server, new)
    tokens = (*before, *new)
    server.check_len(tokens, prompt.names["tokens"])
    abort = partial(server.engine.abort_where, lambda other: other == request_id, prompt.client)
    request = RunningRequest(history, request_id, tokens, parent=parent, replaces=replaces, abort=abort)
    return replace(prompt, tokens=tokens, observer=request)


async def _encoded(server: ServerState, text: str) -> list[int]:
    (tokens,) = await server.prompt_tokens(text, "text")
    return list(tokens)


def _without_bos(server: ServerState, ids: list[Any]) -> list[int]:
    """Ids without the one that begins a text."""
    bos_id = server.language.tokenizer.bos_id
    return ids[1:] if bos_id is not None and ids[:1] == [bos_id] else ids
