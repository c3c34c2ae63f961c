"""Calls that are JSON objects with a name and arguments: what Hermes, Llama and Mistral formats share.

Called by those formats.
"""

from collections.abc import Sequence
from typing import Any

from roost.tools.chars import Chars, NotACall, Reading, is_name_part
from roost.tools.definitions import Tool
from roost.tools.format import CallSink
from roost.tools.json_reader import read_object, read_string
from roost.tools.lark import Lark, json_value, literal


def read_json_call(chars: Chars, calls: CallSink) -> Reading[None]:
    """Read one object: a name, then arguments or parameters, then nothing of importance."""
    yield from chars.skip_blanks()
    yield from chars.expect("{")
    yield from chars.skip_blanks()
    if (yield from chars.either(('"name"', '"type"'))) == '"type"':  # some models say that it is a function
        yield from _expect_all(chars, ":", '"function"', ",", '"name"')
    yield from _expect_all(chars, ":", '"')
    name = yield from chars.word(is_name_part)
    yield from chars.expect('"')
    if (yield from chars.skip_blanks()) == "}":
        calls.open(name)
        calls.write("{}")
    else:
        yield from _expect_all(chars, ",")
        yield from chars.skip_blanks()
        yield from chars.either(('"arguments"', '"parameters"'))
        yield from _expect_all(chars, ":")
        if (yield from chars.skip_blanks()) != "{":
            raise NotACall
        calls.open(name)
        yield from read_object(chars, calls.write)
    calls.close()
    while (yield from chars.skip_blanks()) == ",":  # an id, say
        yield from _expect_all(chars, ",")
        yield from _read_text_field(chars)
    yield from chars.expect("}")
    chars.use()


def json_calls(lark: Lark, tools: Sequence[Tool], key: str) -> str:
    """The grammar of one call of any of the tools; `key`: what arguments are called."""
    rules = []
    for index, tool in enumerate(tools):
        head = literal(f'{{"name": "{tool.name}", "{key}": ')
        rules.append(lark.add(f"call_{index}", f'{head} {json_value(tool.schema())} "}}"'))
    return f"({' | '.join(rules)})"


class JsonArguments:
    """A format whose arguments are JSON: whatever schema can be enforced for JSON can be for it."""

    has_short_ids = False

    def unenforced(self, schema: dict[str, Any]) -> str | None:
        """Nothing."""
        return None


def _read_text_field(chars: Chars) -> Reading[None]:
    yield from chars.skip_blanks()
    yield from read_string(chars, _ignore)
    yield from _expect_all(chars, ":")
    yield from chars.skip_blanks()
    yield from read_string(chars, _ignore)


def _expect_all(chars: Chars, *texts: str) -> Reading[None]:
    """Take these texts, with any whitespace before each."""
    for text in texts:
        yield from chars.skip_blanks()
        yield from chars.expect(text)


def _ignore(text: str) -> None:
    pass
