"""Response store: responses and conversations that clients may name later, each with the session its turns lie in.

A response is what was said before it, its own input and output, and the session in which that ended. Limited by
number, size and age, the oldest go first; another client's are as if they did not exist. What was said before a
response is shared with those that follow it, and stays theirs when it is deleted. Called by the endpoints of responses.
"""

import asyncio
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from roost.errors import RequestError
from roost.server.event_log import EventLog

Item = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Said:
    """Items of a conversation; a linked list, so that responses share what came before them."""

    before: "Said | None" = None
    items: tuple[Item, ...] = ()

    def all_items(self) -> list[Item]:
        """All items, oldest first."""
        parts: list[tuple[Item, ...]] = []
        found: Said | None = self
        while found is not None:
            parts.append(found.items)
            found = found.before
        return [item for part in reversed(parts) for item in part]


@dataclass(slots=True, kw_only=True, eq=False)
class StoredResponse:
    """A response that may be named."""

    id: str
    client: str
    response: dict[str, Any]  # as clients read it
    input_items: list[Item]
    before: Said | None = None
    session_id: str | None = None
    owns_session: bool = False  # closed with the last response that lies in it
    task: "asyncio.Task[None] | None" = None  # of one in the background that has not ended
    log: EventLog | None = None  # of one in the background that is streamed
    stored_at: float = 0.0
    size: int = 0  # bytes of its items and events as JSON

    @property
    def said(self) -> Said:
        """Everything up to its output."""
        return Said(before=self.before, items=(*self.input_items, *self.response["output"]))


@dataclass(slots=True, kw_only=True, eq=False)
class StoredConversation:
    """A conversation that responses add to."""

    id: str
    client: str
    created_at: int
    metadata: dict[str, str] = field(default_factory=dict)
    items: list[Item] = field(default_factory=list)
    session_id: str | None = None
    is_busy: bool = False  # a response is being made
    stored_at: float = 0.0
    size: int = 0

    @property
    def shown(self) -> dict[str, Any]:
        """As clients read it."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}


Stored = StoredResponse | StoredConversation
Close = Callable[[str, str], None]  # closes a client's session


class ResponseStore:
    """Responses and conversations by id, the oldest first."""

    def __init__(
        self,
        *,
        count_max: int,
        bytes_max: int,
        age_s_max: float,
        close: Close,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count_max, self._bytes_max, self._age_s_max = count_max, bytes_max, age_s_max
        self._close = close
        self._now = now
        self._kept: OrderedDict[str, Stored] = OrderedDict()
        self._sessions: dict[str, tuple[str, str]] = {}  # client and id of the session that each owns a part in, by id
        self._num_in: Counter[tuple[str, str]] = Counter()  # how many lie in each session
        self._num_bytes = 0

    def put(self, stored: Stored) -> None:
        """Keep it, or what has become of it, as the newest."""
        self._take(stored.id)
        stored.stored_at, stored.size = self._now(), len(msgspec.json.encode(_parts(stored)))
        self._kept[stored.id] = stored
        self._num_bytes += stored.size
        if (session := _session_of(stored)) is not None:
            self._sessions[stored.id] = session
            self._num_in[session] += 1
        self.expire()
        while len(self._kept) > self._count_max or self._num_bytes > self._bytes_max:
            self._drop(next(iter(self._kept)))

    def response(self, id: str, client: str, *, param: str = "response_id") -> StoredResponse:
        """A client's response; 404 if there is none."""
        self.expire()
        found = self._kept.get(id)
        if not isinstance(found, StoredResponse) or found.client != client:
            raise RequestError(404, param, f"there is no response {id[:100]!r}; it may have expired")
        return found

    def conversation(self, id: str, client: str, *, param: str = "conversation_id") -> StoredConversation:
        """A client's conversation; 404 if there is none."""
        self.expire()
        found = self._kept.get(id)
        if not isinstance(found, StoredConversation) or found.client != client:
            raise RequestError(404, param, f"there is no conversation {id[:100]!r}; it may have expired")
        return found

    def has(self, id: str) -> bool:
        """Whether it is kept, whosever it is."""
        return id in self._kept

    def delete(self, stored: Stored) -> None:
        """Forget it."""
        self._drop(stored.id)

    def clear(self) -> None:
        """Forget all."""
        while self._kept:
            self._drop(next(iter(self._kept)))

    def expire(self) -> None:
        """Forget what is too old."""
        oldest = self._now() - self._age_s_max
        while self._kept and next(iter(self._kept.values())).stored_at < oldest:
            self._drop(next(iter(self._kept)))

    def _drop(self, id: str) -> None:
        """Forget it; a session that nothing lies in any more is closed, and what is still being made is ended."""
        stored, session = self._kept.get(id), self._sessions.get(id)
        self._take(id)
        if isinstance(stored, StoredResponse) and stored.task is not None:
            stored.task.cancel()
        if session is not None and not self._num_in[session]:
            self._close(*session)

    def _take(self, id: str) -> None:
        stored = self._kept.pop(id, None)
        if stored is not None:
            self._num_bytes -= stored.size
        if (session := self._sessions.pop(id, None)) is not None:
            self._num_in[session] -= 1
            if not self._num_in[session]:
                del self._num_in[session]


def _parts(stored: Stored) -> list[Item]:
    """All that is kept of it."""
    if isinstance(stored, StoredConversation):
        return stored.items
    return [*stored.input_items, stored.response, *(stored.log.events if stored.log is not None else ())]


def _session_of(stored: Stored) -> tuple[str, str] | None:
    """The session that is closed with the last that lies in it."""
    owns = not isinstance(stored, StoredResponse) or stored.owns_session
    return (stored.client, stored.session_id) if stored.session_id is not None and owns else None


def page_of(items: Sequence[Item], *, after: str | None, limit: int, order: str) -> dict[str, Any]:
    """A page of a list of items, as clients read it."""
    ordered = list(items) if order == "asc" else list(reversed(items))
    if after is not None:
        ids = [item.get("id") for item in ordered]
        if after not in ids:
            raise RequestError(400, "after", f"there is no item {after[:100]!r} in this list")
        ordered = ordered[ids.index(after) + 1 :]
    page = ordered[:limit]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(ordered) > limit,
    }
