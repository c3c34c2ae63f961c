"""What is asked of a matcher: the state of one output under its grammar.

Implemented by `grammar.compiler` with llguidance, and by the simulator with an automaton. The state depends on the
tokens that were consumed and on nothing else.
"""

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]  # [num_words] a bit for each token of the vocabulary, the lowest first; set: it is allowed


class Matcher(Protocol):
    """Follows one output, token by token."""

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next: at least one; once the grammar is finished, the end tokens alone."""
        ...

    def consume(self, token: int) -> bool:
        """Go on by a token; False, and nothing happens, if it may not come next."""
        ...

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        ...

    def forced(self) -> list[int]:
        """The tokens that come next, as far as the grammar leaves one way: the only ones that masks allow there."""
        ...

    def error(self) -> str:
        """Why it cannot go on, for good; empty while it can."""
        ...


NewMatcher = Callable[[str], Matcher]  # of a grammar, before its first token


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def allows(mask: Mask, token: int) -> bool:
    """Whether a mask allows a token."""
    return token >= 0 and bool(int(mask[token >> 5]) >> (token & 31) & 1)
