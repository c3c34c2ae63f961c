"""Answer grammars: the fields of a body that say what its output must match, whichever server's names they have.

OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`, SGLang's `json_schema`, `regex` and `ebnf` are
one thing, so one of them may be given. Long ones are read beside the event loop, and all are compiled beside the engine
before the request is sent. Called by the endpoints.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request

from roost.errors import RequestError
from roost.front.options import Options, milliseconds
from roost.grammar.forms import (
    choice_grammar,
    ebnf_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from roost.server.generation import while_connected
from roost.server.schema import OpenAiBody, SamplingBody, refuse_unsupported
from roost.server.state import ServerState, renamed_to
from roost.text.language import text_len
from roost.tools.answer_form import AnswerForm, Found, Search, compiled, find_form
from roost.tools.definitions import ToolRequest, tools_len
from roost.values import shown

Form = Callable[[Any], str]


def _any_object(_: object) -> str:
    return json_object_grammar()


_RESPONSE_TYPES = ("text", "json_object", "json_schema")
# SGLang's names, which bodies of OpenAI's endpoints know too, and vLLM's older ones
_SGLANG: dict[str, Form] = {"json_schema": json_schema_grammar, "regex": regex_grammar, "ebnf": ebnf_grammar}
_GUIDED: dict[str, Form] = {
    "guided_json": json_schema_grammar,
    "guided_regex": regex_grammar,
    "guided_choice": choice_grammar,
    "guided_grammar": ebnf_grammar,
}
_STRUCTURED: dict[str, Form] = {
    "json": json_schema_grammar,
    "regex": regex_grammar,
    "choice": choice_grammar,
    "grammar": ebnf_grammar,
    "json_object": _any_object,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerGrammar:
    """What an answer must match, and where the client says so."""

    param: str = "grammar"
    form: Form = str
    value: Any = ""  # of the field; "": nothing is said, and the answer is free

    async def text(self, server: ServerState) -> str:
        """The grammar as the engine reads it, not compiled yet."""
        try:
            return await server.offload.run(text_len(self.value), lambda: self.form(self.value))
        except RequestError as error:
            raise renamed_to(error, self.param) from error


def openai_grammar(body: OpenAiBody) -> AnswerGrammar:
    """What the answer to a completion must match."""
    found = [*_given(body, {**_GUIDED, **_SGLANG}), *_response_format(body), *_structured_outputs(body)]
    return _only(found)


def native_grammar(params: SamplingBody, path: str) -> AnswerGrammar:
    """What the output must match, as SGLang's sampling_params say it."""
    return _only([*_given(params, _SGLANG, path)])


async def with_grammar(request: Request, options: Options, grammar: AnswerGrammar) -> Options:
    """The options of a request whose output must match a grammar from its first token; the grammar is compiled."""
    server: ServerState = request.app.state.server
    text = await grammar.text(server)
    if not text:
        return options
    found = await _found(request, compiled(text), len(text), options.timeout_s, grammar.param)
    return replace(options, grammar=found)


async def chat_form(
    request: Request, tools: ToolRequest | None, grammar: AnswerGrammar, timeout_s: float | None
) -> AnswerForm:
    """The form of the answers in a conversation; its grammar is compiled."""
    server: ServerState = request.app.state.server
    text = await grammar.text(server)
    if tools is None and not text:
        return AnswerForm(formats=server.formats)
    search = find_form(server.formats, server.language.tokenizer, tools, text)
    return await _found(request, search, len(text) + tools_len(tools), timeout_s, grammar.param)


async def _found(request: Request, search: Search[Found], length: int, timeout_s: float | None, param: str) -> Found:
    """What a search finds while the client is there and its time not up; `param` has the grammar."""
    server: ServerState = request.app.state.server
    if timeout_s is not None:
        milliseconds("timeout", timeout_s)  # refuses what is no time
    try:
        return await while_connected(request, server.find(search, length), timeout_s)
    except TimeoutError as error:
        raise RequestError(504, "timeout", f"the grammar was not compiled within {timeout_s:g} s") from error
    except RequestError as error:
        raise (renamed_to(error, param) if error.param == "grammar" else error) from error


def _response_format(body: OpenAiBody) -> Iterator[AnswerGrammar]:
    given, path = body.response_format, "response_format.json_schema"
    if given is None:
        return
    if given.type not in _RESPONSE_TYPES:
        reason = f"must be {_RESPONSE_TYPES[0]}, {_RESPONSE_TYPES[1]} or {_RESPONSE_TYPES[2]}, got {shown(given.type)}"
        raise RequestError(400, "response_format.type", reason)
    if (given.type == "json_schema") != (given.json_schema is not None):
        raise RequestError(
            400, path, "is required" if given.type == "json_schema" else f"is not for the type {given.type}"
        )
    if given.json_schema is not None:
        yield AnswerGrammar(param=f"{path}.schema", form=json_schema_grammar, value=given.json_schema.schema)
    elif given.type == "json_object":
        yield AnswerGrammar(param="response_format", form=_any_object, value=given.type)


def _structured_outputs(body: OpenAiBody) -> Iterator[AnswerGrammar]:
    given, path = body.structured_outputs, "structured_outputs."
    if given is None:
        return
    refuse_unsupported(given, path)
    found = [each for each in _given(given, _STRUCTURED, path) if each.value is not False]
    if not found:
        raise RequestError(400, "structured_outputs", f"must have one of {', '.join(_STRUCTURED)}")
    yield from found


def _given(body: Any, forms: dict[str, Form], path: str = "") -> Iterator[AnswerGrammar]:
    """The fields that a body has."""
    for name, form in forms.items():
        if (value := getattr(body, name)) is not None:
            yield AnswerGrammar(param=path + name, form=form, value=value)


def _only(found: list[AnswerGrammar]) -> AnswerGrammar:
    if len(found) > 1:
        raise RequestError(400, found[1].param, f"cannot be given with {found[0].param}: an output has one grammar")
    return found[0] if found else AnswerGrammar()
