"""The format of Hermes, Qwen 2.5 and Qwen 3: each call is a JSON object between tags.

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

import json
from collections.abc import Sequence
from typing import Any

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading
from roost.tools.definitions import Tool
from roost.tools.format import CallSink
from roost.tools.json_calls import JsonArguments, json_calls, read_json_call
from roost.tools.lark import Lark, marker

_END = "</tool_call>"


class Hermes(JsonArguments):
    """JSON between tags."""

    name = "hermes"
    marker = "<tool_call>"
    first = ""
    between = "\n"
    tokens = ("<tool_call>", _END)

    def read(self, chars: Chars, calls: CallSink) -> Reading[None]:
        """Read one call and its closing tag."""
        yield from read_json_call(chars, calls)
        yield from chars.skip_blanks()
        yield from chars.expect(_END)

    def block(self, lark: Lark, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_parallel: bool) -> str:
        """One call on a line of its own."""
        return f'"\\n" {json_calls(lark, tools, "arguments")} "\\n" {marker(_END, tokenizer)}'


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as text."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{Hermes.marker}\n{body}\n{_END}"
