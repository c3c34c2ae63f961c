"""Clients: who sends a request, by the name of its key; the limits of each; ids in a namespace of each.

Where keys have no names, and in the library, there is one client, '', without limits. Imported by session, sched and
everything above them.
"""

from dataclasses import dataclass

_BETWEEN = "\0"  # occurs in no client's name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """The limits of one client; None: no limit but the engine's."""

    name: str
    running: int | None = None  # requests running at once
    queued: int | None = None  # requests waiting, including those that wait for a busy session
    sessions: int | None = None  # open sessions
    session_ttl_s: int | None = None  # of sessions that set none themselves
    priority_min: int | None = None
    priority_max: int | None = None


def scoped(client: str, name: str) -> str:
    """A client's id for something in a namespace of its own; unchanged where clients have no names."""
    return f"{client}{_BETWEEN}{name}" if client else name


def unscoped(client: str, name: str) -> str:
    """The client's own id, without the namespace."""
    return name.removeprefix(f"{client}{_BETWEEN}") if client else name
