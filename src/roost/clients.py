"""Clients: who asks, by the name of a key, what each may take, and names that are its own.

Where keys have no names, and in the library, there is one client, '', without limits. Imported by session, sched and
everything above them.
"""

from dataclasses import dataclass

_BETWEEN = "\0"  # no client's name has it


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLimits:
    """What one client may take; None: what the engine allows."""

    name: str
    running: int | None = None  # requests at once
    queued: int | None = None  # requests that wait, for a session too
    sessions: int | None = None  # open ones
    session_ttl_s: int | None = None  # of those that say nothing themselves
    priority_min: int | None = None
    priority_max: int | None = None


def scoped(client: str, name: str) -> str:
    """A client's name for something, as one that no other client has; as it is where clients have no names."""
    return f"{client}{_BETWEEN}{name}" if client else name


def unscoped(client: str, name: str) -> str:
    """What the client itself calls it."""
    return name.removeprefix(f"{client}{_BETWEEN}") if client else name
