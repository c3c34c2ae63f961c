"""Anthropic's Messages API: POST /v1/messages and /v1/messages/count_tokens.

Every request has its whole history; a label of the client's finds the session that already holds it. Nothing is told to
the client before the engine has admitted the request, so that the first event has its real number of tokens. Called by
the app's routes.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.server.answer_grammars import chat_form
from roost.server.body_reader import read
from roost.server.conversations import (
    Conversation,
    ConversationTurn,
    conversation_turn,
    events_of,
    label_of,
    read_conversation,
)
from roost.server.generation import Generation, while_connected
from roost.server.inputs import check_num_messages
from roost.server.keys import caller
from roost.server.message_events import MessageStream
from roost.server.message_input import input_messages, read_message_tools, renamed_tool_error
from roost.server.message_schema import (
    MESSAGE_NAMES,
    CountTokensBody,
    MessagesBody,
    check_messages,
    message_grammar,
    message_options,
    shows_thinking,
)
from roost.server.models import check_model
from roost.server.openai_answers import ended_reason
from roost.server.response_turns import new_id
from roost.server.responses import event_stream, exhaust, json_response
from roost.server.state import ServerState
from roost.tools.definitions import ToolRequest


async def messages(request: Request) -> Response:
    """POST /v1/messages."""
    server: ServerState = request.app.state.server
    body = await read(request, MessagesBody)
    check_model(server, body.model)
    check_messages(body)
    options, grammar = message_options(body), message_grammar(body)
    tools = read_message_tools(body.tools, body.tool_choice)
    try:
        form = await chat_form(request, tools, grammar, options.timeout_s)
    except RequestError as error:
        raise renamed_tool_error(error, body.tools) from error
    options = replace(options, grammar=form.grammar)
    conversation = await _conversation(request, body, tools, options.cache_salt)
    fills_context = len(conversation.tokens) + body.max_tokens > server.context  # agents ask for more than most have
    options = replace(options, max_new_tokens=None) if fills_context else options
    stream = MessageStream(
        id=new_id("msg"), model=server.model_name, new_id=new_id, shows_thinking=shows_thinking(body)
    )
    user_id = None if body.metadata is None else body.metadata.user_id
    async with conversation_turn(
        request,
        conversation,
        options,
        request_id=stream.id,
        names={**MESSAGE_NAMES, "grammar": grammar.param},
        form=form,
        label=label_of(request, user_id),
    ) as turn:
        events = _events(server, turn, stream, fills_context=fills_context)
        if body.stream:
            return await event_stream(request, events, named=True)
        await while_connected(request, exhaust(events))
    return json_response(stream.message)


async def count_tokens(request: Request) -> Response:
    """POST /v1/messages/count_tokens."""
    server: ServerState = request.app.state.server
    body = await read(request, CountTokensBody)
    check_model(server, body.model)
    check_messages(body)
    tools = read_message_tools(body.tools, body.tool_choice)
    return json_response({"input_tokens": len((await _conversation(request, body, tools, "")).tokens)})


async def _conversation(
    request: Request, body: MessagesBody | CountTokensBody, tools: ToolRequest | None, cache_salt: str
) -> Conversation:
    """The tokens of a request; a count may end with an answer, after which nothing is generated."""
    server: ServerState = request.app.state.server
    is_count = isinstance(body, CountTokensBody)
    plain = input_messages(body.messages, body.system, may_end_with_answer=is_count)
    check_num_messages(server, len(plain), "messages")
    answers = not is_count or plain[-1]["role"] != "assistant"
    client = caller(request).name
    return await read_conversation(
        server, plain, tools, client=client, cache_salt=cache_salt, param="messages", answers=answers
    )


async def _events(
    server: ServerState, turn: ConversationTurn, stream: MessageStream, *, fills_context: bool
) -> AsyncGenerator[dict[str, Any], None]:
    """The events of a message, from its admission to its end."""
    generation = Generation(server.engine, server.language, server.metrics, [turn.prompt])
    (output,) = generation.outputs
    async with aclosing(generation.pieces()) as pieces:
        async for _, piece in pieces:
            if piece.begun is not None:
                for event in stream.begin(piece.begun.prompt_tokens, piece.begun.cached_tokens):
                    yield event
            for event in stream.feed(events_of(output.answer, piece)):
                yield event
            if piece.finished is not None:
                matched = piece.finished.matched
                for event in stream.end(
                    reason=ended_reason(server, piece.finished),
                    matched_stop=matched if isinstance(matched, str) else None,
                    has_calls=output.answer.has_calls,
                    completion_tokens=piece.finished.usage.completion_tokens,
                    fills_context=fills_context,
                ):
                    yield event
