"""Response turns: from a body of the Responses API to the turn of a session, and its events.

A response is a turn: what it follows says in which session that lies, and the whole conversation which tokens it has.
The same code runs it for a request that waits, a stream, a WebSocket and the background; nothing is told to the client
before the engine has admitted the turn, so that a refusal is an answer of its own. Called by the Responses endpoints.
"""

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, aclosing, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from starlette.requests import Request

from roost.errors import CapacityError, RequestError
from roost.front.answer import Piece
from roost.front.options import Options
from roost.server.answer_grammars import chat_form
from roost.server.conversations import (
    Conversation,
    ConversationTurn,
    conversation_turn,
    events_of,
    label_of,
    read_conversation,
)
from roost.server.event_log import EventLog
from roost.server.generation import Generation, PendingOutput
from roost.server.inputs import check_num_messages
from roost.server.keys import caller
from roost.server.models import check_model
from roost.server.openai_answers import scored_tokens
from roost.server.response_events import ResponseStream, usage_of
from roost.server.response_input import (
    called_as,
    input_items,
    input_messages,
    read_response_tools,
    renamed_tool_error,
)
from roost.server.response_schema import (
    RESPONSE_NAMES,
    InputTokensBody,
    ResponseBody,
    TurnFields,
    check_response,
    check_turn,
    response_echo,
    response_grammar,
    response_options,
)
from roost.server.response_store import Item, ResponseStore, Said, StoredConversation, StoredResponse
from roost.server.responses import error_of
from roost.server.state import ServerState, renamed_to
from roost.tools.answer_form import AnswerForm
from roost.tools.definitions import ToolRequest
from roost.tools.events import Reasoning, ToolEvent


def new_id(prefix: str) -> str:
    """An id that nobody can guess."""
    return f"{prefix}_{uuid4().hex}{uuid4().hex[:18]}"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Before:
    """What a response follows."""

    said: Said | None = None
    session_id: str | None = None
    conversation: StoredConversation | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ResponseTurn:
    """One response, ready to be run."""

    request: Request
    body: ResponseBody
    store: ResponseStore | None  # where it is kept; None: nowhere
    stream: ResponseStream
    before: Before
    items: list[Item]  # its own input
    tokens: Conversation
    options: Options
    form: AnswerForm | None
    label: str
    log: EventLog | None = None  # where its events are kept, if it is made in the background and streamed

    async def events(self) -> AsyncGenerator[dict[str, Any], None]:
        """Its events, from the first, which comes when the turn is admitted, to the last."""
        has_begun = False
        with _taken(self.before.conversation):
            try:
                async with aclosing(self._generated()) as events:
                    async for event in events:
                        has_begun = True
                        yield event
            except (RequestError, CapacityError) as error:
                if not has_begun:
                    raise
                code = "rate_limit_exceeded" if error.status == 429 else "server_error"
                failed = {"code": code, "message": error_of(error)["error"]["message"]}
                for event in self.stream.end(status="failed", incomplete_reason=None, error=failed, usage=None):
                    yield event

    async def _generated(self) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a turn that the engine takes."""
        server: ServerState = self.request.app.state.server
        async with self._turn() as turn:
            generation = Generation(server.engine, server.language, server.metrics, [turn.prompt])
            (output,) = generation.outputs
            num_thought = 0
            async with aclosing(generation.pieces()) as pieces:
                async for _, piece in pieces:
                    found = events_of(output.answer, piece)
                    num_thought += _num_reasoning(found, piece)
                    events = self.stream.begin() if piece.begun is not None else []
                    events += self.stream.feed(found, self._logprobs(server, piece))
                    if piece.finished is not None:
                        events += self._end(output, num_thought)
                        self._keep(turn)
                    for event in events:
                        yield event

    def _turn(self) -> AbstractAsyncContextManager[ConversationTurn]:
        return conversation_turn(
            self.request,
            self.tokens,
            self.options,
            request_id=self.stream.id,
            names={**RESPONSE_NAMES, "grammar": response_grammar(self.body).param},
            form=self.form,
            after=self.before.session_id,
            label=self.label,
            needs_session=self._is_followed,
            is_kept=self._is_followed or self.before.session_id is None,
        )

    @property
    def _is_followed(self) -> bool:
        """Whether something may follow it by its name, or that of its conversation."""
        return self.store is not None or self.before.conversation is not None

    def _logprobs(self, server: ServerState, piece: Piece) -> list[dict[str, Any]]:
        if self.options.logprobs is None:
            return []
        return scored_tokens(server.language, piece.tokens, piece.logprobs)

    def _end(self, output: PendingOutput, num_thought: int) -> list[dict[str, Any]]:
        finished = output.answer.finished
        assert finished is not None
        usage = usage_of(
            prompt_tokens=finished.usage.prompt_tokens,
            cached_tokens=finished.usage.cached_tokens,
            completion_tokens=finished.usage.completion_tokens,
            reasoning_tokens=num_thought,
        )
        if finished.reason == "stop" or not self.body.generates:
            return self.stream.end(status="completed", incomplete_reason=None, error=None, usage=usage)
        if finished.reason == "length":
            return self.stream.end(status="incomplete", incomplete_reason="max_output_tokens", error=None, usage=usage)
        return self.stream.end(status="cancelled", incomplete_reason=None, error=None, usage=usage)

    def _keep(self, turn: ConversationTurn) -> None:
        """Store it, before the client hears that it is complete."""
        response, conversation = self.stream.response, self.before.conversation
        if response["status"] not in ("completed", "incomplete"):
            return
        server: ServerState = self.request.app.state.server
        if conversation is not None and server.responses.has(conversation.id, conversation.client):
            conversation.items += [*self.items, *response["output"]]
            conversation.session_id = turn.session_id
            server.responses.put(conversation)
        if self.store is not None:
            self.store.put(self.stored(turn))

    def stored(self, turn: ConversationTurn | None = None) -> StoredResponse:
        """It as it is kept, with the session in which it was made."""
        return StoredResponse(
            id=self.stream.id,
            client=caller(self.request).name,
            response=self.stream.response,
            input_items=self.items,
            said=Said(before=self.before.said, items=(*self.items, *self.stream.response["output"])),
            session_id=None if turn is None else turn.session_id,
            log=self.log,
        )


def check_free(conversation: StoredConversation | None) -> None:
    """Refuse a conversation that a response is being added to."""
    if conversation is not None and conversation.is_busy:
        raise RequestError(409, "conversation", "another response is being added to this conversation")


@contextmanager
def _taken(conversation: StoredConversation | None) -> Iterator[None]:
    """A conversation that one response at a time is added to."""
    if conversation is None:
        yield
        return
    check_free(conversation)
    conversation.is_busy = True
    try:
        yield
    finally:
        conversation.is_busy = False


async def prepare(request: Request, body: ResponseBody, *, local: ResponseStore | None = None) -> ResponseTurn:
    """A response that can be run, or a refusal; `local`: of a connection, where what is not stored is kept."""
    server: ServerState = request.app.state.server
    check_model(server, body.model)
    check_response(body)
    client = caller(request).name
    before = _before(server, body, client, local)
    items = input_items(body.input, new_id)
    tools, shown_tools = read_response_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages = await _messages(server, body.instructions, before.said, items)
    options = response_options(body)
    form: AnswerForm | None = None
    if body.generates:
        try:
            form = await chat_form(request, tools, response_grammar(body), options.timeout_s)
        except RequestError as error:
            raise renamed_tool_error(error, body.tools) from error
        options = replace(options, grammar=form.grammar)
    tokens = await _tokens(server, messages, tools, client, options.cache_salt, answers=body.generates)
    if options.max_new_tokens is not None and len(tokens.tokens) + options.max_new_tokens > server.context:
        reason = f"{len(tokens.tokens)} tokens of input and {options.max_new_tokens} of output exceed {server.context}"
        raise RequestError(400, "max_output_tokens", reason)
    if body.store is not False:
        server.responses.check_size(items, "input")
    stream = ResponseStream(
        id=new_id("resp"),
        created_at=int(time.time()),
        model=server.model_name,
        echo=response_echo(body, shown_tools),
        with_logprobs=options.logprobs is not None,
        new_id=new_id,
        called_as=called_as(shown_tools),
    )
    return ResponseTurn(
        request=request,
        body=body,
        store=server.responses if body.store is not False else local,
        stream=stream,
        before=before,
        items=items,
        tokens=tokens,
        options=options,
        form=form,
        label="" if before.session_id is not None else label_of(request, body.prompt_cache_key),
    )


async def count_input(request: Request, body: InputTokensBody) -> int:
    """How many tokens a response's input would have."""
    server: ServerState = request.app.state.server
    check_model(server, body.model)
    check_turn(body)
    client = caller(request).name
    before = _before(server, body, client, None)
    tools, _ = read_response_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    messages = await _messages(server, body.instructions, before.said, input_items(body.input, new_id))
    return len((await _tokens(server, messages, tools, client, "")).tokens)


async def _tokens(
    server: ServerState,
    messages: list[dict[str, Any]],
    tools: ToolRequest | None,
    client: str,
    cache_salt: str,
    *,
    answers: bool = True,
) -> Conversation:
    """The tokens of a conversation; what is wrong with its messages is wrong with the input."""
    try:
        return await read_conversation(
            server, messages, tools, client=client, cache_salt=cache_salt, param="input", answers=answers
        )
    except RequestError as error:
        raise (renamed_to(error, "input") if error.param.startswith("messages") else error) from error


def _before(server: ServerState, body: TurnFields, client: str, local: ResponseStore | None) -> Before:
    """What a body says that it follows."""
    if body.previous_response_id is not None:
        id = body.previous_response_id
        store = local if local is not None and local.has(id, client) else server.responses
        found = store.response(id, client, param="previous_response_id")
        if found.response["status"] not in ("completed", "incomplete"):
            reason = f"is {found.response['status']}: only a complete one can be followed"
            raise RequestError(400, "previous_response_id", reason)
        return Before(said=found.said, session_id=found.session_id)
    if body.conversation_id is not None:
        conversation = server.responses.conversation(body.conversation_id, client, param="conversation")
        said = Said(items=tuple(conversation.items))
        return Before(said=said, session_id=conversation.session_id, conversation=conversation)
    return Before()


async def _messages(
    server: ServerState, instructions: str | None, said: Said | None, items: list[Item]
) -> list[dict[str, Any]]:
    """The messages of a whole conversation; instructions are those of this response alone."""
    earlier = said.all_items() if said is not None else []
    input_messages(items, earlier_calls={item["call_id"] for item in earlier if "call_id" in item})  # names places
    messages = [{"role": "system", "content": instructions}] if instructions else []
    messages += input_messages([*earlier, *items])
    if not messages:
        raise RequestError(400, "input", "must hold at least 1 item, where nothing came before")
    check_num_messages(server, len(messages), "input")
    return messages


def _num_reasoning(events: tuple[ToolEvent, ...], piece: Piece) -> int:
    """Tokens of a piece that is reasoning and nothing else."""
    return len(piece.tokens) if events and all(isinstance(event, Reasoning) for event in events) else 0
