"""Exchanges with an engine: each ends once, whoever waits; over a transport that the test makes up."""

import pytest

from roost.errors import CapacityError
from roost.front.engine_client import EngineClient
from roost.messages import (
    Abort,
    CloseSession,
    Command,
    Event,
    Finished,
    Refused,
    SessionClosed,
    SpecStats,
    Submit,
    Tokens,
    Usage,
)

TOKENS = Tokens(request_id="r0", tokens=(1,))
FINISHED = Finished(
    request_id="r0",
    reason="length",
    usage=Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=1),
    max_new_tokens=1,
    spec=SpecStats(),
)
CLOSED = SessionClosed(session_id="s")


class Paper(EngineClient):
    """Commands are written down; the test says what comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Command] = []
        self.is_running = True

    def check_running(self) -> None:
        """As the test says."""
        if not self.is_running:
            raise CapacityError(503, "not running")

    def tell(self, command: Command) -> None:
        """Note it."""
        self.told.append(command)


class Seen:
    """Notes what an observer is told, and in which order with what is delivered."""

    def __init__(self) -> None:
        self.notes: list[tuple[str, Event | None]] = []

    def on_sent(self) -> None:
        """It was sent."""
        self.notes.append(("sent", None))

    def on_event(self, event: Event) -> None:
        """It goes on."""
        self.notes.append(("observer", event))

    def deliver(self, event: Event) -> None:
        """The caller gets it."""
        self.notes.append(("caller", event))


def test_a_request_is_open_until_its_last_event_and_a_command_until_its_answer() -> None:
    client, seen = Paper(), Seen()
    submit = Submit(request_id="r0", tokens=(1,))
    request = client.open_exchange(submit, seen.deliver, seen)
    command = client.open_exchange(CloseSession(session_id="s"), seen.deliver)
    for number, event in ((request, TOKENS), (command, CLOSED), (command, CLOSED), (request, FINISHED)):
        client.receive(number, event)
    client.receive(request, TOKENS)
    client.receive(0, TOKENS)
    both = [("observer", TOKENS), ("caller", TOKENS), ("caller", CLOSED), ("observer", FINISHED), ("caller", FINISHED)]
    assert seen.notes == [("sent", None), *both], "the observer first, nothing after the last event"


def test_when_the_engine_ends_every_open_exchange_is_refused_once() -> None:
    client, seen = Paper(), [Seen() for _ in range(3)]
    for number, each in enumerate(seen):
        client.open_exchange(Submit(request_id=str(number), tokens=(1,)), each.deliver)
    client.receive(1, FINISHED)
    client.refuse_all(500, "gone")
    client.refuse_all(500, "gone")
    gone = Refused(request_id="", status=500, message="gone")
    assert [each.notes for each in seen] == [[("caller", FINISHED)], [("caller", gone)], [("caller", gone)]]


def test_nothing_is_opened_that_cannot_be_sent() -> None:
    client, seen = Paper(), Seen()
    client.is_running = False
    with pytest.raises(CapacityError, match="not running"):
        client.open_exchange(CloseSession(session_id="s"), seen.deliver, seen)
    client.refuse_all(500, "gone")
    assert seen.notes == []


def test_ids_are_new_and_an_abort_needs_no_exchange() -> None:
    client = Paper()
    assert len({client.new_id() for _ in range(100)}) == 100
    client.abort("r7")
    assert client.told == [Abort(request_id="r7")]
