"""The two formats of Mistral, after the special token [TOOL_CALLS]: a list of JSON objects, or name and arguments.

    [TOOL_CALLS][{"name": "add", "arguments": {"a": 1, "b": 2}}]
    [TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}

Newer models write the second, and only that; which one a model writes, its template shows.
"""

from collections.abc import Sequence

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, NotACall, Reading, is_name_part
from roost.tools.definitions import Tool
from roost.tools.format import CallSink
from roost.tools.json_calls import JsonArguments, json_calls, read_json_call
from roost.tools.json_reader import read_object
from roost.tools.lark import Lark, json_value, literal, marker

_ARGS, _CALL_ID = "[ARGS]", "[CALL_ID]"


class _Mistral(JsonArguments):
    """What both have in common."""

    marker = "[TOOL_CALLS]"
    first = ""
    tokens = ("[TOOL_CALLS]", _ARGS, _CALL_ID)
    has_short_ids = True


class MistralList(_Mistral):
    """A list of objects."""

    name = "mistral"
    between = None

    def read(self, chars: Chars, calls: CallSink) -> Reading[None]:
        """Read the list."""
        yield from chars.skip_blanks()
        yield from chars.expect("[")
        yield from read_json_call(chars, calls)
        while (yield from chars.skip_blanks()) == ",":
            yield from chars.take()
            chars.is_closing = False
            yield from read_json_call(chars, calls)
        yield from chars.expect("]")

    def block(self, lark: Lark, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_parallel: bool) -> str:
        """The list."""
        call = json_calls(lark, tools, "arguments")
        return f'/ ?\\[/ {call} (", " {call})* "]"' if is_parallel else f'/ ?\\[/ {call} "]"'


class MistralNamed(_Mistral):
    """A name and its arguments."""

    name = "mistral-args"
    between = ""

    def read(self, chars: Chars, calls: CallSink) -> Reading[None]:
        """Read one call."""
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

    def block(self, lark: Lark, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_parallel: bool) -> str:
        """One call."""
        args = marker(_ARGS, tokenizer)
        return f"({' | '.join(f'{literal(tool.name)} {args} {json_value(tool.schema())}' for tool in tools)})"
