"""The JSON format of Llama 3: the answer is one object, or several with semicolons between them.

    {"name": "add", "parameters": {"a": 1, "b": 2}}

It begins the answer, or comes after the special token <|python_tag|>. Nothing follows it.
"""

from collections.abc import Sequence

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading
from roost.tools.definitions import Tool
from roost.tools.format import CallSink
from roost.tools.json_calls import JsonArguments, json_calls, read_json_call
from roost.tools.lark import Lark


class LlamaJson(JsonArguments):
    """Bare JSON."""

    name = "llama3-json"
    marker = "<|python_tag|>"
    first = "{"
    between = None
    tokens = ("<|python_tag|>",)

    def read(self, chars: Chars, calls: CallSink) -> Reading[None]:
        """Read objects while semicolons join them."""
        yield from read_json_call(chars, calls)
        while (yield from chars.skip_blanks()) == ";":
            yield from chars.take()
            chars.is_closing = False
            yield from read_json_call(chars, calls)

    def block(self, lark: Lark, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_parallel: bool) -> str:
        """One object, or several."""
        call = json_calls(lark, tools, "parameters")
        return f'{call} ("; " {call})*' if is_parallel else call
