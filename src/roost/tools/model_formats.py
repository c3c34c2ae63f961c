"""How one model writes tool calls and reasoning: found out once, used for every request.

Owns the choice of formats, by the flags or from the chat template, and what follows from it for a request: the messages
and tools for the template, the grammar of the answer, the machine that reads it. Called by the server and the library.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roost.errors import ConfigError, RequestError
from roost.text.continuation import OTHER_TOOLS, Transcript
from roost.text.language import Language
from roost.text.tokenizer import Tokenizer
from roost.tools.call_ids import short_call_id
from roost.tools.definitions import ToolRequest
from roost.tools.format import ToolFormat
from roost.tools.hermes import HERMES
from roost.tools.history import Message, as_plain, checked_history, system_text, with_call_ids, with_system_text
from roost.tools.lark import with_parts
from roost.tools.machine import Machine
from roost.tools.reasoning import ReasoningTags, after_reasoning
from roost.tools.reasoning_probe import detect_reasoning
from roost.tools.registry import (
    DESCRIBED,
    DETECTED,
    FORMATS,
    detect,
    lists_tools,
    rendered,
    takes_several_calls,
    tool_format_names,
)
from roost.tools.tool_grammar import tool_grammar

THINK = "think"  # of --reasoning-format: between <think> and </think>
NO_REASONING = "none"  # of --reasoning-format: reasoning is part of the content
REASONING_FORMATS = (DETECTED, THINK, NO_REASONING)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFormats:
    """The formats of one model."""

    tool_format: ToolFormat
    is_described: bool  # the template knows no tools: a text lists them, and calls in the history become text
    reasoning: ReasoningTags | None = None
    is_parallel: bool = True  # the template takes answers with several calls
    system_role: str = "system"  # whose message the text of tools goes to

    @property
    def name(self) -> str:
        """Of the tools' format, as --tool-format has it."""
        return DESCRIBED if self.is_described else self.tool_format.name

    @property
    def said(self) -> str:
        """The formats in a few words, for the lines of a start."""
        tags = self.reasoning
        return self.name if tags is None else f"{self.name}; reasoning between {tags.begin} and {tags.end}"

    def messages(
        self, messages: Sequence[Message], request: ToolRequest | None, *, is_continuation: bool = False
    ) -> list[Message]:
        """A conversation for the template, its calls and results checked.

        `is_continuation`: it goes on from a session, whose first messages have brought the tools.
        """
        checked = checked_history(messages, is_continuation=is_continuation)
        if not self.is_described:
            return with_call_ids(checked, short_call_id) if self.tool_format.has_short_ids else checked
        plain = as_plain(checked)
        if request is None or is_continuation:
            return plain
        return with_system_text(plain, system_text(request.tools), role=self.system_role)

    def session_messages(
        self, messages: Sequence[Message], request: ToolRequest | None, language: Language, transcript: Transcript
    ) -> list[Message]:
        """The same for messages that go on from a session; tools other than its first ones are refused."""
        self._check_session(request, language, transcript)
        return self.messages(messages, request, is_continuation=transcript.num_messages > 0)

    def _check_session(self, request: ToolRequest | None, language: Language, transcript: Transcript) -> None:
        """Refuse tools other than those that a session began with, where its first message is what lists them.

        Where the template lists them, `text.continuation` refuses them.
        """
        if request is None or not self.is_described or not transcript.num_messages:
            return
        (listed,) = language.escape([{"content": system_text(request.tools)}])
        if listed["content"] not in transcript.opening[0]["content"]:
            raise RequestError(400, "tools", OTHER_TOOLS)

    def template_tools(self, request: ToolRequest | None) -> list[dict[str, Any]] | None:
        """The tools for the template; None if there are none, or if it knows none."""
        return None if request is None or self.is_described else [tool.definition() for tool in request.tools]

    def unenforced(self, request: ToolRequest) -> list[str | None]:
        """For each callable tool, the keyword of its schema that this format cannot enforce."""
        return [self.tool_format.unenforced(tool.schema()) for tool in request.callable]

    def grammar(self, request: ToolRequest | None, tokenizer: Tokenizer, *, answer: str = "") -> str:
        """The grammar of a whole output, "" if it is free.

        `answer`: the grammar of an answer that calls no tool, if the request has one; calls and such an answer then
        come one or the other.
        """
        inner = answer
        if request is not None and (request.callable or not answer):
            inner = self._tool_grammar(request, tokenizer, answer)
        return inner if self.reasoning is None else after_reasoning(inner, self.reasoning, tokenizer)

    def _tool_grammar(self, request: ToolRequest, tokenizer: Tokenizer, answer: str) -> str:
        asked = replace(request, is_parallel=request.is_parallel and self.is_parallel)
        if not answer:
            return tool_grammar(self.tool_format, asked, tokenizer)
        # Marked, since bare JSON might be either.
        calls = tool_grammar(self.tool_format, replace(asked, is_required=True), tokenizer, is_marked=True)
        return calls if request.is_required else with_parts("start: @calls | @answer", calls=calls, answer=answer)

    def kept_tokens(self, tokenizer: Tokenizer, *, has_tools: bool = True) -> frozenset[int]:
        """Special tokens that must be shown in the text that a machine reads."""
        tags = () if self.reasoning is None else (self.reasoning.begin, self.reasoning.end)
        ids = (tokenizer.added_ids.get(text) for text in (*(self.tool_format.tokens if has_tools else ()), *tags))
        return frozenset(id for id in ids if id is not None)

    def machine(
        self, request: ToolRequest | None, new_id: Callable[[], str], *, has_answer_grammar: bool = False
    ) -> Machine:
        """What reads one output; `has_answer_grammar`: the request has a grammar for answers that call no tool."""
        return Machine(
            format=None if request is None else self.tool_format,
            tools=() if request is None else request.callable,
            new_id=new_id,
            reasoning=self.reasoning,
            is_marked=has_answer_grammar,
        )


def formats_of(language: Language, *, tool_format: str = DETECTED, reasoning_format: str = DETECTED) -> ModelFormats:
    """The formats of a model; `auto` asks its chat template."""
    for flag, given, allowed in (
        ("--tool-format", tool_format, tool_format_names()),
        ("--reasoning-format", reasoning_format, REASONING_FORMATS),
    ):
        if given not in allowed:
            raise ConfigError(f"{flag} must be one of {', '.join(allowed)}, got {given}")
    render = None if language.template is None else language.template.render
    reasoning = None if render is None else detect_reasoning(render)
    if reasoning_format == NO_REASONING:
        reasoning = None
    elif reasoning_format == THINK and reasoning is None:
        reasoning = ReasoningTags(begin="<think>", end="</think>", is_open=False)
    named = {format.name: format for format in FORMATS}.get(tool_format)
    if named is not None and (render is None or not lists_tools(render)):
        raise ConfigError(f"--tool-format {tool_format}: the chat template lists no tools; {DESCRIBED} is for that")
    found = detect(render) if named is None and render is not None and tool_format == DETECTED else named
    if found is not None and render is not None:
        is_parallel = takes_several_calls(render)
        return ModelFormats(tool_format=found, is_described=False, reasoning=reasoning, is_parallel=is_parallel)
    has_system = render is None or rendered(render, with_system_text([_ASKED], "")) is not None
    return ModelFormats(
        tool_format=HERMES,
        is_described=True,
        reasoning=reasoning,
        system_role="system" if has_system else "user",
    )


_ASKED = {"role": "user", "content": "Hello"}
