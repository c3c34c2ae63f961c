"""Schemas of OpenAI's Responses API: what its endpoints accept, and what a response repeats of it.

A field of type `Any` is unsupported, as in `schema`. How hard a model thinks, and whether its thoughts are summed up,
are hints that a model without these features does not follow: every documented value of `reasoning.effort` and
`reasoning.summary` is accepted, since clients send them always, and the response says null, which is what was done.
Never reads input items or tools: `response_input` does. Called by the endpoints of responses.
"""

from typing import Any

import msgspec

from roost.errors import RequestError
from roost.front.options import Options
from roost.grammar.forms import json_object_grammar, json_schema_grammar
from roost.server.answer_grammars import AnswerGrammar
from roost.server.compat import Strict, check_unsupported, unsupported_names
from roost.server.dialects import OPENAI, sampling_of, with_sampling
from roost.server.schema import AtLeastOne, Label, Metadata, StopText, StopTexts, stops
from roost.values import shown

TOP_LOGPROBS_MAX = 20
WITH_LOGPROBS = "message.output_text.logprobs"
# what error messages call an option of ours
RESPONSE_NAMES = {**OPENAI.names, "max_new_tokens": "max_output_tokens", "tokens": "input", "logprobs": "top_logprobs"}
# reasoning is never encrypted: it is sent as it is, and read again as it is
_INCLUDABLE = ("reasoning.encrypted_content", WITH_LOGPROBS)
_EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_SUMMARIES = ("auto", "concise", "detailed")
_FORMATS = ("text", "json_object", "json_schema")
_NOTHING_ASKED = AnswerGrammar()


class TextFormat(Strict):
    """`text.format`: what an answer must be."""

    type: str
    name: str | None = None  # a label, as the description is: what the model is told stands in the input
    schema: dict[str, Any] | bool | None = None
    strict: bool | None = None  # a schema is enforced either way, or refused
    description: str | None = None


class TextControls(Strict):
    """`text`."""

    format: TextFormat | None = None
    verbosity: Any = None


class ReasoningControls(Strict):
    """`reasoning`."""

    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None  # the older name of summary
    context: str | None = None
    mode: str | None = None


class ResponseStreamOptions(Strict):
    """`stream_options`."""

    include_obfuscation: Any = None


class ConversationName(Strict):
    """`conversation`, written as an object."""

    id: str


class CacheOptions(Strict):
    """`prompt_cache_options`; all but the last are labels, since the prefix cache keeps all that it can."""

    mode: str | None = None
    ttl: str | None = None
    comparison_response_id: str | None = None
    prewarm: bool | None = None  # compute the input, generate nothing


class TurnFields(Strict):
    """What a response and the count of its tokens have in common."""

    model: str | None = None
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationName | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextControls | None = None
    reasoning: ReasoningControls | None = None
    truncation: str | None = None

    @property
    def conversation_id(self) -> str | None:
        """The conversation that the response belongs to."""
        return self.conversation.id if isinstance(self.conversation, ConversationName) else self.conversation


class InputTokensBody(TurnFields, kw_only=True):
    """POST /v1/responses/input_tokens."""

    personality: Any = None


@with_sampling(OPENAI)
class ResponseBody(TurnFields, kw_only=True):
    """POST /v1/responses, with every sampling parameter.

    Of the fields below the second group are labels, which need nothing done, the third extensions of this server, and
    the last one is not supported.
    """

    max_output_tokens: AtLeastOne | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    stream_options: ResponseStreamOptions | None = None

    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: CacheOptions | None = None
    client_metadata: dict[str, Any] | None = None

    stop: StopText | StopTexts | None = None
    timeout: float | None = None
    priority: int | None = None
    cache_salt: Label | None = None
    generate: bool | None = None  # false: the input is added, and nothing is generated

    service_tier: Any = None
    max_tool_calls: Any = None
    prompt: Any = None
    moderation: Any = None
    context_management: Any = None
    image: Any = None
    access_programs: Any = None

    @property
    def generates(self) -> bool:
        """Whether there is to be an output."""
        is_prewarming = self.prompt_cache_options is not None and bool(self.prompt_cache_options.prewarm)
        return self.generate is not False and not is_prewarming

    @property
    def with_logprobs(self) -> bool:
        """Whether the output's tokens come with log-probabilities."""
        return WITH_LOGPROBS in (self.include or ())


class ConversationBody(Strict):
    """POST /v1/conversations."""

    items: list[dict[str, Any]] | None = None
    metadata: Metadata | None = None


class ConversationUpdateBody(Strict):
    """POST /v1/conversations/{id}."""

    metadata: Metadata | None


class ItemsBody(Strict):
    """POST /v1/conversations/{id}/items."""

    items: list[dict[str, Any]]
    include: list[str] | None = None


RESPONSE_UNSUPPORTED: dict[type[msgspec.Struct], tuple[str, ...]] = {
    kind: unsupported_names(kind) for kind in (ResponseBody, InputTokensBody, TextControls, ResponseStreamOptions)
}


def check_response(body: ResponseBody) -> None:
    """Refuse what a response is asked for and nobody here can do."""
    check_turn(body)
    check_include(body.include)
    if body.stream_options is not None:
        _check(body.stream_options, "stream_options.")
        if not body.stream:
            raise RequestError(400, "stream_options", "needs stream: true")
    if not 0 <= (body.top_logprobs or 0) <= TOP_LOGPROBS_MAX:
        raise RequestError(400, "top_logprobs", f"must be in [0, {TOP_LOGPROBS_MAX}], got {body.top_logprobs}")
    if body.top_logprobs and not body.with_logprobs:
        raise RequestError(400, "top_logprobs", f"needs include: [{WITH_LOGPROBS!r}]")
    _check_among("prompt_cache_retention", body.prompt_cache_retention, ("in_memory", "24h"))
    if body.prompt_cache_options is not None:
        _check_among("prompt_cache_options.mode", body.prompt_cache_options.mode, ("implicit", "explicit"))
    if body.background and body.store is False:
        raise RequestError(400, "background", "needs store: true, so that its response can be read later")
    if not body.generates and body.max_output_tokens is not None:
        raise RequestError(400, "max_output_tokens", "is for a response that generates something")


def check_turn(body: TurnFields) -> None:
    """Refuse what nobody here can do of the fields that a response and a count of tokens share."""
    _check(body)
    if body.previous_response_id is not None and body.conversation is not None:
        raise RequestError(400, "previous_response_id", "cannot be given with conversation")
    if body.truncation == "auto":
        raise RequestError(400, "truncation", "must be disabled: input that is too long is refused, never cut")
    _check_among("truncation", body.truncation, ("disabled",))
    if body.text is not None:
        _check(body.text, "text.")
        _check_format(body.text.format)
    if (reasoning := body.reasoning) is not None:
        _check_among("reasoning.effort", reasoning.effort, _EFFORTS)
        _check_among("reasoning.summary", reasoning.summary, _SUMMARIES)
        _check_among("reasoning.generate_summary", reasoning.generate_summary, _SUMMARIES)
        _check_among("reasoning.context", reasoning.context, ("auto",))
        _check_among("reasoning.mode", reasoning.mode, ("standard",))


def check_include(include: list[str] | None) -> None:
    """Refuse what can not be included in a response or in a list of items."""
    for index, name in enumerate(include or ()):
        _check_among(f"include[{index}]", name, _INCLUDABLE)


def response_options(body: ResponseBody) -> Options:
    """The options of a response; parameters keep the meaning that OpenAI gives them."""
    return Options(
        max_new_tokens=body.max_output_tokens if body.generates else 0,
        stop=stops(body.stop),
        logprobs=(body.top_logprobs or 0) if body.with_logprobs else None,
        priority=body.priority or 0,
        timeout_s=body.timeout,
        **sampling_of(body, OPENAI),
        cache_salt=body.cache_salt or "",
    )


def response_grammar(body: TurnFields) -> AnswerGrammar:
    """What the answer must match."""
    given = None if body.text is None else body.text.format
    if given is None or given.type == "text":
        return _NOTHING_ASKED
    if given.type == "json_object":
        return AnswerGrammar(param="text.format", form=lambda _: json_object_grammar(), value=given.type)
    return AnswerGrammar(param="text.format.schema", form=json_schema_grammar, value=given.schema)


def response_echo(body: ResponseBody, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """What a response repeats of its request; `tools`: those that the model is told of."""
    options = response_options(body)
    top_p = msgspec.structs.asdict(body)["top_p"]  # 0 has another form among the options
    return {
        "instructions": body.instructions,
        "previous_response_id": body.previous_response_id,
        "conversation": None if body.conversation_id is None else {"id": body.conversation_id},
        "tools": tools,
        "tool_choice": "auto" if body.tool_choice is None else body.tool_choice,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "text": {"format": _shown_format(body), "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None},
        "temperature": options.temperature,
        "top_p": options.top_p if top_p is None else top_p,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "top_logprobs": body.top_logprobs or 0,
        "max_output_tokens": body.max_output_tokens,
        "store": body.store is not False,
        "background": bool(body.background),
        "metadata": body.metadata or {},
        "user": body.user,
        "safety_identifier": body.safety_identifier,
        "prompt_cache_key": body.prompt_cache_key,
    }


def _shown_format(body: ResponseBody) -> dict[str, Any]:
    """The format as a response repeats it, all its fields there."""
    given = None if body.text is None else body.text.format
    if given is None or given.type != "json_schema":
        return {"type": "text" if given is None else given.type}
    schema = {} if given.schema is True else given.schema  # clients read an object
    named = {"name": given.name, "description": given.description, "schema": schema}
    return {"type": given.type, **named, "strict": bool(given.strict)}


def _check_format(given: TextFormat | None) -> None:
    if given is None:
        return
    _check_among("text.format.type", given.type, _FORMATS)
    for name, value in (("name", given.name), ("schema", given.schema)):
        if given.type == "json_schema" and value is None:
            raise RequestError(400, f"text.format.{name}", "is required")
    of_schema = {"name": given.name, "schema": given.schema, "strict": given.strict, "description": given.description}
    for name, value in of_schema.items():
        if given.type != "json_schema" and value is not None:
            raise RequestError(400, f"text.format.{name}", f"is not for the type {given.type}")


def _check(body: msgspec.Struct, path: str = "") -> None:
    check_unsupported(body, RESPONSE_UNSUPPORTED[type(body)], path)


def _check_among(path: str, value: str | None, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of some; null asks for nothing."""
    if value is not None and value not in allowed:
        raise RequestError(400, path, f"must be {' or '.join(allowed)}, got {shown(value)}")
