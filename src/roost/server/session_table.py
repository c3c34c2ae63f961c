"""Session table: the sessions that were opened here, which of them is in use, and who waits for it.

A turn, a rewind or a fork locks its session from before it is sent until the engine's last event for it; a fork of
what is committed needs no lock. What the engine says was done is taken over whether or not anybody waits to hear it. A
turn whose reader has left counts as ended: the next one waits for its last event and goes on from what that leaves.
What a session is, `front.session` says.
Called by the endpoints that take a session.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

from starlette.requests import Request

from roost.errors import CapacityError, RequestError
from roost.front.options import TurnOf
from roost.front.session import ClientSession, ClientTurn
from roost.messages import Event, Finished, Refused, SessionClosed, SessionState
from roost.server.generation import while_connected
from roost.server.keys import caller
from roost.server.request_history import RequestHistory
from roost.server.session_uses import OnHeld, SessionKey, tell_nobody
from roost.text.language import Language

WAITING_MAX = 64  # turns that wait for one session
_OUTCOME_UNKNOWN = 500  # from this status on, a refused turn may have become history
CHECK_AT_MIN = 1024  # sessions in the table, from which on those that the engine has closed by itself are looked for


class ServerSession:
    """One open session and its lock."""

    def __init__(
        self,
        client_session: ClientSession,
        *,
        client: str = "",
        notes: dict[str, Any] | None = None,
        history: RequestHistory | None = None,
        cache_salt: str = "",
    ) -> None:
        self.client_session = client_session
        self.cache_salt = cache_salt  # of a conversation: another salt has a session of its own
        self.client = client
        self.notes = notes or {}  # what its opener said that the engine has no place for
        self.history = history  # not None: a session of SGLang's that does not stream
        self.num_closing = 0  # commands to close it that the engine has not answered
        self.num_waiting = 0  # turns
        self.is_lost = False  # what is known here may be out of date
        self.holder: SessionLock | None = None
        self.queue_lock = asyncio.Lock()  # first come, first served: whoever has it is the next holder
        self.is_free = asyncio.Event()
        self.is_free.set()

    @property
    def id(self) -> str:
        """The name that its client uses."""
        return self.client_session.id

    @property
    def key(self) -> tuple[str, str]:
        """Whose it is, and its id."""
        return self.client, self.id

    def check_open(self) -> None:
        """Refuse what comes after a close."""
        if self.is_lost:
            raise CapacityError(503, f"session {self.id!r} has changed while it was waited for: try again")
        if self.num_closing:
            raise RequestError(410, "session_id", f"session {self.id!r} is closing")

    def check_streaming(self) -> None:
        """Refuse what needs tokens of the session's own."""
        if self.history is not None:
            raise RequestError(400, "session_id", f"session {self.id!r} is not a streaming one: only /generate has it")

    async def is_busy(self) -> bool:
        """Whether a turn holds it whose reader is still there."""
        return isinstance(self.holder, TurnLock) and not await self.holder.request.is_disconnected()

    async def lock(self, holder: "SessionLock", *, queue: bool) -> None:
        """Lock it when it is free; 409 if a turn has it and nobody said to wait for that."""
        async with self.queue_lock:
            while self.holder is not None:
                if not queue and await self.is_busy():
                    raise _busy(self.id)
                await self.is_free.wait()
            self.check_open()
            self.holder = holder
            self.is_free.clear()


class SessionLock:
    """Exclusive use of a session, until the engine's last event if anything was sent."""

    def __init__(self, session: ServerSession) -> None:
        self.session = session
        self.is_sent = False
        self.on_release: Callable[[], None] = lambda: None

    def on_sent(self) -> None:
        """Something is on its way to the engine."""
        self.is_sent = True

    def release(self) -> None:
        """The session is free again; who does not hold it changes nothing."""
        if self.session.holder is self:
            self.session.holder = None
            self.session.is_free.set()
            self.on_release()


class TurnLock(SessionLock):
    """A session locked for a turn."""

    def __init__(self, session: ServerSession, language: Language, request: Request) -> None:
        super().__init__(session)
        self.request = request
        self.turn = ClientTurn(session.client_session, language)
        self.on_lost: Callable[[], None] = lambda: None  # the engine says that the session is not what it is here

    def on_sent(self) -> None:
        """The turn is on its way to the engine."""
        super().on_sent()
        self.turn.on_sent()

    def on_event(self, event: Event) -> None:
        """The turn's next event; the last one releases the session."""
        self.turn.on_event(event)
        if isinstance(event, Refused) and (event.param == "session_id" or event.status >= _OUTCOME_UNKNOWN):
            self.on_lost()
        if isinstance(event, Finished | Refused):
            self.release()


class ChangeLock(SessionLock):
    """A session locked for a rewind or a fork."""

    def __init__(self, session: ServerSession) -> None:
        super().__init__(session)
        self.apply: Callable[[SessionState], None] = lambda state: None  # does here what the engine has done

    def on_event(self, event: Event) -> None:
        """The engine has carried it out, or not."""
        if isinstance(event, SessionState):
            self.apply(event)
        self.release()


class PendingClose:
    """A close on its way; one that is not carried out leaves the session open."""

    def __init__(self, table: "SessionTable", session: ServerSession) -> None:
        self._table = table
        self._session = session

    def on_sent(self) -> None:
        """Nothing more begins in the session."""
        self._session.num_closing += 1

    def on_event(self, event: Event) -> None:
        """The engine has closed it, does not know it, or refuses."""
        self._session.num_closing -= 1
        if isinstance(event, SessionClosed) or (isinstance(event, Refused) and event.status == 404):
            self._table.forget(self._session)


class SessionTable:
    """All sessions that were opened here, or that were learnt of."""

    def __init__(self, *, learns: bool = False) -> None:
        self.learns = learns  # sessions go on elsewhere, too: what is known here may be asked for again
        self._table: dict[tuple[str, str], ServerSession] = {}  # by key
        self._timed: dict[tuple[str, str], ServerSession] = {}  # of those, whose idle time only the server knows
        self._check_at = CHECK_AT_MIN
        self.on_add: OnHeld = tell_nobody

    @property
    def keys(self) -> list[SessionKey]:
        """The clients of all sessions, and their ids."""
        return list(self._table)

    @property
    def needs_check(self) -> bool:
        """Whether it is time to look for sessions that the engine has closed by itself."""
        return len(self._table) >= self._check_at

    def add(self, session: ServerSession) -> None:
        """The engine has opened a session."""
        self._timed.pop(session.key, None)
        self._table[session.key] = session
        if session.history is not None:
            self._timed[session.key] = session
        self.on_add(*session.key)

    def find(self, session_id: str, client: str = "") -> ServerSession:
        """A client's session of this id; 404 if there is none, 410 if it is closing."""
        found = self._table.get((client, session_id))
        if found is None:
            raise RequestError(404, "session_id", f"there is no session {session_id[:100]!r}")
        found.check_open()
        return found

    def get(self, session_id: str, client: str = "") -> ServerSession | None:
        """A client's session of this id, closing or not; None if it was not opened here."""
        return self._table.get((client, session_id))

    def expired(self) -> list[ServerSession]:
        """Sessions whose time is up, as far as only the server can know."""
        return [each for each in self._timed.values() if each.history is not None and each.history.is_expired]

    def idle_conversations(self, client: str) -> list[ServerSession]:
        """A client's sessions that the server has opened by itself and nobody uses now, the last used one last."""
        every = (each for each in self._table.values() if each.client == client)
        return [each for each in every if each.client_session.tokens is not None and each.holder is None]

    def rewound(self, session: ServerSession) -> Callable[[SessionState], None]:
        """What is done here when the engine has rewound a session."""
        return (lambda _: self._lose(session)) if self.learns else session.client_session.rewind

    def forget_all(self) -> None:
        """The engine has ended, and another knows none of these sessions as they are known here."""
        for session in self.snapshot():
            self._lose(session)

    def _lose(self, session: ServerSession) -> None:
        """Forget a session that the engine may know better; whoever waits for it must ask again."""
        session.is_lost = True
        self.forget(session)

    def forget(self, session: ServerSession) -> None:
        """The engine has closed it."""
        if self._table.get(session.key) is session:
            del self._table[session.key]
            self._timed.pop(session.key, None)

    def snapshot(self) -> list[ServerSession]:
        """The sessions that are open now, to be compared with what the engine has a moment later."""
        return list(self._table.values())

    def forget_missing(self, before: list[ServerSession], open_keys: set[tuple[str, str]]) -> None:
        """Forget sessions that were open before the engine was asked, and that it does not have any more."""
        for session in before:
            if session.key not in open_keys:
                self.forget(session)
        self._check_at = max(CHECK_AT_MIN, 2 * len(self._table))  # so that opening many costs each the same

    @asynccontextmanager
    async def lock_for_turn(
        self,
        request: Request,
        of: TurnOf,
        language: Language,
        *,
        timeout_s: float | None,
        waiting_max: int | None = None,
    ) -> AsyncIterator[TurnLock]:
        """A session locked for a turn until the turn ends, or until here if it is never sent.

        At most `waiting_max` turns of its client wait for their sessions.
        """
        session_id, client = of.session_id, caller(request).name
        session = self.find(session_id, client)
        session.check_streaming()
        if await session.is_busy():
            session.client_session.check_number(of.number)
            if not of.queue:
                raise _busy(session_id)
            num_waiting = sum(each.num_waiting for each in self._table.values() if each.client == client)
            if waiting_max is not None and num_waiting >= waiting_max:
                raise CapacityError(429, f"{num_waiting} requests of this key wait: it may have {waiting_max}")
        if session.num_waiting >= WAITING_MAX:
            raise CapacityError(429, f"{WAITING_MAX} turns wait for session {session_id!r} already")
        lock = TurnLock(session, language, request)
        if self.learns:
            lock.on_lost = partial(self._lose, session)
        self._table[session.key] = self._table.pop(session.key)  # the most recently used one is the last
        try:
            await _lock_in_time(lock, queue=of.queue, timeout_s=timeout_s)
            yield lock
        finally:
            if not lock.is_sent:
                lock.release()

    @asynccontextmanager
    async def lock_for_change(self, request: Request, session_id: str, *, within_s: float) -> AsyncIterator[ChangeLock]:
        """A session locked until what is sent meanwhile was answered; 409 if a turn has it, 503 if it is not free."""
        session = self.find(session_id, caller(request).name)
        session.check_streaming()
        if await session.is_busy():
            raise _busy(session_id)
        change = ChangeLock(session)
        try:
            try:
                await while_connected(request, session.lock(change, queue=False), within_s)
            except TimeoutError as error:
                raise CapacityError(503, f"session {session_id!r} was not free within {within_s:g} s") from error
            yield change
        finally:
            if not change.is_sent:
                change.release()


async def _lock_in_time(lock: TurnLock, *, queue: bool, timeout_s: float | None) -> None:
    """Lock a session for a turn when it is free, while its client is there and its time not up."""
    session = lock.session
    session.num_waiting += 1
    try:
        await while_connected(lock.request, session.lock(lock, queue=queue), timeout_s)
    except TimeoutError as error:
        reason = f"session {session.id!r} was not free within {timeout_s:g} s"
        raise RequestError(504, "timeout", reason) from error
    finally:
        session.num_waiting -= 1


def _busy(session_id: str) -> RequestError:
    return RequestError(409, "session_id", f"session {session_id!r} has a turn that has not ended (queue: true waits)")
