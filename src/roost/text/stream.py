"""Streaming of one output: incremental decoding, the token that completes a stop string, the text a client may see.

Owns the bytes of an incomplete character and the text held back for stop strings. The cost of a token does not grow
with the output. Each object serves one output on one thread: TextStream and StopCutter in the server or the library,
StopFinder in the engine.
"""

import codecs
from collections.abc import Sequence

from roost.text.stops import START, Stops
from roost.text.tokenizer import Tokenizer


class TextStream:
    """Incremental decoding of one output."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool, kept: frozenset[int] = frozenset()) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._kept = kept  # special tokens that are shown all the same: those that mark tool calls
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of an unfinished character

    def feed(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that no later token can change."""
        skip, kept = self._skip_special, self._kept
        shown = (self._tokenizer.shown(token, skip_special=skip, kept=kept) for token in tokens)
        return self._decoder.decode(b"".join(shown))

    def flush(self) -> str:
        """The rest at the output's end: an incomplete character becomes a replacement character."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """Finds the token that completes the first stop string of an output."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], skip_special: bool) -> None:
        self._stops = Stops(stops)
        self._state = START
        self._stream = TextStream(tokenizer, skip_special=skip_special)

    def skip(self, tokens: Sequence[int]) -> None:
        """Add tokens in which stop strings do not count; a character that they leave incomplete does count."""
        self._stream.feed(tokens)

    def feed(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Add tokens; returns the index of the one that completes a stop string, and the string. Call no more then."""
        for index, token in enumerate(tokens):
            for char in self._stream.feed((token,)):
                self._state = self._stops.after(self._state, char)
                if (stop := self._stops.stop(self._state)) is not None:
                    return index, stop
        return None


class StopCutter:
    """Holds back text that is, or may become, a stop string."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = Stops(stops)
        self._state = START
        self._held = ""
        self._stop_at: int | None = None  # where in `_held` the first stop string begins

    def feed(self, delta: str) -> str:
        """Add text; returns what certainly belongs to the output."""
        text = self._held + delta
        for end, char in enumerate(delta, len(self._held) + 1):
            self._state = self._stops.after(self._state, char)
            if (stop := self._stops.stop(self._state)) is not None:
                start = end - len(stop)
                self._stop_at = start if self._stop_at is None else min(start, self._stop_at)
        certain_len = len(text) - self._stops.depth(self._state)
        if self._stop_at is not None:
            certain_len = min(certain_len, self._stop_at)
            self._stop_at -= certain_len
        self._held = text[certain_len:]
        return text[:certain_len]

    def skip(self, text: str) -> str:
        """Add text in which nothing is looked for; returns it after all that was held back."""
        held, self._held, self._state, self._stop_at = self._held, "", START, None
        return held + text

    def finish(self, matched: str | None) -> str:
        """The rest: all text held back, or only the part before the stop string that ended the output."""
        held, self._held = self._held, ""
        return held if matched is None else held.partition(matched)[0]
