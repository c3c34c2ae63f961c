"""Marks: characters that stand for others in a text on its way through a chat template, and for nothing anywhere else.

A mark is half of a surrogate pair, which no Unicode text has: whatever a user writes, marks are found again exactly.
The first character of every special token that a user spells is marked, so that it stays text; one more mark stands for
an answer whose tokens are elsewhere. One stands for one, so that templates may cut and count. Called by text.language.
"""

import re
from collections.abc import Sequence
from typing import Any

from roost.errors import ConfigError, RequestError

_MARKS = range(0xD800, 0xDFFF)
ANSWER = chr(0xDFFF)
_WINDOW = 65_536  # characters that are looked through in one go: other threads wait for no more


class Marks:
    """Which marks stand for what, for the special tokens of one vocabulary."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self._spellings = [spelling for spelling in spellings if spelling]
        firsts = sorted({spelling[0] for spelling in self._spellings})
        if len(firsts) > len(_MARKS):
            raise ConfigError(f"tokenizer: special tokens begin with {len(firsts)} characters, at most {len(_MARKS)}")
        self._marks = {first: chr(mark) for first, mark in zip(firsts, _MARKS, strict=False)}
        self._margin = max(map(len, self._spellings), default=1) - 1
        rests = "|".join(f"{re.escape(each[0])}(?={re.escape(each[1:])})" for each in self._spellings)
        self._beginnings = re.compile(rests or "(?!)")

    def hide(self, value: Any) -> Any:
        """A message, or a part of it, in which special tokens that its author spelt are marked, at any depth."""
        if isinstance(value, str):
            return self._hidden(value)
        if isinstance(value, list):
            return [self.hide(each) for each in value]
        if isinstance(value, dict):
            return {_checked(key): self.hide(each) for key, each in value.items()}
        return value

    def show(self, text: str) -> str:
        """A text with what was marked in it."""
        for first, mark in self._marks.items():
            text = text.replace(mark, first)
        return text

    def _hidden(self, text: str) -> str:
        _checked(text)
        if not any(spelling in text for spelling in self._spellings):
            return text
        parts = []
        for start in range(0, len(text), _WINDOW):
            window = text[start : start + _WINDOW + self._margin]
            parts.append(self._beginnings.sub(lambda found: self._marks[found[0]], window)[:_WINDOW])
        return "".join(parts)


def _checked(text: Any) -> Any:
    """The text itself, if it is one that no mark is in."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(400, "messages", f"not valid Unicode at character {error.start}") from error
    return text
