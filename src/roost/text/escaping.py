"""Escaping: keeps a user's text from becoming special tokens on its way through a chat template.

Where a user's text spells a special token, its first character is replaced by an escape character, and restored after
rendering. Escape characters are lone surrogates, which no valid Unicode text contains, so unescaping is exact. One
character replaces one, so templates may slice and measure. One more stands for an answer whose tokens the session has.
Called by text.language.
"""

import re
from collections.abc import Sequence
from typing import Any

from roost.errors import ConfigError, RequestError

_ESCAPES = range(0xD800, 0xDFFF)  # lone surrogates
ANSWER_MARK = chr(0xDFFF)  # stands for an assistant's answer
_WINDOW = 65_536  # characters searched at a time, so that other threads get the GIL in between


class Escaper:
    """Escapes the special tokens of one vocabulary, and undoes it."""

    def __init__(self, spellings: Sequence[str]) -> None:
        self._spellings = [spelling for spelling in spellings if spelling]
        firsts = sorted({spelling[0] for spelling in self._spellings})
        if len(firsts) > len(_ESCAPES):
            raise ConfigError(
                f"tokenizer: special tokens begin with {len(firsts)} different characters; at most {len(_ESCAPES)}"
            )
        self._escapes = {first: chr(escape) for first, escape in zip(firsts, _ESCAPES, strict=False)}
        self._margin = max(map(len, self._spellings), default=1) - 1
        rests = "|".join(f"{re.escape(each[0])}(?={re.escape(each[1:])})" for each in self._spellings)
        self._beginnings = re.compile(rests or "(?!)")

    def escape(self, value: Any) -> Any:
        """A message, or a part of one, with special tokens escaped in all its strings and keys, at any depth."""
        if isinstance(value, str):
            return self._escape_text(value)
        if isinstance(value, list):
            return [self.escape(each) for each in value]
        if isinstance(value, dict):
            return {self.escape(key): self.escape(each) for key, each in value.items()}
        return value

    def unescape(self, text: str) -> str:
        """The original text of an escaped one."""
        for first, escape in self._escapes.items():
            text = text.replace(escape, first)
        return text

    def _escape_text(self, text: str) -> str:
        _checked(text)
        if not any(spelling in text for spelling in self._spellings):
            return text
        parts = []
        for start in range(0, len(text), _WINDOW):
            window = text[start : start + _WINDOW + self._margin]
            parts.append(self._beginnings.sub(lambda found: self._escapes[found[0]], window)[:_WINDOW])
        return "".join(parts)


def _checked(text: Any) -> Any:
    """The text itself if it is valid Unicode, and so holds no escape character; raises RequestError if not."""
    if isinstance(text, str) and not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(400, "messages", f"not valid Unicode at character {error.start}") from error
    return text
