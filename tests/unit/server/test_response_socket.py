"""A WebSocket of responses: lanes, limits, and what is left when it ends; the engine is a stand-in that can be held."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from roost.messages import Abort, Submit
from roost.server import response_socket
from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.response_socket import ACTIVE_MAX, KEPT_MAX, LANES_MAX, WAITING_MAX
from roost.server.state import ServerState
from tests.support.talking_engine import TalkingEngine, until

LAST = ("response.completed", "response.incomplete", "response.failed", "error")


class Socket:
    """The client's end of one WebSocket; what the server sends can be left unread."""

    def __init__(self, engine: TalkingEngine) -> None:
        self.engine = engine
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.events: list[dict[str, Any]] = []
        self.closed: int | None = None
        self.is_at_work = False
        self.reads = asyncio.Event()
        self.reads.set()

    async def receive(self) -> dict[str, Any]:
        """What the server reads next."""
        return await self.sent.get()

    async def send(self, message: Any) -> None:
        """What the server sends."""
        await self.reads.wait()
        if message["type"] == "websocket.send":
            self.events.append(json.loads(message["text"]))
        elif message["type"] == "websocket.close":
            self.closed = message["code"]

    def say(self, message: Any) -> None:
        """Send a message."""
        text = message if isinstance(message, str) else json.dumps(message)
        self.sent.put_nowait({"type": "websocket.receive", "text": text})

    def ask(self, lane: str | None = None, **fields: Any) -> None:
        """Ask for a response."""
        where = {} if lane is None else {"stream_id": lane}
        self.say({"type": "response.create", "input": "Hello.", "store": False, **where, **fields})

    def leave(self) -> None:
        """Disconnect."""
        self.sent.put_nowait({"type": "websocket.disconnect", "code": 1006})

    async def ended(self, number: int) -> list[dict[str, Any]]:
        """The last events of the first so many responses."""
        await until(lambda: sum(event["type"] in LAST for event in self.events) >= number)
        return [event for event in self.events if event["type"] in LAST]


@asynccontextmanager
async def connected(stall_s: int = 60) -> AsyncIterator[Socket]:
    """A socket that is open; at the end nothing of it is left."""
    engine = TalkingEngine()
    server = ServerState(ServerConfig(stall_s=stall_s), engine)
    server.open()
    socket = Socket(engine)
    scope = {
        "type": "websocket",
        "path": "/v1/responses",
        "headers": [(b"host", b"test")],
        "query_string": b"",
        "subprotocols": [],
        "state": {"set_at_work": lambda is_at_work: setattr(socket, "is_at_work", is_at_work)},
    }
    socket.sent.put_nowait({"type": "websocket.connect"})
    serving = asyncio.create_task(make_app(server)(scope, socket.receive, socket.send))
    try:
        yield socket
        socket.reads.set()
        socket.leave()
        await serving
        await until(lambda: not engine.sessions)
        assert not engine.held
    finally:
        await engine.stop()


def run(story: Callable[[], Awaitable[None]]) -> None:
    """Run a test's story."""
    asyncio.run(story())  # type: ignore[arg-type]


def test_a_lane_is_in_order_and_lanes_run_beside_each_other() -> None:
    async def story() -> None:
        async with connected() as socket:
            socket.engine.holds = True
            for lane in ("a", "b", "a", None):
                socket.ask(lane)
            await until(lambda: len(socket.engine.held) == 3)  # the second of a waits for the first
            assert socket.is_at_work
            socket.engine.let_go()
            await until(lambda: len(socket.engine.held) == 1)
            socket.engine.let_go()
            lanes = [event.get("stream_id") for event in await socket.ended(4)]
            assert sorted(map(str, lanes)) == ["None", "a", "a", "b"]
            await until(lambda: not socket.is_at_work)
            numbers = [event["sequence_number"] for event in socket.events if event.get("stream_id") == "a"]
            one = numbers[: len(numbers) // 2]
            assert numbers == [*one, *one] == [*range(len(one)), *range(len(one))]

    run(story)


def test_what_is_not_stored_can_be_followed_on_the_socket_alone() -> None:
    async def story() -> None:
        async with connected() as socket:
            socket.ask()
            (first,) = await socket.ended(1)
            socket.ask(previous_response_id=first["response"]["id"])
            second = (await socket.ended(2))[1]["response"]
            assert (
                second["usage"]["input_tokens_details"]["cached_tokens"] == first["response"]["usage"]["total_tokens"]
            )
            for number in range(KEPT_MAX - 1):
                socket.ask()
                await socket.ended(3 + number)
            socket.ask(previous_response_id=first["response"]["id"])
            refused = (await socket.ended(KEPT_MAX + 2))[-1]
            assert (refused["status"], refused["error"]["code"]) == (400, "previous_response_not_found")
            assert len(socket.engine.sessions) <= KEPT_MAX

    run(story)


def test_so_many_responses_run_at_once_so_many_wait_and_one_more_is_refused() -> None:
    async def story() -> None:
        async with connected() as socket:
            socket.engine.holds = True
            for number in range(LANES_MAX):
                socket.ask(f"lane {number}")
            await until(lambda: len(socket.engine.held) == ACTIVE_MAX)
            socket.ask("one more lane")
            (refused,) = await socket.ended(1)
            assert refused["status"] == 429 and "lanes" in refused["error"]["message"]
            for _ in range(ACTIVE_MAX + WAITING_MAX - LANES_MAX):
                socket.ask("lane 0")
            socket.ask("lane 0")
            refused = (await socket.ended(2))[1]
            assert refused["status"] == 429 and refused["error"]["code"] == "rate_limit_exceeded"
            assert len(socket.engine.commands(Submit)) == ACTIVE_MAX

    run(story)


def test_what_cannot_be_read_is_refused_and_the_socket_goes_on() -> None:
    async def story() -> None:
        async with connected() as socket:
            for message, param in (
                ("{", "body"),
                ("[]", "body"),
                ({"type": "response.wrong"}, "type"),
                ({"type": "response.create", "stream_id": "x" * 257}, "stream_id"),
                ({"type": "response.create", "stream_id": 1}, "stream_id"),
                ({"type": "response.create", "inptu": "x"}, "inptu"),
                ({"type": "response.create", "input": "x", "background": True}, "background"),
            ):
                before = len(socket.events)
                socket.say(message)
                event = (await socket.ended(before + 1))[-1]
                assert (event["type"], event["status"], event["error"]["param"]) == ("error", 400, param)
            socket.ask("x" * 256)
            assert (await socket.ended(8))[-1]["type"] == "response.completed"

    run(story)


def test_steering_is_refused_by_name_with_what_was_said() -> None:
    async def story() -> None:
        async with connected() as socket:
            socket.say({"type": "response.steer", "input": "x", "previous_response_id": "r"})
            await until(lambda: bool(socket.events))
            (event,) = socket.events
            assert (event["type"], event["error"]["code"]) == ("response.steer.failed", "steering_not_supported")
            assert event["steer"] == {"input": "x", "previous_response_id": "r"}

    run(story)


def test_a_socket_is_closed_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_socket, "OPEN_S", 0)

    async def story() -> None:
        async with connected() as socket:
            await until(lambda: socket.closed is not None)
            assert socket.closed == 1001
            assert socket.events[0]["error"]["code"] == "websocket_connection_limit_reached"

    run(story)


@pytest.mark.parametrize("num_events", range(10))
def test_a_socket_that_is_cut_after_any_event_leaves_nothing_behind(num_events: int) -> None:
    async def story() -> None:
        async with connected() as socket:
            socket.engine.holds = num_events == 0
            socket.ask()
            if num_events == 0:
                await until(lambda: bool(socket.engine.held))
            else:
                await until(lambda: len(socket.events) >= min(num_events, 9))
            socket.leave()
            if num_events == 0:
                await until(lambda: bool(socket.engine.commands(Abort)))

    run(story)


def test_a_client_that_reads_nothing_is_given_up() -> None:
    async def story() -> None:
        async with connected(stall_s=0) as socket:
            socket.engine.holds = True
            socket.ask("a")
            socket.ask("b")
            await until(lambda: len(socket.engine.held) == 2)
            socket.reads.clear()
            number, submit = socket.engine.held.pop()
            socket.engine._talk(number, submit)
            await until(lambda: bool(socket.engine.commands(Abort)))  # the other one

    run(story)
