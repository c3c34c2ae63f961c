"""Progress: how a download reports how far it is.

Only the protocol, and a callback that does nothing; bars are drawn in `terminal`. Passed in by whoever waits.
"""

from typing import Protocol


class Progress(Protocol):
    """A callback that reports how far something is."""

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Called now and then, and once at the end."""
        ...


def silent(done_bytes: int, total_bytes: int) -> None:
    """Report nothing."""
