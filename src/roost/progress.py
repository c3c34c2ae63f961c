"""Progress: how a download says how far it is.

Nothing but the protocol, and the one that nobody sees; bars are drawn elsewhere. Passed in by whoever waits.
"""

from typing import Protocol


class Progress(Protocol):
    """Told how far something is."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Called now and then, and once at the end."""
        ...


def silent(done_bytes: int, total_bytes: int) -> None:
    """Progress that nobody sees."""
