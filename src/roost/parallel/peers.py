"""Peers: the other ranks, as start-up sees them: the group, and what all must have alike or agree on.

Rank 0 asks, compares and decides (`ranks`); a follower says what it has and hears (`follower`); an engine in one
process has nobody to ask.
"""

from collections.abc import Mapping, Sequence
from typing import Protocol

from roost.layers.group import ALONE, Group

Sizes = Sequence[int | None]


class Peers(Protocol):
    """The ranks of an engine that starts."""

    @property
    def group(self) -> Group:
        """Their collectives."""
        ...

    def same(self, what: Mapping[str, str]) -> None:
        """Raise ConfigError, on rank 0 with what differs, unless all have the same."""
        ...

    def smallest(self, sizes: Sizes) -> Sizes:
        """Of each number the smallest that a rank has; None where nobody has one."""
        ...


class NoPeers:
    """An engine in one process."""

    group = ALONE

    def same(self, what: Mapping[str, str]) -> None:
        """It is."""

    def smallest(self, sizes: Sizes) -> Sizes:
        """Its own."""
        return sizes


NO_PEERS: Peers = NoPeers()
