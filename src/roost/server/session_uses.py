"""Session uses: who still needs a session that the server has opened by itself; it is closed with the last use.

Turns that run in it, responses and conversations that are stored, labels: each adds a use and drops it, whatever the
others do, so nobody's running turn is ended by what another forgets. Called by whoever keeps or runs a conversation.
"""

from collections import Counter
from collections.abc import Callable

SessionKey = tuple[str, str]  # whose it is, and its id
OnHeld = Callable[[str, str], None]  # told that something is kept here from now on: whose it is, and its name


def tell_nobody(client: str, name: str) -> None:
    """Nobody asks what is kept here."""


class SessionUses:
    """The uses of all such sessions."""

    def __init__(self, close: Callable[[str, str], None]) -> None:
        self._close = close
        self._uses: Counter[SessionKey] = Counter()

    def add(self, key: SessionKey) -> None:
        """One more needs it."""
        self._uses[key] += 1

    def drop(self, key: SessionKey) -> None:
        """One needs it no more; after the last the session is closed."""
        assert self._uses[key] > 0, key
        self._uses[key] -= 1
        if not self._uses[key]:
            del self._uses[key]
            self._close(*key)
