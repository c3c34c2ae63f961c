"""Tokens: /tokenize and /detokenize, in vLLM's form; nothing is generated.

The ids are those that a completion of the same prompt or messages would begin with, with the same limit on their
number. Called by the app's routes.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.server.body_reader import read
from roost.server.inputs import plain_messages
from roost.server.models import check_model, started
from roost.server.responses import json_response
from roost.server.schema import DetokenizeBody, TokenizeBody, refuse_unsupported
from roost.server.state import ServerState
from roost.tools.definitions import read_tools


async def tokenize(request: Request) -> Response:
    """POST /tokenize."""
    server: ServerState = request.app.state.server
    body = await read(request, TokenizeBody)
    refuse_unsupported(body)
    check_model(server, body.model)
    if (body.prompt is None) == (body.messages is None):
        raise RequestError(400, "prompt", "give either prompt or messages")
    tokens = await (_prompt_tokens(server, body) if body.prompt is not None else _chat_tokens(server, body))
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": started(server).context, "tokens": tokens}
    if body.return_token_strs:
        tokenizer = server.language.tokenizer
        answer["token_strs"] = [tokenizer.piece(token).decode("utf-8", "replace") for token in tokens]
    return json_response(answer)


async def detokenize(request: Request) -> Response:
    """POST /detokenize."""
    server: ServerState = request.app.state.server
    body = await read(request, DetokenizeBody)
    check_model(server, body.model)
    server.check_len(tuple(body.tokens), "tokens")
    end = started(server).vocab_size
    if not all(0 <= token < end for token in body.tokens):
        raise RequestError(400, "tokens", f"ids must be in [0, {end - 1}]")
    tokenizer = server.language.tokenizer
    text = tokenizer.decode(body.tokens, skip_special=body.skip_special_tokens, at_start=True)
    return json_response({"prompt": text, "text": text})  # vLLM's name, and SGLang's


async def _prompt_tokens(server: ServerState, body: TokenizeBody) -> tuple[int, ...]:
    """The tokens of a text, with or without the leading bos token."""
    assert body.prompt is not None
    for name, is_given in (("add_generation_prompt", not body.add_generation_prompt), ("tools", bool(body.tools))):
        if is_given:
            raise RequestError(400, name, "is for messages")
    (tokens,) = await server.prompt_tokens(body.prompt, "prompt")
    tokenizer = server.language.tokenizer
    begins = tokenizer.adds_bos and tokens[:1] == (tokenizer.bos_id,)
    return tokens[1:] if begins and body.add_special_tokens is False else tokens


async def _chat_tokens(server: ServerState, body: TokenizeBody) -> tuple[int, ...]:
    """The tokens of a conversation, with or without the generation prompt."""
    assert body.messages is not None
    if body.add_special_tokens:
        raise RequestError(400, "add_special_tokens", "must be false: special tokens are the chat template's")
    messages, tools = await plain_messages(server, body.messages), read_tools(body.tools)
    asks = body.add_generation_prompt
    return await server.chat_tokens(messages, "messages", tools=tools, add_generation_prompt=asks)
