"""The two formats of Mistral, after the special token [TOOL_CALLS]: a list of JSON objects, or name and arguments.

    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]
    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}

Newer models write the second, and only that; which one a model writes, its template shows.
"""

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, NotACall, Reading, is_name_part
from roost.tools.definitions import ToolRequest
from roost.tools.format import CallSink, ToolFormat
from roost.tools.json_calls import json_calls, read_json_call
from roost.tools.json_reader import read_object
from roost.tools.lark import Lark, json_value, literal, marker

_CALLS, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read_list(chars: Chars, calls: CallSink) -> Reading[None]:
    yield from chars.skip_blanks()
    yield from chars.expect("[")
    yield from read_json_call(chars, calls)
    while (yield from chars.skip_blanks()) == ",":
        yield from chars.take()
        chars.is_closing = False
        yield from read_json_call(chars, calls)
    yield from chars.expect("]")


def _list(lark: Lark, request: ToolRequest, tokenizer: Tokenizer) -> str:
    call = json_calls(lark, request.callable, "arguments")
    return f'/ ?\\[/ {call} (", " {call})* "]"' if request.is_parallel else f'/ ?\\[/ {call} "]"'


def _read_named(chars: Chars, calls: CallSink) -> Reading[None]:
    yield from chars.skip_blanks()
    name = yield from chars.word(is_name_part)
    if (yield from chars.either((_ARGS, _CALL_ID))) == _CALL_ID:
        yield from chars.word(is_name_part)
        yield from chars.expect(_ARGS)
    if (yield from chars.skip_blanks()) != "{":
        raise NotACall
    calls.open(name)
    yield from read_object(chars, calls.write)
    calls.close()


def _named(lark: Lark, request: ToolRequest, tokenizer: Tokenizer) -> str:
    args = marker(_ARGS, tokenizer)
    calls = (f"{literal(tool.name)} {args} {json_value(tool.schema())}" for tool in request.callable)
    return f"({' | '.join(calls)})"


MISTRAL = ToolFormat(name="mistral", marker=_CALLS, tokens=(_CALLS,), has_short_ids=True, read=_read_list, block=_list)
MISTRAL_ARGS = ToolFormat(
    name="mistral-args",
    marker=_CALLS,
    between="",
    tokens=(_CALLS, _ARGS, _CALL_ID),
    has_short_ids=True,
    read=_read_named,
    block=_named,
)
