"""Stop strings: where the first one ends, and what must wait because it may be the beginning of one.

Owns the search in text. Never sees tokens; keeps nothing between calls.
Called by text.stream, for the engine's side and for the client's.
"""

from dataclasses import dataclass

from roost.errors import RequestError


@dataclass(frozen=True, slots=True)
class Stops:
    """The stop strings of one request."""

    texts: tuple[str, ...]

    def __post_init__(self) -> None:
        if not all(self.texts):
            raise RequestError(400, "stop", "a stop string has at least one character")

    @property
    def tail_len(self) -> int:
        """Characters of past text that a match to come may begin in."""
        return max(map(len, self.texts), default=1) - 1

    def first(self, text: str) -> str | None:
        """The stop string that is complete first; of two that end together, the longer."""
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self.texts if stop in text]
        return min(found)[2] if found else None

    def certain_len(self, text: str) -> int:
        """Length of the text before anything that is a stop string or may become one."""
        return min((_start(text, stop) for stop in self.texts), default=len(text))


def _start(text: str, stop: str) -> int:
    """Where the stop string is in the text, or where its beginning is at the text's end."""
    at = text.find(stop)
    if at >= 0:
        return at
    for at in range(max(0, len(text) - len(stop) + 1), len(text)):
        if stop.startswith(text[at:]):
            return at
    return len(text)
