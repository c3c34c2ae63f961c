"""The form of a request's answers: which tools it may call, the grammar of the whole output, what reads it.

Found before the request is sent: grammars must be compiled for that, which takes a while and may fail, so the search is
a generator that asks for it and never waits itself. A schema that cannot be enforced is refused with its path; that of
a tool which is not strict becomes any object. Driven by the server and the library.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TypeVar

from roost.errors import RequestError
from roost.text.tokenizer import Tokenizer
from roost.tools.definitions import NOT_ENFORCED, ToolRequest, enforceable
from roost.tools.lark import json_value
from roost.tools.machine import Machine
from roost.tools.model_formats import ModelFormats

Found = TypeVar("Found")
# Yields a grammar that is to be compiled, and is sent why that cannot be done; "" if it was.
Search = Generator[str, str | None, Found]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that a search wants compiled."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerForm:
    """What the answers to one request look like."""

    formats: ModelFormats
    tools: ToolRequest | None = None
    grammar: str = ""  # of the whole output; "": it is free
    has_answer_grammar: bool = False  # the request has a grammar of its own, for answers that call no tool

    def machine(self, new_id: Callable[[], str]) -> Machine | None:
        """What reads one output; None if there is nothing but content to read."""
        if self.tools is None and self.formats.reasoning is None:
            return None
        return self.formats.machine(self.tools, new_id, has_answer_grammar=self.has_answer_grammar)

    def kept_tokens(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Special tokens that the machine must be shown."""
        return self.formats.kept_tokens(tokenizer, has_tools=self.tools is not None)


def find_form(
    formats: ModelFormats, tokenizer: Tokenizer, tools: ToolRequest | None = None, answer: str = ""
) -> Search[AnswerForm]:
    """The form of the answers in a conversation; `answer`: the grammar of one that calls no tool, "" if it is free."""
    if tools is not None:
        tools = enforceable(tools, formats.unenforced(tools))
    grammar = formats.grammar(tools, tokenizer, answer=answer)
    error = (yield grammar) if grammar else ""
    if error and answer:
        yield from compiled(answer)  # names it, if it is at fault
    if error and tools is not None:
        reasons = []
        for tool in tools.callable:
            why = (yield f"start: {json_value(tool.schema())}\n") or ""
            reasons.append(why.removeprefix(NOT_ENFORCED) or None)
        if any(reasons):
            tools = enforceable(tools, reasons)
            grammar = formats.grammar(tools, tokenizer, answer=answer)
            error = yield grammar
    if error:
        raise RequestError(400, "grammar" if tools is None else "tools", error)
    return AnswerForm(formats=formats, tools=tools, grammar=grammar, has_answer_grammar=bool(answer))


def compiled(grammar: str) -> Search[str]:
    """A grammar that can be enforced; "" is free."""
    error = (yield grammar) if grammar else ""
    if error:
        raise RequestError(400, "grammar", error)
    return grammar


def advance(search: Search[Found], error: str | None = None) -> Grammar | Found:
    """Let a search go on, after the first time with how its grammar was compiled: what it asks for, or has found."""
    try:
        return Grammar(search.send(error))
    except StopIteration as end:
        found: Found = end.value
        return found
