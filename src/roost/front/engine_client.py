"""Engine client: the open exchanges with an engine, whichever way commands and events travel.

An exchange is one command and what comes back for it: a single answer, or the events of a request up to the last. It
stays open until then, whether or not anybody still waits. When the engine ends, every open exchange is refused. Never
waits: `library.engine_thread` (an engine in this process, callers on any thread) and `server.engine_process` (an engine
in a process of its own, callers on the event loop) add how a command travels and how a caller waits for its events.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from itertools import count
from typing import Protocol

from roost.messages import Abort, Command, Event, Finished, Refused, Reply, Submit


class Observer(Protocol):
    """Follows an exchange to its end, even if its caller has left."""

    def on_sent(self) -> None:
        """The command is on its way to the engine: its last event will come."""

    def on_event(self, event: Event) -> None:
        """The next event, before the caller gets it."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """A command that was sent, and who gets what comes back."""

    request_id: str | None  # of a request, which has several events; None: a command with one answer
    deliver: Reply  # hands an event to the caller
    observer: Observer | None

    def is_last(self, event: Event) -> bool:
        """Whether nothing comes after this event."""
        return self.request_id is None or isinstance(event, Finished | Refused)


class EngineClient(ABC):
    """What every way to talk to an engine has in common."""

    def __init__(self) -> None:
        self._exchanges: dict[int, Exchange] = {}  # by number, until the last event
        self._numbers = count(1)  # of exchanges; 0 is for commands that nobody waits for
        self._ids = count()

    @abstractmethod
    def check_running(self) -> None:
        """Raise CapacityError if nothing can be sent to the engine."""

    @abstractmethod
    def tell(self, command: Command) -> None:
        """Send a command that is carried out whenever it is read; nobody waits for an answer."""

    def new_id(self) -> str:
        """An id for a request that no other has or had."""
        return f"r{next(self._ids)}"

    def abort(self, request_id: str) -> None:
        """End a request, if it has not ended yet."""
        self.tell(Abort(request_id=request_id))

    def open_exchange(self, command: Command, deliver: Reply, observer: Observer | None = None) -> int:
        """The number of a new exchange, under which the command must now be sent."""
        self.check_running()
        number = next(self._numbers)
        request_id = command.request_id if isinstance(command, Submit) else None
        self._exchanges[number] = Exchange(request_id=request_id, deliver=deliver, observer=observer)
        if observer is not None:
            observer.on_sent()
        return number

    def receive(self, number: int, event: Event) -> None:
        """An event came from the engine: hand it to the observer and the caller of its exchange."""
        exchange = self._exchanges.get(number)
        if exchange is None:
            return
        if exchange.is_last(event) and self._exchanges.pop(number, None) is None:
            return  # somebody else was first: a grammar's answer comes on another thread than the engine's end
        if exchange.observer is not None:
            exchange.observer.on_event(event)
        exchange.deliver(event)

    def refuse_all(self, status: int, message: str) -> None:
        """The engine has ended: every open exchange ends with a refusal that names no request."""
        for number in list(self._exchanges):
            self.receive(number, Refused(request_id="", status=status, message=message))
