"""Sessions over HTTP: opened, listed, appended to, generated from, rewound, forked and closed under /v1/sessions.

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
from roost.server.answer_grammars import chat_form, openai_grammar, with_grammar
from roost.server.body_reader import read
from roost.server.dialects import OPENAI
from roost.server.generation import Generation, PendingOutput, Prompt, renamed, while_connected
from roost.server.inputs import SessionTurn, plain_messages, session_turn
from roost.server.keys import caller
from roost.server.models import check_model
from roost.server.responses import event_stream, finite, json_response, usage_json
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
from roost.server.state import ServerState


async def open_session(request: Request) -> Response:
    """POST /v1/sessions."""
    server: ServerState = request.app.state.server
    body = await read(request, OpenBody)
    server.check_ready()
    command = OpenSession(
        session_id=body.id or uuid4().hex,
        cache_salt=body.salt or "",
        ttl_ms=None if body.ttl_s is None else int(body.ttl_s * 1000),
        max_tokens=body.max_tokens,
        client=caller(request).name,
    )
    try:
        session = ServerSession(ClientSession(command.session_id), client=command.client)
        state = await open_in_engine(server, command, session)
    except RequestError as error:
        raise renamed(error, {"session_id": "id"}) from error
    return json_response(state_json(server, state), 201)


async def sessions(request: Request) -> Response:
    """GET /v1/sessions."""
    server: ServerState = request.app.state.server
    server.check_alive()
    server.close_expired()
    answer = await server.ask(GetSessions(client=caller(request).name))
    if not isinstance(answer, SessionStates):
        raise CapacityError(503, "the engine is not running")
    return json_response({"object": "list", "data": [state_json(server, state) for state in answer.sessions]})


async def session(request: Request) -> Response:
    """GET /v1/sessions/{id}."""
    server: ServerState = request.app.state.server
    server.check_alive()
    server.close_expired()
    command = GetSession(session_id=request.path_params["id"], client=caller(request).name)
    return json_response(state_json(server, await server.ask_state(command)))


async def close_session(request: Request) -> Response:
    """DELETE /v1/sessions/{id}."""
    server: ServerState = request.app.state.server
    server.check_alive()
    await close_in_engine(server, request.path_params["id"], caller(request).name)
    return json_response({"id": request.path_params["id"], "object": "session", "deleted": True})


async def rewind(request: Request) -> Response:
    """POST /v1/sessions/{id}/rewind."""
    server: ServerState = request.app.state.server
    body = await read(request, RewindBody)
    server.check_ready()
    if (body.turn is None) == (body.length is None):
        raise RequestError(400, "turn", "give exactly one of turn and length")
    async with server.lock_for_change(request, request.path_params["id"]) as lock:
        client, session_id = lock.session.key
        command = RewindSession(session_id=session_id, turn=body.turn, length=body.length, client=client)
        lock.apply = server.sessions.rewound(lock.session)
        state = await server.ask_state(command, lock)
    return json_response(state_json(server, state))


async def fork(request: Request) -> Response:
    """POST /v1/sessions/{id}/fork."""
    server: ServerState = request.app.state.server
    body = await read(request, ForkBody)
    server.check_ready()
    if body.turn is not None and body.length is not None:
        raise RequestError(400, "turn", "give at most one of turn and length")
    client, session_id = caller(request).name, request.path_params["id"]
    new_id = body.id or uuid4().hex
    command = ForkSession(session_id=session_id, new_id=new_id, turn=body.turn, length=body.length, client=client)
    fork = ServerSession(ClientSession(new_id), client=client)
    try:
        if body.turn is None and body.length is None:
            async with server.lock_for_change(request, session_id) as lock:
                state = await open_in_engine(server, command, fork, lock.session, lock)
        else:  # what is committed can be forked whoever has the session
            await server.learn_of(session_id, client)
            source = server.sessions.find(session_id, client)
            source.check_streaming()
            state = await open_in_engine(server, command, fork, source)
    except RequestError as error:
        raise renamed(error, {"new_id": "id"}) from error
    return json_response(state_json(server, state), 201)


async def append(request: Request) -> Response:
    """POST /v1/sessions/{id}/append."""
    server: ServerState = request.app.state.server
    body = await read(request, AppendBody)
    server.check_ready()
    _check_forms(body, needed=True)
    session_id = request.path_params["id"]
    options = Options(max_new_tokens=0, priority=body.priority or 0, timeout_s=body.timeout)
    async with session_turn(
        request, session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        tokens = await _input_tokens(turn, body, generates=False)
        answers = _SessionAnswers(turn, turn.prompt(f"append-{uuid4().hex}", tokens, options, _names(body)))
        (output,) = await while_connected(request, answers.generation.finish())
    finished = output.answer.finished
    assert finished is not None
    check_committed(finished)
    return json_response({"usage": _usage(finished), "session": await answers.state()})


async def generate(request: Request) -> Response:
    """POST /v1/sessions/{id}/generate."""
    server: ServerState = request.app.state.server
    body = await read(request, TurnBody)
    server.check_ready()
    check_model(server, body.model)
    refuse_unsupported(body)
    if body.stream_options is not None:
        raise RequestError(400, "stream_options", "is of no use here: the last event always has the usage")
    _check_forms(body, needed=False)
    options = replace(openai_options(body), logprobs=body.logprobs)
    grammar = openai_grammar(body)
    session_id = request.path_params["id"]
    async with session_turn(
        request, session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        has_plain = body.text is not None or body.input_ids is not None
        if turn.lock.turn.begins_answer(has_messages=body.messages is not None, has_plain=has_plain):
            form = await chat_form(request, None, grammar, options.timeout_s)  # the model may think first
            options = replace(options, grammar=form.grammar)
        else:
            options = await with_grammar(request, options, grammar)
        tokens, names = await _input_tokens(turn, body, generates=True), {**_names(body), "grammar": grammar.param}
        answers = _SessionAnswers(turn, turn.prompt(f"turn-{uuid4().hex}", tokens, options, names))
        if body.stream:
            return await event_stream(request, answers.chunks())
        (output,) = await while_connected(request, answers.generation.finish())
    return json_response(await answers.response(output))


async def open_in_engine(
    server: ServerState,
    command: OpenSession | ForkSession,
    session: ServerSession,
    source: ServerSession | None = None,
    lock: ChangeLock | None = None,
) -> SessionState:
    """Open a session in the engine, and here; one that has a source gets its history. A lock is on that.

    A session that the engine opens after its client was refused or has left is closed again.
    """
    server.close_expired()
    if server.sessions.needs_check:
        before = server.sessions.snapshot()
        answer = await server.ask(GetSessions())
        if isinstance(answer, SessionStates):
            server.sessions.forget_missing(before, {(state.client, state.session_id) for state in answer.sessions})
    opening = _PendingOpen(server, session, source)
    if lock is not None:
        lock.apply = opening.apply
    try:
        return await server.ask_state(command, lock or opening)
    except BaseException:
        opening.give_up()
        raise


async def close_in_engine(server: ServerState, session_id: str, client: str) -> None:
    """Close a client's session in the engine, and here; turns that wait for it are refused."""
    session = server.sessions.get(session_id, client)  # the engine knows best whether there is one
    closing = None if session is None else PendingClose(server.sessions, session)
    answer = await server.ask(CloseSession(session_id=session_id, client=client), closing)
    if isinstance(answer, Refused):
        raise refusal(answer)


class _PendingOpen:
    """An open or a fork on its way."""

    def __init__(self, server: ServerState, session: ServerSession, source: ServerSession | None) -> None:
        self._server = server
        self._session = session
        self._source = source
        self._is_awaited, self._is_open = True, False

    def give_up(self) -> None:
        """Nobody waits for it any more, though it may have been opened in this very moment."""
        self._is_awaited = False
        if self._is_open:
            self._server.close_session(*self._session.key)

    def on_sent(self) -> None:
        """There is no session yet."""

    def on_event(self, event: Event) -> None:
        """The engine has opened it, or refuses."""
        if isinstance(event, SessionState):
            self.apply(event)

    def apply(self, state: SessionState) -> None:
        """The engine has opened it: it is in the table now, or closed if nobody waits for it any more.

        Answers come in the order in which the engine works, so a source's history is here what it was there.
        """
        self._is_open = True
        if self._is_awaited:
            if self._source is not None and self._server.sessions.learns:
                self._server.sessions.on_add(*self._session.key)
                return  # it is learnt of when it is used: the engine may know more of the source
            if self._source is not None:
                history = self._source.client_session
                self._session.client_session = history.fork(self._session.id, state.length, state.turns)
            self._server.sessions.add(self._session)
        else:
            self._server.close_session(*self._session.key)


def state_json(server: ServerState, state: SessionState) -> dict[str, Any]:
    """The state of a session, as clients read it."""
    session = server.sessions.get(state.session_id, state.client)
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
    messages = None if body.messages is None else await plain_messages(turn.server, body.messages)
    return await turn.input_tokens(text=body.text, ids=body.input_ids, messages=messages, generates=generates)


def _names(body: AppendBody | TurnBody) -> dict[str, str]:
    """The client's names of the engine's parameters."""
    given = "messages" if body.messages is not None else "input_ids" if body.input_ids is not None else "text"
    return {**OPENAI.names, "tokens": given}


def _usage(finished: Finished) -> dict[str, Any]:
    return usage_json(**asdict(finished.usage))


class _SessionAnswers:
    """The answer to a turn, whole or in chunks."""

    def __init__(self, turn: SessionTurn, prompt: Prompt) -> None:
        self._server = turn.server
        self._prompt = prompt
        self._client, self._session_id = turn.lock.session.key
        self.generation = Generation(turn.server.engine, turn.server.language, turn.server.metrics, [prompt])

    async def state(self) -> dict[str, Any] | None:
        """The session's state now; None if it is gone or the engine is silent: the turn is answered all the same."""
        try:
            answer = await self._server.ask(GetSession(session_id=self._session_id, client=self._client))
        except CapacityError:
            return None
        return state_json(self._server, answer) if isinstance(answer, SessionState) else None

    async def response(self, output: PendingOutput) -> dict[str, Any]:
        """The answer to a request that does not stream."""
        answer = output.answer
        assert answer.finished is not None
        chunk = self._chunk(answer.text, answer.tokens, answer.logprobs)
        return {**chunk, **await self._end(answer.finished)}

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        """The pieces of a stream; the last one says how it ended."""
        async with aclosing(self.generation.pieces()) as pieces:
            async for _, piece in pieces:
                if piece.begun is not None:
                    continue
                chunk = self._chunk(piece.text, list(piece.tokens), list(piece.logprobs))
                if piece.finished is not None:
                    yield {**chunk, **await self._end(piece.finished)}
                else:
                    yield {**chunk, "finish_reason": None}

    def _chunk(self, text: str, tokens: list[int], logprobs: list[TokenLogprob]) -> dict[str, Any]:
        chunk: dict[str, Any] = {
            "id": self._prompt.request_id,
            "object": "session.turn",
            "text": text,
            "output_ids": tokens,
        }
        if self._prompt.options.logprobs is not None:
            chunk["logprobs"] = [
                {
                    "logprob": finite(entry.logprob),
                    "top": [[token, finite(value)] for token, value in entry.top_logprobs],
                }
                for entry in logprobs
            ]
        return chunk

    async def _end(self, finished: Finished) -> dict[str, Any]:
        return {
            "finish_reason": finished.reason,
            "matched": finished.matched,
            "usage": _usage(finished),
            "spec": as_json(finished.spec),
            "session": await self.state(),
        }
