"""The JSON format of Llama 3: the answer is one object, or several with semicolons between them.

    {"name": "add", "parameters": {"a": 1, "b": 2}}

It begins the answer, or comes after the special token <|python_tag|>. Nothing follows it.
"""

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading
from roost.tools.definitions import ToolRequest
from roost.tools.format import CallSink, ToolFormat
from roost.tools.json_calls import json_calls, read_json_call
from roost.tools.lark import Lark

_TAG = "<|python_tag|>"


def _read(chars: Chars, calls: CallSink) -> Reading[None]:
    yield from read_json_call(chars, calls)
    while (yield from chars.skip_blanks()) == ";":
        yield from chars.take()
        chars.is_closing = False
        yield from read_json_call(chars, calls)


def _block(lark: Lark, request: ToolRequest, tokenizer: Tokenizer) -> str:
    call = json_calls(lark, request.callable, "parameters")
    return f'{call} ("; " {call})*' if request.is_parallel else call


LLAMA_JSON = ToolFormat(name="llama3-json", marker=_TAG, first="{", tokens=(_TAG,), read=_read, block=_block)
