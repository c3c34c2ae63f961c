"""Stop strings: finds the first match, and how much of a text may be the prefix of one.

One Aho-Corasick automaton for all stop strings of a request: the cost of a character does not depend on how many there
are. A state is the longest prefix of a stop string that the text ends with. Fallback links are computed when a state is
first reached, so building the automaton is cheap. Never sees tokens. Called by text.stream.
"""

from array import array
from collections.abc import Sequence

from roost.errors import RequestError

START = 0  # the state of an empty text


class Stops:
    """The automaton for the stop strings of one request; callers keep the state, so several texts may share it."""

    def __init__(self, texts: Sequence[str]) -> None:
        if not all(texts):
            raise RequestError(400, "stop", "a stop string has at least one character")
        self._texts = sorted(set(texts))  # those with a common prefix are neighbours
        self._width = max(map(len, self._texts), default=0) + 1
        # State = text * width + depth: the first `depth` characters of a text; texts that share them share the state
        # of the first such text.
        self._chars = "".join(text.ljust(self._width) for text in self._texts)
        self._forks = self._all_forks()
        self._fallbacks = array("i", [-1]) * max(1, len(self._chars))  # -1: not reached yet
        self._ends = array("i", [-1]) * len(self._fallbacks)  # by state, the longest stop string that ends there
        self._fallbacks[START] = START

    def after(self, state: int, char: str) -> int:
        """The state after one more character."""
        while (found := self._next(state, char)) is None:
            if state == START:
                return START
            state = self._fallbacks[state]
        if self._fallbacks[found] < 0:
            self._reach(found, state, char)
        return found

    def depth(self, state: int) -> int:
        """How many characters at the end of the text may be the prefix of a stop string."""
        return state % self._width

    def stop(self, state: int) -> str | None:
        """The longest stop string that the text ends with, if any."""
        end = self._ends[state]
        return None if end < 0 else self._texts[end]

    def _next(self, state: int, char: str) -> int | None:
        fork = self._forks.get(state)
        if fork is not None:
            return fork.get(char)
        return state + 1 if self._chars[state] == char else None

    def _reach(self, state: int, before: int, char: str) -> None:
        """Compute the fallback of a state that was reached for the first time, and of that state's fallbacks."""
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
            is_whole = depth == len(self._texts[text])  # longer than any that its fallback ends with
            self._ends[state] = text if is_whole else self._ends[fallback]
            self._fallbacks[state] = fallback

    def _all_forks(self) -> dict[int, dict[str, int]]:
        """Transitions of states that do not have exactly one: the start, ends of texts, and where two texts diverge."""
        forks: dict[int, dict[str, int]] = {START: {}}
        firsts = [0] * self._width  # by depth, the first text that shares the current one's prefix
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
    """Length of the common prefix of two texts."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left.startswith(right[:middle]):
            low = middle
        else:
            high = middle - 1
    return low
