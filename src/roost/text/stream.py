"""Streams of one output: its text as tokens settle, where a stop string ends it, what a client may see of it.

Owns unfinished characters and the tail of text. The cost of a token does not grow with the output.
Each object is for one output and one thread: TextStream and StopCutter in the front end, StopFinder in the engine.
"""

import codecs
from collections.abc import Sequence

from roost.text.stops import START, Stops
from roost.text.tokenizer import Tokenizer


class TextStream:
    """The text of an output, as far as it is certain."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")  # keeps the bytes of an unfinished character

    def feed(self, tokens: Sequence[int]) -> str:
        """Take tokens; give the text that no later token can change."""
        shown = (self._tokenizer.shown(token, skip_special=self._skip_special) for token in tokens)
        return self._decoder.decode(b"".join(shown))

    def flush(self) -> str:
        """Give the rest at the output's end: an unfinished character stays unfinished."""
        return self._decoder.decode(b"", final=True)


class StopFinder:
    """Finds the token that completes the first stop string of an output."""

    def __init__(self, tokenizer: Tokenizer, stops: tuple[str, ...], skip_special: bool) -> None:
        self._stops = Stops(stops)
        self._state = START
        self._stream = TextStream(tokenizer, skip_special=skip_special)

    def skip(self, tokens: Sequence[int]) -> None:
        """Take tokens in which no stop string counts; a character that they leave unfinished counts."""
        self._stream.feed(tokens)

    def feed(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Take tokens; give the index of the one that completes a stop string, and which. Not fed after that."""
        for index, token in enumerate(tokens):
            for char in self._stream.feed((token,)):
                self._state = self._stops.after(self._state, char)
                if (stop := self._stops.stop(self._state)) is not None:
                    return index, stop
        return None


class StopCutter:
    """Holds back text that is a stop string or may become one, until it is known."""

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = Stops(stops)
        self._state = START
        self._held = ""
        self._stop_at: int | None = None  # where in `_held` the first stop string begins

    def feed(self, delta: str) -> str:
        """Take text; give what certainly belongs to the output."""
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

    def finish(self, matched: str | None) -> str:
        """Give the rest: all that is held, or what of it lies before the stop string that ended the output."""
        held, self._held = self._held, ""
        return held if matched is None else held.partition(matched)[0]
