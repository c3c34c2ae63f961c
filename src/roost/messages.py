"""Messages between the engine and whoever talks to it: frozen data, nothing else.

Clients post commands with a reply function; the engine answers with events. Every submitted request gets exactly one
terminal event: Finished or Refused. Imported by sched and by everything above it.
"""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Ask for one generation, alone or as a turn of a session (then `tokens` are the new ones)."""

    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int | None = None  # absent: what context and pool allow
    stop_token_ids: frozenset[int] = frozenset()
    session_id: str | None = None
    queue: bool = False  # wait for a busy session instead of a 409
    salt: str = ""  # name space of the prefix cache; a session has its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a request wherever it is; its session, if any, goes back to its last commit point."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Open an empty session."""

    session_id: str
    salt: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Close a session; a running turn ends as aborted first."""

    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost."""

    prompt_tokens: int  # history included; the input alone for a turn that never got its session
    cached_tokens: int  # of those, found in place when the request first started
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecStats:
    """What speculation did for one request, or for all: live rows only."""

    rounds: int = 0
    drafts_offered: int = 0
    drafts_accepted: int = 0  # before the output was cut
    overshoot: int = 0  # accepted tokens past the end of the output
    histogram: tuple[int, ...] = ()  # rounds by accept_len - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """More output."""

    request_id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Terminal: the request ended after it was accepted."""

    request_id: str
    reason: str  # stop, length, abort, error
    usage: Usage
    max_new_tokens: int  # as resolved; as asked (0 if absent) for a turn that never got its session
    spec: SpecStats
    message: str = ""  # what went wrong, for an error


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Terminal for a request, or the answer to a session command that was not carried out."""

    request_id: str
    status: int
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpened:
    """The session exists."""

    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """The session is gone."""

    session_id: str


Command = Submit | Abort | OpenSession | CloseSession
Event = Tokens | Finished | Refused | SessionOpened | SessionClosed
Reply = Callable[[Event], None]
