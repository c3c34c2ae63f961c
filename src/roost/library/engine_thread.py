"""Line: the engine's thread in this process, and the talk with it from any other.

Owns the thread and the inboxes of those who wait. When the engine ends, whatever the reason, everybody who waits is
told. Closing ends what still runs. Called by the library.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from queue import SimpleQueue

from roost.errors import CapacityError
from roost.front.answer import refusal
from roost.messages import Abort, Command, Event, Refused, Submit
from roost.sched.engine import Engine


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inbox:
    """Where the events of one call's requests arrive."""

    number: int
    request_ids: tuple[str, ...] = ()
    events: "SimpleQueue[Event]" = field(default_factory=SimpleQueue)


class Line:
    """An engine that runs in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._numbers = count()
        self._failure: BaseException | None = None
        self._waiting: dict[int, Inbox] = {}  # who is told when the engine ends
        self._closed = False  # nothing more is sent
        self._lock = threading.RLock()  # of those three; an abandoned stream may be collected while it is held
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def new_id(self, prefix: str) -> str:
        """A name that nothing else here has."""
        return f"{prefix}-{next(self._numbers)}"

    def inbox(self, *request_ids: str) -> Inbox:
        """A place for events."""
        return Inbox(number=next(self._numbers), request_ids=request_ids)

    def ask(self, command: Command) -> Event:
        """The answer to a command that has one; a refusal is raised."""
        inbox = self.inbox()
        self.send(command, inbox)
        try:
            answer = inbox.events.get()
        finally:
            self.forget(inbox)
        if isinstance(answer, Refused):
            raise refusal(answer)
        return answer

    @contextmanager
    def asked(self, asked: list[Submit]) -> Iterator["SimpleQueue[Event]"]:
        """The events of some requests; leaving before they have ended ends them."""
        inbox = self.inbox(*(submit.request_id for submit in asked))
        try:
            for submit in asked:
                self.send(submit, inbox)
            yield inbox.events
        except BaseException:
            self.abort(inbox)
            raise
        finally:
            self.forget(inbox)

    def send(self, command: Command, inbox: Inbox) -> None:
        """Send a command whose events come into an inbox."""
        with self._lock:
            if self._closed:
                raise CapacityError(503, "the engine has ended") from self._failure
            self._waiting[inbox.number] = inbox
            self._engine.post(command, inbox.events.put)

    def abort(self, inbox: Inbox) -> None:
        """End the requests of an inbox, if they have not ended yet."""
        for request_id in inbox.request_ids:
            self._engine.post(Abort(request_id=request_id), _nobody)

    def forget(self, inbox: Inbox) -> None:
        """Nobody waits at this inbox any more."""
        with self._lock:
            self._waiting.pop(inbox.number, None)

    def close(self) -> None:
        """End the engine: running requests are aborted first."""
        with self._lock:  # so that each abort comes after its request, and nothing after the last one
            self._closed = True
            for inbox in list(self._waiting.values()):
                self.abort(inbox)
        self._engine.stop()
        self._thread.join()

    def _run(self) -> None:
        """On the engine's thread: run it, and when it ends tell everybody who still waits."""
        try:
            self._engine.run()
        except Exception as error:  # noqa: BLE001 (whatever it was, those who wait must not wait for ever)
            self._failure = error
        with self._lock:
            self._closed = True
            for inbox in list(self._waiting.values()):
                inbox.events.put(Refused(request_id="", status=503, message=_ended(self._failure)))


def _ended(failure: BaseException | None) -> str:
    return "the engine has ended" + ("" if failure is None else f": {failure}")


def _nobody(event: Event) -> None:
    """Nobody waits for this answer."""
