"""Engine thread: an engine that runs in a thread of this process, and how other threads talk to it.

Owns that thread. When the engine ends, whatever the reason, everybody who waits is told. Closing ends what still runs.
Called by the library, on any thread.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue

from roost.errors import CapacityError, RequestError
from roost.front.answer import refusal
from roost.front.engine_client import EngineClient
from roost.messages import Command, CompileGrammar, Event, Refused, Reply, Submit
from roost.sched.engine import Engine
from roost.tools.answer_form import Found, Grammar, Search, advance

Events = SimpleQueue[Event]


class EngineThread(EngineClient):
    """An engine in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        super().__init__()
        self._engine = engine
        self._failure: BaseException | None = None
        self._is_closed = False  # nothing more is sent
        # of sending and closing; re-entrant, since a finaliser may close a session meanwhile
        self._lock = threading.RLock()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @property
    def has_journal(self) -> bool:
        """Whether sessions go on after the engine has ended."""
        return self._engine.state.journal is not None

    def check_running(self) -> None:
        """Raise CapacityError if the engine has ended, or was told to."""
        if self._is_closed:
            raise CapacityError(503, "the engine has ended") from self._failure

    def send(self, command: Command, deliver: Reply) -> None:
        """Send a command; its events are delivered on the engine's thread."""
        with self._lock:
            number = self.open_exchange(command, deliver)
            self._engine.post(command, partial(self.receive, number))

    def ask(self, command: Command) -> Event:
        """The answer to a command that has one; a refusal is raised."""
        events = Events()
        self.send(command, events.put)
        answer = events.get()
        if isinstance(answer, Refused):
            raise refusal(answer)
        return answer

    def find(self, search: Search[Found]) -> Found:
        """What a search for grammars finds; each is compiled, and waited for."""
        asked = advance(search)
        while isinstance(asked, Grammar):
            error = ""
            try:
                self.ask(CompileGrammar(grammar=asked.text))
            except RequestError as refused:
                error = refused.reason
            asked = advance(search, error)
        return asked

    def tell(self, command: Command) -> None:
        """Send a command that nobody waits for."""
        self._engine.post(command, _ignore)

    @contextmanager
    def submit(self, submits: Sequence[Submit]) -> Iterator[Events]:
        """The events of some requests; leaving before they have ended ends them."""
        events = Events()
        try:
            for submit in submits:
                self.send(submit, events.put)
            yield events
        except BaseException:
            for submit in submits:
                self.abort(submit.request_id)
            raise

    def close(self) -> None:
        """End the engine: running requests are aborted first."""
        with self._lock:  # so that each abort comes after its request, and nothing after the last one
            self._is_closed = True
            for exchange in list(self._exchanges.values()):
                if exchange.request_id is not None:
                    self.abort(exchange.request_id)
        self._engine.stop()
        self._thread.join()

    def _run(self) -> None:
        """On the engine's thread: run it, and when it ends tell everybody who still waits."""
        try:
            self._engine.run()
        except Exception as error:  # noqa: BLE001 (whatever it was, those who wait must not wait for ever)
            self._failure = error
        with self._lock:
            self._is_closed = True
            reason = "" if self._failure is None else f": {self._failure}"
            self.refuse_all(503, f"the engine has ended{reason}")


def _ignore(event: Event) -> None:
    """Nobody waits for this answer."""
