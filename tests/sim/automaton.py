"""Automaton: the simulator's grammar. Which tokens may come next is a function of the tokens so far, by hashes.

As a matcher it stands where llguidance's does on a real device, so that the code that keeps matchers is the real one.
The oracle follows an output with one of its own, from its first token on.
"""

import numpy as np
from numpy.typing import NDArray

from roost.grammar.matcher import Mask, num_words
from tests.sim.model import Model, mix, mix_all

END = 1  # the end token
_LAST, _ONE = 1, 3  # of 12 states: the grammar is finished; up to here one token may come


class Automaton:
    """The state of one output; `grammar` names the hashes and the size of the vocabulary."""

    def __init__(self, grammar: str) -> None:
        _, seed, vocab = grammar.split()
        self._vocab = int(vocab)
        self._states = [mix(int(seed), 77)]
        self._num_ends = 0  # end tokens that came last

    def allowed(self) -> NDArray[np.bool_]:
        """Which tokens may come next."""
        state, allowed = self._states[-1], np.zeros(self._vocab, dtype=np.bool_)
        kind = 0 if self._num_ends else mix(state, 500) % 12
        if kind < _LAST:
            allowed[END] = True
        elif kind < _ONE:
            allowed[self._some(state)] = True
        else:
            hashes = mix_all(
                np.full(self._vocab, state, dtype=np.uint64), np.arange(600, 600 + self._vocab).astype("u8")
            )
            allowed = hashes % np.uint64(3) != 0
            allowed[END] = mix(state, 502) % 4 == 0
            allowed[self._some(state)] = True
        return allowed

    def _some(self, state: int) -> int:
        """A token that is not the end."""
        token = mix(state, 501) % self._vocab
        return token if token != END else 0

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next."""
        bits = np.zeros(32 * num_words(self._vocab), dtype=np.bool_)
        bits[: self._vocab] = self.allowed()
        mask[:] = np.packbits(bits, bitorder="little").view(np.int32)

    def consume(self, token: int) -> bool:
        """Go on by a token, if it may come next."""
        if token < 0 or not self.allowed()[token]:
            return False
        self._states.append(mix(self._states[-1], 1000 + token))
        self._num_ends += token == END
        return True

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        if num_tokens:
            assert num_tokens < len(self._states), "further back than its first token"
            del self._states[-num_tokens:]
            self._num_ends = max(0, self._num_ends - num_tokens)

    def forced(self) -> list[int]:
        """The tokens that come next, as far as there is one way, but for the end."""
        way: list[int] = []
        while (token := self.only()) is not None:
            way.append(token)
            self.consume(token)
        self.rollback(len(way))
        return way

    def only(self) -> int | None:
        """The one token that may come next, unless that is the end."""
        tokens = np.flatnonzero(self.allowed())
        return int(tokens[0]) if len(tokens) == 1 and tokens[0] != END else None

    def error(self) -> str:
        """It never has one."""
        return ""


def choose(wanted: int, allowed: NDArray[np.bool_]) -> int:
    """The target's draw: what it would say, or the next token that is allowed."""
    tokens = np.flatnonzero(allowed)
    return int(tokens[np.searchsorted(tokens, wanted) % len(tokens)])


def choose_masked(wanted: int, mask: Mask, vocab: int) -> int:
    """The same by a mask."""
    return choose(wanted, np.unpackbits(mask.view(np.uint8), bitorder="little")[:vocab].astype(np.bool_))


def expected_output(model: Model, states: list[int], output: list[int], grammar: str) -> list[int]:
    """The oracle: the token after each of some states, along an output that began with the first."""
    automaton, expected = Automaton(grammar), []
    for state, token in zip(states, output, strict=True):
        expected.append(choose(model.next_token(state), automaton.allowed()))
        automaton.consume(token)
    return expected
