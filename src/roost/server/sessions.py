"""Sessions over HTTP: opened, looked at, fed, asked, rewound, forked and closed under /v1/sessions.

An append is prefilled at once and generates nothing; a turn whose client leaves is rolled back. GET changes nothing.
Called by the app's routes.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict, replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import CapacityError, RequestError
from roost.front.answer import refusal
from roost.front.options import Options
from roost.front.session import ClientSession, check_committed
from roost.front.speculation import as_json
from roost.messages import (
    CloseSession,
    Event,
    Finished,
    ForkSession,
    GetSession,
    GetSessions,
    OpenSession,
    Refused,
    RewindSession,
    SessionState,
    SessionStates,
    TokenLogprob,
)
from roost.server.body import read
from roost.server.context import Desk, events, finite, json_response, usage_json
from roost.server.dialects import OPENAI
from roost.server.generation import Generation, Output, Prompt, renamed, while_connected
from roost.server.inputs import SessionTurn, plain_messages, session_turn
from roost.server.keys import caller
from roost.server.models import check_model
from roost.server.schema import (
    AppendBody,
    ForkBody,
    OpenBody,
    RewindBody,
    TurnBody,
    openai_options,
    refuse_unsupported,
)
from roost.server.session_table import ChangeLock, PendingClose, ServerSession


async def open_session(request: Request) -> Response:
    """POST /v1/sessions."""
    desk: Desk = request.app.state.desk
    body = await read(request, OpenBody)
    desk.check_ready()
    command = OpenSession(
        session_id=body.id or uuid4().hex,
        cache_salt=body.salt or "",
        ttl_ms=None if body.ttl_s is None else int(body.ttl_s * 1000),
        max_tokens=body.max_tokens,
        client=caller(request).name,
    )
    try:
        session = ServerSession(ClientSession(command.session_id), client=command.client)
        state = await open_in_engine(desk, command, session)
    except RequestError as error:
        raise renamed(error, {"session_id": "id"}) from error
    return json_response(state_json(desk, state), 201)


async def sessions(request: Request) -> Response:
    """GET /v1/sessions."""
    desk: Desk = request.app.state.desk
    desk.check_alive()
    desk.close_expired()
    answer = await desk.ask(GetSessions(client=caller(request).name))
    if not isinstance(answer, SessionStates):
        raise CapacityError(503, "the engine is not running")
    return json_response({"object": "list", "data": [state_json(desk, state) for state in answer.sessions]})


async def session(request: Request) -> Response:
    """GET /v1/sessions/{id}."""
    desk: Desk = request.app.state.desk
    desk.check_alive()
    desk.close_expired()
    command = GetSession(session_id=request.path_params["id"], client=caller(request).name)
    return json_response(state_json(desk, await desk.ask_state(command)))


async def close_session(request: Request) -> Response:
    """DELETE /v1/sessions/{id}."""
    desk: Desk = request.app.state.desk
    desk.check_alive()
    await close_in_engine(desk, request.path_params["id"], caller(request).name)
    return json_response({"id": request.path_params["id"], "object": "session", "deleted": True})


async def rewind(request: Request) -> Response:
    """POST /v1/sessions/{id}/rewind."""
    desk: Desk = request.app.state.desk
    body = await read(request, RewindBody)
    desk.check_ready()
    if (body.turn is None) == (body.length is None):
        raise RequestError(400, "turn", "give exactly one of turn and length")
    async with desk.lock_for_change(request, request.path_params["id"]) as lock:
        client, session_id = lock.session.key
        command = RewindSession(session_id=session_id, turn=body.turn, length=body.length, client=client)
        lock.apply = lock.session.client_session.rewind
        state = await desk.ask_state(command, lock)
    return json_response(state_json(desk, state))


async def fork(request: Request) -> Response:
    """POST /v1/sessions/{id}/fork."""
    desk: Desk = request.app.state.desk
    body = await read(request, ForkBody)
    desk.check_ready()
    async with desk.lock_for_change(request, request.path_params["id"]) as lock:
        source = lock.session
        command = ForkSession(session_id=source.id, new_id=body.id or uuid4().hex, client=source.client)
        fork = ServerSession(source.client_session.fork(command.new_id), client=source.client)
        try:
            state = await open_in_engine(desk, command, fork, lock)
        except RequestError as error:
            raise renamed(error, {"new_id": "id"}) from error
    return json_response(state_json(desk, state), 201)


async def append(request: Request) -> Response:
    """POST /v1/sessions/{id}/append."""
    desk: Desk = request.app.state.desk
    body = await read(request, AppendBody)
    desk.check_ready()
    _check_forms(body, needed=True)
    session_id = request.path_params["id"]
    options = Options(max_new_tokens=0, priority=body.priority or 0, timeout_s=body.timeout)
    async with session_turn(
        request, session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        tokens = await _input_tokens(turn, body, generates=False)
        answers = _Answers(turn, turn.prompt(f"append-{uuid4().hex}", tokens, options, _names(body)))
        (output,) = await while_connected(request, answers.generation.finish())
    finished = output.answer.finished
    assert finished is not None
    check_committed(finished)
    return json_response({"usage": _usage(finished), "session": await answers.state()})


async def generate(request: Request) -> Response:
    """POST /v1/sessions/{id}/generate."""
    desk: Desk = request.app.state.desk
    body = await read(request, TurnBody)
    desk.check_ready()
    check_model(desk, body.model)
    refuse_unsupported(body)
    if body.stream_options is not None:
        raise RequestError(400, "stream_options", "is of no use here: the last event always has the usage")
    _check_forms(body, needed=False)
    options = replace(openai_options(body), logprobs=body.logprobs)
    session_id = request.path_params["id"]
    async with session_turn(
        request, session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        tokens = await _input_tokens(turn, body, generates=True)
        answers = _Answers(turn, turn.prompt(f"turn-{uuid4().hex}", tokens, options, _names(body)))
        if body.stream:
            return await events(request, answers.chunks())
        (output,) = await while_connected(request, answers.generation.finish())
    return json_response(await answers.whole(output))


async def open_in_engine(
    desk: Desk, command: OpenSession | ForkSession, session: ServerSession, source: ChangeLock | None = None
) -> SessionState:
    """Open a session in the engine, and here; a fork's source is locked meanwhile.

    One that the engine opens after its opener was told that it did not, or has left, is closed again.
    """
    desk.close_expired()
    if desk.sessions.needs_check:
        before = desk.sessions.snapshot()
        answer = await desk.ask(GetSessions())
        if isinstance(answer, SessionStates):
            desk.sessions.forget_missing(before, {(state.client, state.session_id) for state in answer.sessions})
    opening = _PendingOpen(desk, session)
    if source is not None:
        source.apply = opening.apply
    try:
        return await desk.ask_state(command, source or opening)
    finally:
        opening.is_awaited = False


async def close_in_engine(desk: Desk, session_id: str, client: str) -> None:
    """Close a client's session in the engine, and here; turns that wait for it are refused."""
    session = desk.sessions.get(session_id, client)  # the engine knows best whether there is one
    closing = None if session is None else PendingClose(desk.sessions, session)
    answer = await desk.ask(CloseSession(session_id=session_id, client=client), closing)
    if isinstance(answer, Refused):
        raise refusal(answer)


class _PendingOpen:
    """An open or a fork on its way."""

    def __init__(self, desk: Desk, session: ServerSession) -> None:
        self._desk = desk
        self._session = session
        self.is_awaited = True

    def on_sent(self) -> None:
        """There is no session yet."""

    def on_event(self, event: Event) -> None:
        """The engine has opened it, or refuses."""
        if isinstance(event, SessionState):
            self.apply(event)

    def apply(self, state: SessionState) -> None:
        """The engine has opened it: it is in the table now, or closed if nobody waits for it any more."""
        if self.is_awaited:
            self._desk.sessions.add(self._session)
        else:
            client, session_id = self._session.key
            self._desk.engine.tell(CloseSession(session_id=session_id, client=client))


def state_json(desk: Desk, state: SessionState) -> dict[str, Any]:
    """How a session stands, as clients read it."""
    session = desk.sessions.get(state.session_id, state.client)
    ttl_s, idle_s = None if state.ttl_ms is None else state.ttl_ms / 1000, state.idle_ms / 1000
    if session is not None and session.history is not None:
        ttl_s, idle_s = session.history.timeout_s, session.history.idle_s
    return {
        "id": state.session_id,
        "object": "session",
        "length": state.length,
        "resident": state.resident,
        "turns": state.turns,
        "state": state.state,
        "idle_s": idle_s,
        "limits": {"ttl_s": ttl_s, "max_tokens": state.max_tokens},
        "salt": state.cache_salt,
        **({} if session is None else session.notes),
    }


def _check_forms(body: AppendBody | TurnBody, *, needed: bool) -> None:
    forms = {"text": body.text, "input_ids": body.input_ids, "messages": body.messages}
    given = [name for name, value in forms.items() if value is not None]
    if len(given) > 1 or (needed and not given):
        name = given[1] if given else "text"
        raise RequestError(400, name, f"give {'exactly' if needed else 'at most'} one of text, input_ids and messages")


async def _input_tokens(turn: SessionTurn, body: AppendBody | TurnBody, *, generates: bool) -> tuple[int, ...]:
    messages = None if body.messages is None else await plain_messages(turn.desk, body.messages)
    return await turn.input_tokens(text=body.text, ids=body.input_ids, messages=messages, generates=generates)


def _names(body: AppendBody | TurnBody) -> dict[str, str]:
    """The client's names of the engine's parameters."""
    given = "messages" if body.messages is not None else "input_ids" if body.input_ids is not None else "text"
    return {**OPENAI.names, "tokens": given}


def _usage(finished: Finished) -> dict[str, Any]:
    return usage_json(**asdict(finished.usage))


class _Answers:
    """What goes back for a turn."""

    def __init__(self, turn: SessionTurn, prompt: Prompt) -> None:
        self._desk = turn.desk
        self._prompt = prompt
        self._client, self._session_id = turn.lock.session.key
        self.generation = Generation(turn.desk.engine, turn.desk.language, turn.desk.metrics, [prompt])

    async def state(self) -> dict[str, Any] | None:
        """How the session stands now; None if it is gone already, or nobody says: the turn's own answer comes first."""
        try:
            answer = await self._desk.ask(GetSession(session_id=self._session_id, client=self._client))
        except CapacityError:
            return None
        return state_json(self._desk, answer) if isinstance(answer, SessionState) else None

    async def whole(self, output: Output) -> dict[str, Any]:
        """The answer that is not streamed."""
        answer = output.answer
        assert answer.finished is not None
        said = self._said(answer.text, answer.tokens, answer.logprobs)
        return {**said, **await self._end(answer.finished)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of a stream; the last one says how it ended."""
        async with aclosing(self.generation.pieces()) as pieces:
            async for _, piece in pieces:
                said = self._said(piece.text, list(piece.tokens), list(piece.logprobs))
                if piece.finished is not None:
                    yield {**said, **await self._end(piece.finished)}
                else:
                    yield {**said, "finish_reason": None}

    def _said(self, text: str, tokens: list[int], logprobs: list[TokenLogprob]) -> dict[str, Any]:
        said: dict[str, Any] = {
            "id": self._prompt.request_id,
            "object": "session.turn",
            "text": text,
            "output_ids": tokens,
        }
        if self._prompt.options.logprobs is not None:
            said["logprobs"] = [
                {
                    "logprob": finite(entry.logprob),
                    "top": [[token, finite(value)] for token, value in entry.top_logprobs],
                }
                for entry in logprobs
            ]
        return said

    async def _end(self, finished: Finished) -> dict[str, Any]:
        return {
            "finish_reason": finished.reason,
            "matched": finished.matched,
            "usage": _usage(finished),
            "spec": as_json(finished.spec),
            "session": await self.state(),
        }
