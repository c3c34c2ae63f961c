"""Stop strings: where the first one ends, and what must wait because it may be the beginning of one.

Owns one automaton (Aho and Corasick's) for all stop strings of a request: a character costs the same however many there
are. A state is the longest beginning of a stop string that a text ends with; where it falls back to is worked out when
a text first comes there, so that making one costs little. Never sees tokens. Called by text.stream, for both its ends.
"""

from array import array
from collections.abc import Sequence

from roost.errors import RequestError

START = 0  # the state of an empty text


class Stops:
    """The stop strings of one request, to be looked for in one or more texts."""

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise RequestError(400, "stop", "a stop string has at least one character")
        self._texts = sorted(set(texts))  # those with the same beginning are neighbours
        self._width = max(map(len, self._texts), default=0) + 1
        # State text * width + depth: so many characters of that text, the first of those that begin with them.
        self._chars = "".join(text.ljust(self._width) for text in self._texts)
        self._forks = self._all_forks()
        self._fallbacks = array("i", [-1]) * max(1, len(self._chars))  # -1: no text has come here
        self._ends = array("i", [-1]) * len(self._fallbacks)  # the longest stop string that ends here
        self._fallbacks[START] = START

    def after(self, state: int, char: str) -> int:
        """The state of a text that was in `state` and has one more character."""
        while (found := self._next(state, char)) is None:
            if state == START:
                return START
            state = self._fallbacks[state]
        if self._fallbacks[found] < 0:
            self._reach(found, state, char)
        return found

    def depth(self, state: int) -> int:
        """Characters at the end of a text in this state that are the beginning of a stop string."""
        return state % self._width

    def stop(self, state: int) -> str | None:
        """The longest stop string that a text in this state ends with."""
        end = self._ends[state]
        return None if end < 0 else self._texts[end]

    def _next(self, state: int, char: str) -> int | None:
        fork = self._forks.get(state)
        if fork is not None:
            return fork.get(char)
        return state + 1 if self._chars[state] == char else None

    def _reach(self, state: int, before: int, char: str) -> None:
        """Work out where a text goes from a state that it reached for the first time, and from those in turn."""
        reached = []
        while self._fallbacks[state] < 0:
            fallback: int | None = None
            while fallback is None and before != START:
                before = self._fallbacks[before]
                fallback = self._next(before, char)
            reached.append((state, fallback or START))
            state = fallback or START
        for state, fallback in reversed(reached):
            text, depth = divmod(state, self._width)
            is_whole = depth == len(self._texts[text])  # then it is the longest
            self._ends[state] = text if is_whole else self._ends[fallback]
            self._fallbacks[state] = fallback

    def _all_forks(self) -> dict[int, dict[str, int]]:
        """Where one character does not decide: at the start, at ends, and where two neighbours part."""
        forks: dict[int, dict[str, int]] = {START: {}}
        firsts = [0] * self._width  # by depth, the first text with the present one's beginning
        for number, text in enumerate(self._texts):
            shared = _num_shared(self._texts[number - 1], text) if number else 0
            at = firsts[shared] * self._width + shared
            if at not in forks:
                forks[at] = {self._chars[at]: at + 1}
            forks[at][text[shared]] = number * self._width + shared + 1
            firsts[shared + 1 : len(text) + 1] = [number] * (len(text) - shared)
            forks[number * self._width + len(text)] = {}
        return forks


def _num_shared(left: str, right: str) -> int:
    """Characters that two texts begin with in common."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
