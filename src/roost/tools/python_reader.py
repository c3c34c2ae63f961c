"""Python literals, read one character at a time and passed on as JSON.

Takes strings, numbers, True, False, None, lists, tuples and dicts with strings as keys, to any depth; JSON's own
spellings (true, false, null) too, since models mix them. Strings come as they are read, anything else when it is whole.
Called by the reader of pythonic calls, and for values between tags.
"""

import json
import math
import re
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from roost.tools.chars import Chars, NotACall, Reading

_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}
_JSON_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?", re.ASCII)
_CLOSERS = {"[": "]", "(": ")", "{": "}"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_ESCAPE_LENS = {"x": 2, "u": 4, "U": 8}  # letter -> hexadecimal digits after it


def read_python(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    """Pass one literal on as JSON."""
    closers: list[str] = []  # of the containers that are open, as Python writes them
    while True:
        yield from _read_value(chars, write, closers)
        while True:  # after a value: its containers may end
            if not closers:
                return
            char = yield from chars.skip_blanks()
            if char == ",":
                yield from chars.take()
                char = yield from chars.skip_blanks()
                if char != closers[-1]:
                    break
            if char != closers[-1]:
                raise NotACall
            yield from chars.take()
            write("}" if closers.pop() == "}" else "]")
        write(", ")
        if closers[-1] == "}":
            yield from _read_key(chars, write)


def as_json(text: str) -> str | None:
    """A whole Python or JSON literal as JSON, None if it is neither."""
    with suppress(ValueError, RecursionError):
        json.loads(text, parse_constant=_refuse)
        return text.strip()
    chars, written, left = Chars(), list[str](), deque(text + "\n")  # the blank ends a number
    reading = read_python(chars, written.append)
    try:
        next(reading)
        while left:
            reading.send(left.popleft())
    except NotACall:
        return None
    except StopIteration:
        return None if (chars.ahead + "".join(left)).strip() else "".join(written)
    return None


def _read_value(chars: Chars, write: Callable[[str], None], closers: list[str]) -> Reading[None]:
    """Pass on a scalar, an empty container, or the beginning of a container up to its first scalar."""
    while True:
        char = yield from chars.skip_blanks()
        if char in "\"'":
            yield from _read_string(chars, write)
            return
        if char not in _CLOSERS:
            yield from _read_scalar(chars, write)
            return
        yield from chars.take()
        write("{" if char == "{" else "[")
        if (yield from chars.skip_blanks()) == _CLOSERS[char]:
            yield from chars.take()
            write("}" if char == "{" else "]")
            return
        closers.append(_CLOSERS[char])
        if char == "{":
            yield from _read_key(chars, write)


def _read_key(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    if (yield from chars.skip_blanks()) not in "\"'":
        raise NotACall
    yield from _read_string(chars, write)
    yield from chars.skip_blanks()
    yield from chars.expect(":")
    write(": ")


def _read_string(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    quote = yield from chars.take()
    write('"')
    while (char := (yield from chars.take())) != quote:
        if char == "\n":
            raise NotACall
        if char == "\\":
            char = yield from _escaped(chars)
        write(json_chars(char))
    write('"')


def json_chars(text: str) -> str:
    """Text as it stands between the quotes of a JSON string."""
    is_whole = not any("\ud800" <= char <= "\udfff" for char in text)
    return json.dumps(text, ensure_ascii=not is_whole)[1:-1]


def _escaped(chars: Chars) -> Reading[str]:
    """The character that an escape stands for; an unknown escape stands for itself, as in Python."""
    letter = yield from chars.take()
    if letter in _ESCAPES:
        return _ESCAPES[letter]
    if letter in _ESCAPE_LENS:
        digits = ""
        for _ in range(_ESCAPE_LENS[letter]):
            digits += yield from chars.take()
        if not re.fullmatch("[0-9a-fA-F]+", digits) or int(digits, 16) > sys.maxunicode:
            raise NotACall
        return chr(int(digits, 16))
    return letter if letter in "\"'\\" else "\\" + letter


def _read_scalar(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    found = yield from chars.word(_is_part)
    if found in _WORDS:
        write(_WORDS[found])
    else:
        write(found if _JSON_NUMBER.fullmatch(found) else _number(found))


def _is_part(char: str) -> bool:
    return char.isascii() and (char.isalnum() or char in "+-._")


def _number(text: str) -> str:
    """A number as only Python writes it: 1_000, 0x1f, .5, 1."""
    with suppress(ValueError):
        return str(int(text, 0))
    with suppress(ValueError):
        if math.isfinite(value := float(text)):
            return json.dumps(value)
    raise NotACall


def _refuse(constant: str) -> float:
    raise ValueError(constant)
