"""Calls that are JSON objects with a name and arguments: what Hermes, Llama and Mistral formats share.

Called by those formats.
"""

from collections.abc import Sequence

from roost.tools.chars import Chars, NotACall, Reading, is_name_part
from roost.tools.definitions import Tool
from roost.tools.format import CallSink
from roost.tools.json_reader import read_object, read_string
from roost.tools.lark import Lark, json_value, literal

_ARGUMENTS = ('"arguments"', '"parameters"')


def read_json_call(chars: Chars, calls: CallSink) -> Reading[None]:
    """Read one object: a name, and arguments or parameters; whatever texts follow, an id say, do not matter."""
    yield from _expect_all(chars, "{")
    yield from chars.skip_blanks()
    key = yield from chars.either(('"name"', '"type"', *_ARGUMENTS))
    if key == '"type"':  # some models say that it is a function
        yield from _expect_all(chars, ":", '"function"', ",", '"name"')
    yield from _expect_all(chars, ":")
    if key in _ARGUMENTS:
        yield from _read_arguments_first(chars, calls)
    else:
        yield from _read_name_first(chars, calls)
    calls.close()
    while (yield from chars.skip_blanks()) == ",":
        yield from chars.take()
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


def _read_name_first(chars: Chars, calls: CallSink) -> Reading[None]:
    name = yield from _read_name(chars)
    if (yield from chars.skip_blanks()) == "}":
        calls.open(name)
        calls.write("{}")
        return
    yield from _expect_all(chars, ",")
    yield from chars.skip_blanks()
    yield from chars.either(_ARGUMENTS)
    yield from _expect_all(chars, ":")
    if (yield from chars.skip_blanks()) != "{":
        raise NotACall
    calls.open(name)
    yield from read_object(chars, calls.write)


def _read_arguments_first(chars: Chars, calls: CallSink) -> Reading[None]:
    """The order of older Hermes models; nothing can be passed on before the name is known."""
    found: list[str] = []
    yield from chars.skip_blanks()
    yield from read_object(chars, found.append)
    yield from _expect_all(chars, ",", '"name"', ":")
    calls.open((yield from _read_name(chars)))
    calls.write("".join(found))


def _read_name(chars: Chars) -> Reading[str]:
    yield from _expect_all(chars, '"')
    name = yield from chars.word(is_name_part)
    yield from chars.expect('"')
    return name


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
