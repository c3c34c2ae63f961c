"""Response store: responses and conversations that clients may name later, each with the session its turns lie in.

A response is what was said before it, its own input and output, and the session in which that ended. Limited by
number, size and age: whoever has most loses its oldest. Another client's are as if they did not exist. What was said
before a response is shared with those that follow it, counts once, and stays theirs when it is deleted. Called by the
endpoints of responses.
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
from roost.server.session_uses import OnHeld, SessionKey, SessionUses, tell_nobody

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
    said: Said  # everything up to its output
    session_id: str | None = None  # a label has that of a labelled one
    task: "asyncio.Task[None] | None" = None  # of one in the background that has not ended
    log: EventLog | None = None  # of one in the background that is streamed
    stored_at: float = 0.0
    size: int = 0  # bytes of the response and its events as JSON

    def parts(self) -> list[Item]:
        """What is kept of it beside what was said."""
        return [self.response, *(self.log.events if self.log is not None else ())]


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
    size: int = 0  # bytes of its items as JSON

    @property
    def shown(self) -> dict[str, Any]:
        """As clients read it."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}

    def parts(self) -> list[Item]:
        """What is kept of it."""
        return self.items


Stored = StoredResponse | StoredConversation


@dataclass(slots=True, kw_only=True, eq=False)
class _Shelf:
    """What one client has stored, the oldest first."""

    kept: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    num_bytes: int = 0
    num_holders: Counter[Said] = field(
        default_factory=Counter
    )  # responses that end with it, and what was said after it

    def hold(self, said: Said | None) -> None:
        """Count what was said, each part of it once, however many responses share it."""
        while said is not None:
            self.num_holders[said] += 1
            if self.num_holders[said] > 1:
                return
            self.num_bytes += _size(said.items)
            said = said.before

    def let_go(self, said: Said | None) -> None:
        """The opposite."""
        while said is not None:
            self.num_holders[said] -= 1
            if self.num_holders[said]:
                return
            del self.num_holders[said]
            self.num_bytes -= _size(said.items)
            said = said.before


class ResponseStore:
    """Responses and conversations by client and id."""

    def __init__(
        self,
        *,
        count_max: int,
        bytes_max: int,
        age_s_max: float,
        uses: SessionUses,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._count_max, self._bytes_max, self._age_s_max = count_max, bytes_max, age_s_max
        self._uses = uses
        self._now = now
        self._shelves: dict[str, _Shelf] = {}
        self._sessions: dict[str, SessionKey] = {}  # the session that each uses, by its id
        self.on_put: OnHeld = tell_nobody

    @property
    def keys(self) -> list[SessionKey]:
        """The clients of all that is kept, and its ids."""
        return [(client, id) for client, shelf in self._shelves.items() for id in shelf.kept]

    def put(self, stored: Stored) -> None:
        """Keep it, or what has become of it, as its client's newest; whoever has most makes room."""
        session = (stored.client, stored.session_id) if stored.session_id is not None else None
        if session is not None:
            self._uses.add(session)  # before an earlier use is dropped
        self._take(stored.client, stored.id)
        shelf = self._shelves.setdefault(stored.client, _Shelf())
        stored.stored_at, stored.size = self._now(), _size(stored.parts())
        shelf.kept[stored.id] = stored
        shelf.num_bytes += stored.size
        if isinstance(stored, StoredResponse):
            shelf.hold(stored.said)
        if session is not None:
            self._sessions[stored.id] = session
        self.on_put(stored.client, stored.id)
        self.expire()
        while sum(len(each.kept) for each in self._shelves.values()) > self._count_max:
            self._drop_oldest(max(self._shelves, key=lambda client: len(self._shelves[client].kept)))
        while sum(each.num_bytes for each in self._shelves.values()) > self._bytes_max:
            self._drop_oldest(max(self._shelves, key=lambda client: self._shelves[client].num_bytes))

    def check_size(self, items: Sequence[Item], param: str) -> None:
        """Refuse items that could not be stored even alone."""
        size = _size(items)
        if size > self._bytes_max:
            raise RequestError(413, param, f"{size} bytes are more than can be stored: {self._bytes_max}")

    def response(self, id: str, client: str, *, param: str = "response_id") -> StoredResponse:
        """A client's response; 404 if there is none."""
        found = self._find(id, client)
        if not isinstance(found, StoredResponse):
            raise RequestError(404, param, f"there is no response {id[:100]!r}; it may have expired")
        return found

    def conversation(self, id: str, client: str, *, param: str = "conversation_id") -> StoredConversation:
        """A client's conversation; 404 if there is none."""
        found = self._find(id, client)
        if not isinstance(found, StoredConversation):
            raise RequestError(404, param, f"there is no conversation {id[:100]!r}; it may have expired")
        return found

    def has(self, id: str, client: str) -> bool:
        """Whether a client's is kept."""
        return self._find(id, client) is not None

    def delete(self, stored: Stored) -> None:
        """Forget it; what is still being made is ended."""
        self._take(stored.client, stored.id)
        if isinstance(stored, StoredResponse) and stored.task is not None:
            stored.task.cancel()

    def clear(self) -> None:
        """Forget all."""
        for client in list(self._shelves):
            while client in self._shelves:
                self._drop_oldest(client)

    def expire(self) -> None:
        """Forget what is too old."""
        oldest = self._now() - self._age_s_max
        for client, shelf in list(self._shelves.items()):
            while shelf.kept and next(iter(shelf.kept.values())).stored_at < oldest:
                self._drop_oldest(client)

    def _find(self, id: str, client: str) -> Stored | None:
        self.expire()
        shelf = self._shelves.get(client)
        return None if shelf is None else shelf.kept.get(id)

    def _drop_oldest(self, client: str) -> None:
        self.delete(next(iter(self._shelves[client].kept.values())))

    def _take(self, client: str, id: str) -> None:
        """Take it off its shelf, and drop its use of a session."""
        shelf = self._shelves.get(client)
        if shelf is None or (stored := shelf.kept.pop(id, None)) is None:
            return
        shelf.num_bytes -= stored.size
        if isinstance(stored, StoredResponse):
            shelf.let_go(stored.said)
        if not shelf.kept:
            del self._shelves[client]
        if (session := self._sessions.pop(id, None)) is not None:
            self._uses.drop(session)


def _size(items: Sequence[Item]) -> int:
    """Bytes as JSON."""
    return len(msgspec.json.encode(items))


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
