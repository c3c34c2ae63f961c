"""OpenAI's endpoints: chat and text completions, from a request's body to what is asked of the engine.

What goes back is built by `server.openai_answers`. Called by the app's routes.
"""

from dataclasses import replace
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response

from roost.errors import RequestError
from roost.front.options import Options
from roost.server.answer_grammars import chat_form, openai_grammar, with_grammar
from roost.server.body_reader import read
from roost.server.conversations import conversation_turn, label_of, read_conversation
from roost.server.dialects import OPENAI
from roost.server.generation import Prompt, while_connected
from roost.server.inputs import check_no_session, plain_messages, session_turn
from roost.server.keys import caller
from roost.server.models import check_model
from roost.server.openai_answers import ChatAnswers, TextAnswers
from roost.server.responses import event_stream, json_response
from roost.server.schema import ChatBody, CompletionBody, OpenAiBody, openai_options, refuse_unsupported
from roost.server.state import ServerState
from roost.tools.definitions import read_tools

_NAMES = {**OPENAI.names, "tokens": "messages"}
_TOP_LOGPROBS_MAX = 20


async def chat(request: Request) -> Response:
    """POST /v1/chat/completions."""
    server: ServerState = request.app.state.server
    body = await read(request, ChatBody)
    _check(server, body)
    if None not in (body.max_tokens, body.max_completion_tokens) and body.max_tokens != body.max_completion_tokens:
        raise RequestError(400, "max_tokens", "is the older name of max_completion_tokens: give one of them")
    if body.add_special_tokens:
        raise RequestError(400, "add_special_tokens", "must be false: special tokens are the chat template's")
    if body.top_logprobs and not body.logprobs:
        raise RequestError(400, "top_logprobs", "needs logprobs: true")
    if not 0 <= (body.top_logprobs or 0) <= _TOP_LOGPROBS_MAX:
        raise RequestError(400, "top_logprobs", f"must be in [0, {_TOP_LOGPROBS_MAX}], got {body.top_logprobs}")
    options = openai_options(body)
    names = {**_NAMES, "request_id": "rid" if body.rid is not None else "request_id"}
    if body.max_completion_tokens is not None:
        options = replace(options, max_new_tokens=body.max_completion_tokens)
        names["max_new_tokens"] = "max_completion_tokens"
    if body.logprobs:
        options = replace(options, logprobs=body.top_logprobs or 0)
    request_id, messages = _request_id("chatcmpl", body), await plain_messages(server, body.messages)
    tools = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
    grammar = openai_grammar(body)
    form = await chat_form(request, tools, grammar, options.timeout_s)
    names["grammar"] = grammar.param if tools is None else "tools"
    options = replace(options, grammar=form.grammar)
    if body.session_id is None:
        check_no_session(body)
        conversation = await read_conversation(
            server, messages, tools, client=caller(request).name, cache_salt=options.cache_salt, param="messages"
        )
        label = label_of(request, body.prompt_cache_key)
        async with conversation_turn(
            request, conversation, options, request_id=request_id, names=names, form=form, label=label
        ) as place:
            return await _answer(request, body, ChatAnswers(server, [place.prompt], body.service_tier))
    async with session_turn(
        request, body.session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        tokens = await turn.input_tokens(messages=messages, tools=tools)
        prompt = turn.prompt(request_id, tokens, options, names, form)
        return await _answer(request, body, ChatAnswers(server, [prompt], body.service_tier))


async def completions(request: Request) -> Response:
    """POST /v1/completions."""
    server: ServerState = request.app.state.server
    body = await read(request, CompletionBody)
    _check(server, body)
    if not body.add_special_tokens:
        raise RequestError(400, "add_special_tokens", "must be true: send token ids for a prompt as it is")
    if body.best_of is not None and body.best_of != (body.n or 1):
        raise RequestError(400, "best_of", "must be n: choosing among more outputs is not supported")
    options = openai_options(body)
    if body.max_tokens is None:
        options = replace(options, max_new_tokens=16)
    options = replace(options, logprobs=body.logprobs)
    if body.echo and body.logprobs is not None:
        options = replace(options, prompt_logprobs_from=0)
    grammar = openai_grammar(body)
    options = await with_grammar(request, options, grammar)
    given = "rid" if body.rid is not None else "request_id"
    names = {**_NAMES, "tokens": "prompt", "request_id": given, "grammar": grammar.param}
    request_id = _request_id("cmpl", body)
    if body.session_id is not None:
        return await _session_completion(request, body, request_id, options, names)
    check_no_session(body)
    prompts = [
        Prompt(
            request_id=request_id if number == 0 else f"{request_id}-{number}",
            tokens=tokens,
            options=options,
            names=names,
            client=caller(request).name,
        )
        for number, tokens in enumerate(await server.prompt_tokens(body.prompt, "prompt"))
    ]
    return await _answer(request, body, TextAnswers(server, prompts, echo=bool(body.echo)))


async def _session_completion(
    request: Request, body: CompletionBody, request_id: str, options: Options, names: dict[str, str]
) -> Response:
    """A turn of a session, whose prompt is new input."""
    if body.echo:
        raise RequestError(400, "echo", "is not for a session: what it held before is not at hand")
    assert body.session_id is not None
    async with session_turn(
        request, body.session_id, number=body.turn, queue=body.queue, timeout_s=options.timeout_s
    ) as turn:
        if isinstance(body.prompt, str):
            tokens = await turn.input_tokens(text=body.prompt, param="prompt")
        else:
            tokens = await turn.input_tokens(ids=body.prompt, param="prompt")
        return await _answer(
            request, body, TextAnswers(turn.server, [turn.prompt(request_id, tokens, options, names)], echo=False)
        )


def _check(server: ServerState, body: OpenAiBody) -> None:
    """Refuse what is asked of another model, or of another server."""
    check_model(server, body.model)
    refuse_unsupported(body)
    if body.stream_options is not None:
        refuse_unsupported(body.stream_options, "stream_options.")
        if not body.stream:
            raise RequestError(400, "stream_options", "needs stream: true")


def _request_id(kind: str, body: ChatBody | CompletionBody) -> str:
    """What a request is called, as the client says or by a name of its own."""
    if body.rid is not None and body.request_id is not None:
        raise RequestError(400, "request_id", "is the same as rid: give one of them")
    return body.rid or f"{kind}-{body.request_id or uuid4().hex}"


async def _answer(request: Request, body: OpenAiBody, answers: ChatAnswers | TextAnswers) -> Response:
    if not body.stream:
        outputs = await while_connected(request, answers.generation.finish())
        return json_response(answers.response(outputs))
    include_usage = body.stream_options is not None and body.stream_options.include_usage
    return await event_stream(request, answers.chunks(include_usage=include_usage))
