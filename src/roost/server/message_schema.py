"""Schemas of Anthropic's Messages API: what its two endpoints accept, every field that its clients know.

A field of type `Any` is unsupported, as in `schema`. Clients send some fields always, so these are accepted: labels
(`metadata`, `user_profile_id`, `service_tier`, `cache_control` everywhere, since caching is automatic), and hints that
a model is free not to follow. `thinking` and `effort` are such hints: a model thinks as its chat template has it,
`budget_tokens` is checked and not enforced, and `display` is for `shows_thinking`. Never reads content blocks or tools:
`message_input` does. Called by the endpoints of messages.
"""

from typing import Any

import msgspec

from roost.errors import RequestError
from roost.front.options import Options
from roost.grammar.forms import json_schema_grammar
from roost.server.answer_grammars import AnswerGrammar
from roost.server.compat import Strict, check_unsupported, unsupported_names
from roost.server.dialects import Dialect, sampling_of, with_sampling
from roost.server.schema import AtLeastNone, Label, StopTexts, stops
from roost.values import shown

# what a body calls an option of ours
MESSAGES = Dialect(names={"max_new_tokens": "max_tokens", "timeout_s": "timeout", "stop": "stop_sequences"})
MESSAGE_NAMES = {**MESSAGES.names, "tokens": "messages"}  # and what error messages call it
THINKING_TOKENS_MIN = 1024  # of a budget, as documented
_EFFORTS = ("low", "medium", "high", "xhigh", "max")
_DISPLAYS = ("summarized", "omitted", "updates")
_THINKING = ("enabled", "disabled", "adaptive", "between_tools")
_SERVICE_TIERS = ("auto", "standard_only")
_CLEARED_THINKING = "clear_thinking_20251015"
_ALL_TURNS: tuple[Any, ...] = ("all", {"type": "all"})

Fields = dict[str, Any]  # a content block, a tool: as JSON has it
CacheControl = Fields | None  # a label


class MessageOutputConfig(Strict):
    """`output_config` of one message: a hint."""

    effort: str | None = None


class InputMessage(Strict):
    """One message of a conversation."""

    role: str
    content: str | list[Fields] | None = None
    output_config: MessageOutputConfig | None = None  # of a system message
    clear_at: Any = None


class MessageMetadata(Strict):
    """`metadata`."""

    user_id: str | None = None  # a label, which finds the session that has the conversation


class OutputFormat(Strict):
    """`output_config.format`: what an answer must be."""

    type: str
    schema: Fields | bool
    name: str | None = None  # a label


class OutputConfig(Strict):
    """`output_config`."""

    effort: str | None = None  # a hint
    format: OutputFormat | None = None
    task_budget: Any = None


class Thinking(Strict):
    """`thinking`."""

    type: str
    budget_tokens: int | None = None
    display: str | None = None
    block_binding: Any = None


class ContextManagement(Strict):
    """`context_management`: edits of the history before the model sees it."""

    edits: list[Fields] | None = None


class MessageFields(Strict, kw_only=True):
    """What a message and a count of its tokens have in common."""

    model: str
    messages: list[InputMessage]
    system: str | list[Fields] | None = None
    tools: list[Fields] | None = None
    tool_choice: Fields | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the older place of output_config.format
    context_management: ContextManagement | None = None
    cache_control: CacheControl = None
    user_profile_id: str | None = None

    betas: Any = None
    billing_policy: Any = None
    compaction: Any = None
    mcp_servers: Any = None
    speed: Any = None
    workspace_id: Any = None


@with_sampling(MESSAGES)
class MessagesBody(MessageFields, kw_only=True):
    """POST /v1/messages, with every sampling parameter; the last group are extensions."""

    max_tokens: AtLeastNone
    stop_sequences: StopTexts | None = None
    stream: bool | None = None
    metadata: MessageMetadata | None = None
    service_tier: str | None = None

    container: Any = None
    diagnostics: Any = None
    fallback_credit_token: Any = None
    fallbacks: Any = None
    inference_geo: Any = None
    thread: Any = None

    priority: int | None = None
    timeout: float | None = None
    cache_salt: Label | None = None


class CountTokensBody(MessageFields, kw_only=True):
    """POST /v1/messages/count_tokens."""


MESSAGE_UNSUPPORTED: dict[type[msgspec.Struct], tuple[str, ...]] = {
    kind: unsupported_names(kind) for kind in (MessagesBody, CountTokensBody, InputMessage, OutputConfig, Thinking)
}


def check_messages(body: MessagesBody | CountTokensBody) -> None:
    """Refuse what a message is asked for and nobody here can do."""
    _check(body)
    if not body.messages:
        raise RequestError(400, "messages", "must hold at least 1 message")
    for index, message in enumerate(body.messages):
        _check_message(message, f"messages[{index}].")
    if body.thinking is not None:
        _check_thinking(body.thinking, body.max_tokens if isinstance(body, MessagesBody) else None)
    if body.output_config is not None:
        _check(body.output_config, "output_config.")
        _check_among("output_config.effort", body.output_config.effort, _EFFORTS)
    for path, format in _formats(body):
        _check_among(f"{path}.type", format.type, ("json_schema",))
    if body.context_management is not None:
        _check_edits(body.context_management.edits or [])
    if isinstance(body, MessagesBody):
        _check_among("service_tier", body.service_tier, _SERVICE_TIERS)


def message_options(body: MessagesBody) -> Options:
    """The options of a message; parameters keep the meaning that Anthropic gives them."""
    return Options(
        max_new_tokens=body.max_tokens,
        stop=stops(body.stop_sequences),
        priority=body.priority or 0,
        timeout_s=body.timeout,
        **sampling_of(body, MESSAGES),
        cache_salt=body.cache_salt or "",
    )


def message_grammar(body: MessagesBody | CountTokensBody) -> AnswerGrammar:
    """What the answer must match."""
    found = [
        AnswerGrammar(param=f"{path}.schema", form=json_schema_grammar, value=each.schema)
        for path, each in _formats(body)
    ]
    if len(found) > 1:
        raise RequestError(400, "output_format", "is the older name of output_config.format: give one of them")
    return found[0] if found else AnswerGrammar()


def shows_thinking(body: MessagesBody) -> bool:
    """Whether the client wants to read what the model thinks."""
    return body.thinking is None or body.thinking.display != "omitted"


def _formats(body: MessageFields) -> list[tuple[str, OutputFormat]]:
    """The formats that a body has, with their paths."""
    within = None if body.output_config is None else body.output_config.format
    given = (("output_config.format", within), ("output_format", body.output_format))
    return [(path, format) for path, format in given if format is not None]


def _check_message(message: InputMessage, path: str) -> None:
    _check(message, path)
    if message.output_config is None:
        return
    if message.role != "system":
        raise RequestError(400, f"{path}output_config", "is for the role system")
    _check_among(f"{path}output_config.effort", message.output_config.effort, _EFFORTS)


def _check_thinking(given: Thinking, max_tokens: int | None) -> None:
    _check_among("thinking.type", given.type, _THINKING)
    _check_among("thinking.display", given.display, _DISPLAYS)
    _check(given, "thinking.")
    budget, path = given.budget_tokens, "thinking.budget_tokens"
    if given.type != "enabled":
        if budget is not None:
            raise RequestError(400, path, f"is not for the type {given.type}")
        return
    if budget is None:
        raise RequestError(400, path, "is required")
    if budget < THINKING_TOKENS_MIN:
        raise RequestError(400, path, f"must be at least {THINKING_TOKENS_MIN}, got {shown(budget)}")
    if max_tokens is not None and budget >= max_tokens:
        raise RequestError(400, path, f"must be less than max_tokens ({max_tokens}), got {shown(budget)}")


def _check_edits(edits: list[Fields]) -> None:
    """Refuse every edit but the one that clears nothing: a history is never cut here."""
    for index, edit in enumerate(edits):
        path = f"context_management.edits[{index}]"
        if edit.get("type") != _CLEARED_THINKING:
            raise RequestError(400, f"{path}.type", f"is not supported except as {_CLEARED_THINKING} with keep: all")
        if edit.get("keep") not in _ALL_TURNS:
            raise RequestError(400, f"{path}.keep", "must be all: the history is used as it is given")
        for name in edit:
            if name not in ("type", "keep"):
                raise RequestError(400, f"{path}.{name}", "is not a parameter of this edit")


def _check(body: msgspec.Struct, path: str = "") -> None:
    """Refuse the first unsupported field whose value asks for something."""
    check_unsupported(body, MESSAGE_UNSUPPORTED[type(body)], path)


def _check_among(path: str, value: str | None, allowed: tuple[str, ...]) -> None:
    """Refuse a value that is not one of some; null asks for nothing."""
    if value is not None and value not in allowed:
        raise RequestError(400, path, f"must be {' or '.join(allowed)}, got {shown(value)}")
