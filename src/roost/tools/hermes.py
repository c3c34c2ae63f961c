"""The format of Hermes, Qwen 2.5 and Qwen 3: each call is a JSON object between tags.

<tool_call>
{"name": "add", "arguments": {"a": 1, "b": 2}}
</tool_call>
"""

import json
from typing import Any

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading
from roost.tools.definitions import ToolRequest
from roost.tools.format import CallSink, ToolFormat
from roost.tools.json_calls import json_calls, read_json_call
from roost.tools.lark import Lark, marker

_BEGIN, _END = "<tool_call>", "</tool_call>"


def _read(chars: Chars, calls: CallSink) -> Reading[None]:
    yield from read_json_call(chars, calls)
    yield from chars.skip_blanks()
    yield from chars.expect(_END)


def _block(lark: Lark, request: ToolRequest, tokenizer: Tokenizer) -> str:
    return f'"\\n" {json_calls(lark, request.callable, "arguments")} "\\n" {marker(_END, tokenizer)}'


HERMES = ToolFormat(name="hermes", marker=_BEGIN, between="\n", tokens=(_BEGIN, _END), read=_read, block=_block)


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """A call as text."""
    body = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{_BEGIN}\n{body}\n{_END}"
