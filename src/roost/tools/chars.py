"""Characters of an output, one at a time: what every reader of a call is written in.

A reader is a generator that waits for the next character, so that it reads the same however a stream is cut. `Chars`
remembers what it has taken and not yet used: if the text turns out to be no call, that is what goes back to the
content. Called by the formats' readers and by the machine that runs them.
"""

from collections.abc import Callable, Generator, Iterable
from typing import TypeVar

Result = TypeVar("Result")
Reading = Generator[None, str, Result]  # waits for characters, one at a time

BLANKS = " \t\r\n"
_BLANKS_MAX = 64  # in a row, where a format allows any
WORD_MAX = 256  # characters of a name


class NotACall(Exception):
    """The text does not go on as a call would."""


class Chars:
    """The characters that a reader takes."""

    def __init__(self) -> None:
        self.held = ""  # come, and not used for a call yet
        self.ahead = ""  # looked at, and still to be taken
        self.is_closing = False  # between the arguments of a call and the end of its syntax

    def take(self) -> Reading[str]:
        """The next character."""
        if self.ahead:
            char, self.ahead = self.ahead, ""
            return char
        return (yield)

    def peek(self) -> Reading[str]:
        """The next character, which stays the next one."""
        if not self.ahead:
            self.ahead = yield
        return self.ahead

    def use(self) -> None:
        """What was taken belongs to a call: it never becomes content."""
        self.held = self.ahead

    def expect(self, text: str) -> Reading[None]:
        """Take exactly this text."""
        for wanted in text:
            if (yield from self.take()) != wanted:
                raise NotACall

    def either(self, texts: Iterable[str]) -> Reading[str]:
        """Take the one of these texts that comes; none of them begins with another."""
        found, left = "", list(texts)
        while found not in left:
            found += yield from self.take()
            left = [text for text in left if text.startswith(found)]
            if not left:
                raise NotACall
        return found

    def skip_blanks(self) -> Reading[str]:
        """Skip whitespace; returns the character after it, which stays the next one."""
        for _ in range(_BLANKS_MAX + 1):
            if (char := (yield from self.peek())) not in BLANKS:
                return char
            yield from self.take()
        raise NotACall

    def word(self, is_part: Callable[[str], bool]) -> Reading[str]:
        """Take characters while they are part of a word; there is at least one."""
        found = ""
        while is_part((yield from self.peek())) and len(found) <= WORD_MAX:
            found += yield from self.take()
        if not 0 < len(found) <= WORD_MAX:
            raise NotACall
        return found


def is_name_part(char: str) -> bool:
    """Whether a tool's name may have this character."""
    return char.isascii() and (char.isalnum() or char in "_-.")
