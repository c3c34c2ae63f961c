"""JSON, read one character at a time: passes an object on as it comes, and knows where it ends.

Takes what RFC 8259 takes and nothing else, to any depth, without recursion. Never builds the value. Called by the
readers of formats that write arguments as JSON.
"""

import re
from collections.abc import Callable

from roost.tools.chars import BLANKS, Chars, NotACall, Reading

_SCALAR = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null", re.ASCII)
_SCALAR_CHARS = frozenset("+-.0123456789abcdefghijklmnopqrstuvwxyzE")
_ESCAPED = frozenset('"\\/bfnrt')
_HEX = frozenset("0123456789abcdefABCDEF")


def read_object(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    """Pass one object on, character by character."""
    closers: list[str] = []  # of the containers that are open
    if (yield from chars.peek()) != "{":
        raise NotACall
    while True:
        yield from _read_value(chars, write, closers)
        while True:  # after a value: its containers may end
            if not closers:
                return
            yield from _pass_blanks(chars, write)
            char = yield from chars.take()
            if char != closers[-1]:
                break
            closers.pop()
            write(char)
        if char != ",":
            raise NotACall
        write(char)
        if closers[-1] == "}":
            yield from _read_key(chars, write)


def _read_value(chars: Chars, write: Callable[[str], None], closers: list[str]) -> Reading[None]:
    """Pass on a scalar, an empty container, or the beginning of a container up to its first scalar."""
    while True:
        yield from _pass_blanks(chars, write)
        char = yield from chars.peek()
        if char == '"':
            yield from read_string(chars, write)
            return
        if char not in "{[":
            yield from _read_scalar(chars, write)
            return
        write((yield from chars.take()))
        closer = "}" if char == "{" else "]"
        yield from _pass_blanks(chars, write)
        if (yield from chars.peek()) == closer:
            write((yield from chars.take()))
            return
        closers.append(closer)
        if char == "{":
            yield from _read_key(chars, write)


def _read_key(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    yield from _pass_blanks(chars, write)
    yield from read_string(chars, write)
    yield from _pass_blanks(chars, write)
    yield from chars.expect(":")
    write(":")


def read_string(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    """Pass on a string with its quotes."""
    yield from chars.expect('"')
    write('"')
    while (char := (yield from chars.take())) != '"':
        if char < " ":
            raise NotACall
        if char == "\\":
            char += yield from _escaped(chars)
        write(char)
    write('"')


def _escaped(chars: Chars) -> Reading[str]:
    """What comes after a backslash."""
    char = yield from chars.take()
    if char in _ESCAPED:
        return char
    if char != "u":
        raise NotACall
    for _ in range(4):
        digit = yield from chars.take()
        if digit not in _HEX:
            raise NotACall
        char += digit
    return char


def _read_scalar(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    found = ""
    while (yield from chars.peek()) in _SCALAR_CHARS:
        found += yield from chars.take()
        write(found[-1])
    if not _SCALAR.fullmatch(found):
        raise NotACall


def _pass_blanks(chars: Chars, write: Callable[[str], None]) -> Reading[None]:
    while (yield from chars.peek()) in BLANKS:
        write((yield from chars.take()))
