"""The format of Qwen3-Coder: a tag for the call, one for the function, one for each parameter, each on its line.

    <tool_call> <function=add> <parameter=a> 1 </parameter> </function> </tool_call>

A text stands there as it is, anything else as JSON; a parameter's schema says which. Arguments become JSON as they are
read: texts as they come, other values when they are whole.
"""

import json
from typing import Any

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import WORD_MAX, Chars, Reading, is_name_part
from roost.tools.definitions import ToolRequest
from roost.tools.format import CallSink, ToolFormat
from roost.tools.lark import Lark, json_value, literal, marker
from roost.tools.parameters import Parameter, parameters_of, types_of, unlisted_keyword, values_of
from roost.tools.python_reader import as_json, json_chars
from roost.tools.reasoning import overlap

_BEGIN, _END = "<tool_call>", "</tool_call>"
_FUNCTION, _FUNCTION_END = "<function=", "</function>"
_PARAMETER, _PARAMETER_END = "<parameter=", "</parameter>"
_SAYS_NO_MORE = ("title", "description", "examples", "default", "$defs", "definitions")
_BESIDE_TEXT = frozenset(["string", "null", "boolean"])  # types that can be told from a text by their few values


def _read(chars: Chars, calls: CallSink) -> Reading[None]:
    yield from chars.skip_blanks()
    yield from chars.expect(_FUNCTION)
    name = yield from chars.word(is_name_part)
    yield from chars.expect(">")
    schemas = {each.name: each.schema for each in parameters_of(calls.open(name)) or ()}
    num_read = 0
    while True:
        yield from chars.skip_blanks()
        if (yield from chars.either((_PARAMETER, _FUNCTION_END))) == _FUNCTION_END:
            break
        key = yield from chars.word(lambda char: char not in ">\n")
        yield from chars.expect(">")
        calls.write(f"{', ' if num_read else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        num_read += 1
        yield from _read_value(chars, calls, schemas.get(key, {}))
    calls.write("}" if num_read else "{}")
    calls.close()
    yield from chars.skip_blanks()
    yield from chars.expect(_END)


def _unenforced(schema: dict[str, Any]) -> str | None:
    """What ties parameters together, or says more of a text than its values."""
    if keyword := unlisted_keyword(schema):
        return keyword
    for parameter in parameters_of(schema) or []:
        if len(parameter.name) > WORD_MAX or not parameter.name or any(char in parameter.name for char in ">\n"):
            return "properties"
        if keyword := _unenforced_text(parameter.schema):
            return keyword
    return None


def _block(lark: Lark, request: ToolRequest, tokenizer: Tokenizer) -> str:
    lark.add("value[lazy]", f"ANY {literal(_PARAMETER_END)}")
    calls = []
    for index, tool in enumerate(request.callable):
        parameters = parameters_of(tool.schema())
        head = literal(f"{_FUNCTION}{tool.name}>\n")
        if parameters is None:
            body = f'("{_PARAMETER}" /[^>\\n]{{1,64}}/ ">\\n" value "\\n")*'
        else:
            body = " ".join(_parameter(each) for each in parameters)
        calls.append(lark.add(f"call_{index}", f"{head} {body} {literal(_FUNCTION_END)}"))
    return f'"\\n" ({" | ".join(calls)}) "\\n" {marker(_END, tokenizer)}'


QWEN_CODER = ToolFormat(
    name="qwen3-coder",
    marker=_BEGIN,
    between="\n",
    tokens=(_BEGIN, _END),
    read=_read,
    block=_block,
    unenforced=_unenforced,
)


def _parameter(parameter: Parameter) -> str:
    head, tail = literal(f"{_PARAMETER}{parameter.name}>\n"), literal(f"\n{_PARAMETER_END}\n")
    values, types = values_of(parameter.schema), types_of(parameter.schema)
    if values:
        body = f"({' | '.join(literal(_written(each)) for each in values)}) {tail}"
    elif types is None or "string" in types:
        body = 'value "\\n"'
    elif types == frozenset(["boolean"]):
        body = f"/true|false|True|False/ {tail}"
    else:
        body = f"{json_value(parameter.schema)} {tail}"
    return f"{head} {body}" if parameter.is_required else f"({head} {body})?"


def _unenforced_text(schema: dict[str, Any]) -> str | None:
    """The keyword that says more of a text than this format can hold it to; None also if it is no text."""
    types = types_of(schema)
    if values_of(schema) or (types is not None and "string" not in types):
        return None
    branches = [schema, *(each for each in schema.get("anyOf", []) if isinstance(each, dict))]
    said = [keyword for branch in branches for keyword in branch if keyword not in _SAYS_NO_MORE]
    if types is None or types <= _BESIDE_TEXT:
        return next((keyword for keyword in said if types is None or keyword not in ("type", "anyOf")), None)
    return "anyOf" if "anyOf" in schema else "type"


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _read_value(chars: Chars, calls: CallSink, schema: dict[str, Any]) -> Reading[None]:
    """Read a value up to its closing tag; the line breaks next to the tags are not part of it."""
    if (yield from chars.peek()) == "\n":
        yield from chars.take()
    is_text = types_of(schema) == frozenset(["string"])
    if is_text:
        calls.write('"')
    pending, end = "", "\n" + _PARAMETER_END
    while not pending.endswith(_PARAMETER_END):
        pending += yield from chars.take()
        if is_text and not pending.endswith(_PARAMETER_END):
            certain = len(pending) - max(overlap(pending, end), overlap(pending, _PARAMETER_END))
            if certain:
                calls.write(json_chars(pending[:certain]))
            pending = pending[certain:]
    value = pending.removesuffix(_PARAMETER_END).removesuffix("\n")
    calls.write(json_chars(value) + '"' if is_text else _as_json(value, schema))


def _as_json(value: str, schema: dict[str, Any]) -> str:
    """A value that need not be a text: what its schema lists or its type allows, and else a text after all."""
    for each in values_of(schema):
        if _written(each) == value:
            return json.dumps(each, ensure_ascii=False)
    found, types = as_json(value), types_of(schema)
    is_allowed = found is not None and (types is None or "other" in types or not types.isdisjoint(_kinds(found)))
    return found if found is not None and is_allowed and found[0] != '"' else f'"{json_chars(value)}"'


def _kinds(found: str) -> frozenset[str]:
    """The types that a JSON text may be said to have."""
    by_first = {"{": "object", "[": "array", "t": "boolean", "f": "boolean", "n": "null", '"': "string"}
    return frozenset([by_first[found[0]]] if found[0] in by_first else ["number", "integer"])
