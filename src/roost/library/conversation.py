"""Conversations in the library: what a call says of tools and schemas, as the engine takes it.

Reads the arguments, has the grammar compiled, and gives the form of the answers. Called by `LLM` and by its sessions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from roost.errors import RequestError
from roost.front.options import Options, plain_options
from roost.grammar.forms import json_schema_grammar
from roost.library.engine_thread import EngineThread
from roost.text.tokenizer import Tokenizer
from roost.tools.answer_form import AnswerForm, compiled, find_form
from roost.tools.definitions import ToolRequest, read_tools
from roost.tools.model_formats import ModelFormats

Tools = Sequence[dict[str, Any]]  # as OpenAI has them
ToolChoice = str | dict[str, Any]  # none, auto, required, or a tool
Schema = Any  # a JSON schema, as a dict or a text, or a pydantic model


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatArguments:
    """What a caller says beside the messages."""

    options: Options
    tools: Tools | None
    tool_choice: ToolChoice | None
    schema: Schema | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatCall:
    """The same as the engine takes it."""

    options: Options  # with the grammar of the whole output
    tools: ToolRequest | None
    form: AnswerForm


def read_chat(engine: EngineThread, formats: ModelFormats, tokenizer: Tokenizer, asked: ChatArguments) -> ChatCall:
    """What a call asks for; raises RequestError for the argument that cannot be honoured."""
    options, schema = plain_options(asked.options), asked.schema
    if schema is not None and options.grammar:
        raise RequestError(400, "schema", "cannot be given with options.grammar: an output has one grammar")
    try:
        answer = options.grammar if schema is None else json_schema_grammar(schema)
        given = list(asked.tools) if isinstance(asked.tools, tuple) else asked.tools
        tools = read_tools(given, asked.tool_choice)
        form = engine.find(find_form(formats, tokenizer, tools, answer))
    except RequestError as error:
        is_schema = schema is not None and error.param == "grammar"
        raise (RequestError(error.status, "schema", error.reason) if is_schema else error) from error
    return ChatCall(options=replace(options, grammar=form.grammar), tools=tools, form=form)


def compiled_options(engine: EngineThread, options: Options) -> Options:
    """The options of plain prompts, their grammar compiled."""
    options = plain_options(options)
    engine.find(compiled(options.grammar))
    return options
