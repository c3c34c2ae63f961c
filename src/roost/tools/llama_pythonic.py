"""The pythonic format of Llama 3.2 and 4: the answer is a Python list of calls.

    [add(a=1, b=2), now()]

It begins the answer, and nothing follows it. Arguments are Python literals and become JSON as they are read.
"""

import json
import re
from typing import Any

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading, is_name_part
from roost.tools.definitions import ToolRequest
from roost.tools.format import CallSink, ToolFormat
from roost.tools.lark import Lark, json_value, literal
from roost.tools.parameters import Parameter, parameters_of, types_of, unlisted_keyword, values_of
from roost.tools.python_reader import read_python

_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}", re.ASCII)


def _read(chars: Chars, calls: CallSink) -> Reading[None]:
    yield from chars.expect("[")
    yield from _read_call(chars, calls)
    while (yield from chars.skip_blanks()) == ",":
        yield from chars.take()
        chars.is_closing = False
        yield from _read_call(chars, calls)
    yield from chars.expect("]")


def _unenforced(schema: dict[str, Any]) -> str | None:
    """What ties parameters together, and parameters that no Python name stands for."""
    if keyword := unlisted_keyword(schema):
        return keyword
    is_named = all(_KEY.fullmatch(each.name) for each in parameters_of(schema) or ())
    return None if is_named else "properties"


def _block(lark: Lark, request: ToolRequest, tokenizer: Tokenizer) -> str:
    rules = []
    for index, tool in enumerate(request.callable):
        arguments = _arguments(lark, parameters_of(tool.schema()), f"call_{index}")
        rules.append(lark.add(f"call_{index}", f'{literal(tool.name + "(")} {arguments} ")"'))
    call = f"({' | '.join(rules)})"
    return f'"[" {call} (", " {call})* "]"' if request.is_parallel else f'"[" {call} "]"'


LLAMA_PYTHONIC = ToolFormat(name="llama-pythonic", first="[", read=_read, block=_block, unenforced=_unenforced)


def _arguments(lark: Lark, parameters: list[Parameter] | None, prefix: str) -> str:
    """Parameters in their order; those that are not required may be left out, with their comma."""
    if parameters is None:
        one = f"/{_KEY.pattern}=/ {json_value({})}"
        return f'({one} (", " {one})*)?'
    first, rest = '""', '""'  # of what comes after the parameter at hand: as the first argument, or after another
    for index, each in reversed(list(enumerate(parameters))):
        value = f"{literal(each.name + '=')} {_value(each.schema)}"
        then = lark.add(f"{prefix}_after_{index}", rest)
        if each.is_required:
            first, rest = f"{value} {then}", f'", " {value} {then}'
        else:
            first, rest = f"({value} {then} | {first})", f'(", " {value})? {then}'
    return first


def _value(schema: dict[str, Any]) -> str:
    """A literal by its schema. Inside of lists and objects it is as in JSON, which the reader knows too."""
    if values := values_of(schema):
        return f"({' | '.join(literal(_written(each)) for each in values)})"
    return "/True|False/" if types_of(schema) == frozenset(["boolean"]) else json_value(schema)


def _written(value: Any) -> str:
    """A value as Python writes it."""
    return str(value) if value is None or isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _read_call(chars: Chars, calls: CallSink) -> Reading[None]:
    yield from chars.skip_blanks()
    name = yield from chars.word(is_name_part)
    yield from chars.expect("(")
    calls.open(name)
    num_read = 0
    while (yield from chars.skip_blanks()) != ")":
        if num_read:
            yield from chars.expect(",")
            if (yield from chars.skip_blanks()) == ")":
                break
        key = yield from chars.word(is_name_part)
        yield from chars.skip_blanks()
        yield from chars.expect("=")
        calls.write(f"{', ' if num_read else '{'}{json.dumps(key)}: ")
        num_read += 1
        yield from read_python(chars, calls.write)
    yield from chars.take()
    calls.write("}" if num_read else "{}")
    calls.close()
