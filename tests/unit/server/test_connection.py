"""One line to a server without an engine: answers that nobody reads, answers that break, requests without sense."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from typing import Any, cast

import pytest
import uvicorn
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from roost.server.app import make_app
from roost.server.config import ServerConfig
from roost.server.connection import Connection
from roost.server.connections import Connections
from roost.server.engine_process import EngineProcess
from roost.server.listener import bind_listeners
from roost.server.logs import REQUESTS
from roost.server.request_log import _PATH_LEN_MAX, RequestLog
from roost.server.state import ServerState

LIMITS = ServerConfig(port=0, stall_s=1, keep_alive_s=1, body_s=1)
PATIENCE_S = 120
LARGE = 64 * 2**20  # more than the system keeps for a reader
HEAD = b"HTTP/1.1\r\nhost: localhost\r\n"

Talk = Callable[[asyncio.StreamReader, asyncio.StreamWriter, Connections], Awaitable[None]]


def talk(app: ASGIApp, client: Talk, limits: ServerConfig = LIMITS) -> None:
    """Serve an application to one client, and stop."""

    async def run() -> None:
        listeners = bind_listeners(limits)
        http = partial(Connection, limits=limits, connections=listeners.connections)
        config = uvicorn.Config(app, http=cast(Any, http), ws="none", lifespan="off", log_config=None)
        server = uvicorn.Server(config)
        serving = asyncio.create_task(server.serve(listeners.sockets))
        while not server.started:
            await asyncio.sleep(0)
        reader, writer = await asyncio.open_connection("127.0.0.1", listeners.port, limit=1024)
        await client(reader, writer, listeners.connections)
        writer.close()
        server.should_exit = True
        await serving

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


@pytest.mark.parametrize("last", [b"", b"connection: close\r\n"])
def test_who_does_not_read_its_answer_is_given_up(last: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        writer.write(b"GET / " + HEAD + last + b"\r\n")
        await reader.readexactly(100)
        assert connections.num_open == 1
        while connections.num_open:
            await asyncio.sleep(0.01)

    talk(PlainTextResponse(b"a" * LARGE), client)


def test_who_reads_slowly_is_given_time_as_long_as_it_reads() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        writer.write(b"GET / " + HEAD + b"connection: close\r\n\r\n")
        await reader.readexactly(100)
        (connection,) = cast(set[Connection], connections._main._members)
        for _ in range(10):
            await reader.readexactly(LARGE // 16)
            connection._on_timeout()
            assert connections.num_open == 1
        while await reader.read(LARGE):
            pass

    talk(PlainTextResponse(b"a" * LARGE), client)


def test_what_is_said_is_sent_at_once_and_not_when_the_last_was_confirmed() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        while not connections._main._members:
            await asyncio.sleep(0)
        (connection,) = cast(set[Connection], connections._main._members)
        line = connection.transport.get_extra_info("socket")
        assert line.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

    talk(PlainTextResponse(b""), client)


def test_bytes_that_drip_win_no_time() -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        while not connections._main._members:
            await asyncio.sleep(0)
        (connection,) = cast(set[Connection], connections._main._members)
        for begins in (b"POST / " + HEAD + b"content-length: 3\r\nx: ", b"\r\n\r\n"):
            connection.data_received(begins)
            timer = connection._timer
            for _ in range(2):
                connection.data_received(b"a")
                assert connection._timer is timer
        connection.data_received(b"a")
        assert connection._timer is None  # now it is the server that is waited for
        connection.transport.abort()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    talk(app, client)


class BrokenState(ServerState):
    """A server with a bug."""

    def check_alive(self) -> None:
        """Break."""
        raise RuntimeError("a bug")


async def breaks_off(scope: Scope, receive: Receive, send: Send) -> None:
    """Break after the answer has begun."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"a", "more_body": True})
    raise RuntimeError("a bug")


@pytest.mark.parametrize("is_early", [True, False])
def test_a_bug_is_reported_once_with_the_path_of_its_request(caplog: pytest.LogCaptureFixture, is_early: bool) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        writer.write(b"GET /server_info " + HEAD + b"connection: close\r\n\r\n")
        said = await reader.read()
        if is_early:
            assert said.startswith(b"HTTP/1.1 500 ")
            assert b"bug" not in said

    server = BrokenState(LIMITS, cast(EngineProcess, None))
    talk(RequestLog(make_app(server) if is_early else breaks_off, "usual"), client)
    (report,) = [record for record in caplog.records if record.exc_info]
    assert report.getMessage() == "GET /server_info failed"


NONSENSE = (
    b"5\r\nhello\r\nzzz\r\n",  # what should be the length of a chunk
    b"5\r\nhello\r\n0\r\n\r\n\x00\x01\r\n\r\n",
    b"fffffffffffffffffffffffff\r\n",
    b"-1\r\n",
)


@pytest.mark.parametrize("sent", NONSENSE)
def test_nonsense_after_an_answer_ends_the_line_and_is_no_bug(caplog: pytest.LogCaptureFixture, sent: bytes) -> None:
    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        writer.write(b"POST / " + HEAD + b"transfer-encoding: chunked\r\n\r\n")
        await reader.readuntil(b"answered")
        writer.write(sent)
        while connections.num_open:
            await asyncio.sleep(0.01)

    talk(PlainTextResponse(b"answered"), client)
    assert not [record for record in caplog.records if record.exc_info]


def test_an_address_that_has_its_share_is_refused_or_gives_up_its_own() -> None:
    at_work = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        at_work.set()
        while (await receive())["type"] != "http.disconnect":
            pass

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        place = writer.get_extra_info("peername")
        writer.write(b"GET / " + HEAD + b"\r\n")
        await at_work.wait()
        at_work.clear()
        idle, idle_writer = await asyncio.open_connection(*place)
        _, other_writer = await asyncio.open_connection(*place)
        assert await idle.read() == b""  # it had to leave
        other_writer.write(b"GET / " + HEAD + b"\r\n")
        await at_work.wait()
        refused, refused_writer = await asyncio.open_connection(*place)
        assert (await refused.read()).startswith(b"HTTP/1.1 503 ")
        for each in (idle_writer, other_writer, refused_writer, writer):
            each.close()

    talk(app, client, replace(LIMITS, max_connections_per_address=2))


@pytest.mark.parametrize(("which", "told"), [("all", 3), ("usual", 2), ("failed", 1), ("none", 0)])
def test_which_requests_are_told_of_can_be_chosen(caplog: pytest.LogCaptureFixture, which: str, told: int) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await PlainTextResponse(b"", 404 if scope["path"] == "/none" else 200)(scope, receive, send)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        for path in (b"/health", b"/generate", b"/none"):
            writer.write(b"GET " + path + b" " + HEAD + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")

    with caplog.at_level("INFO", REQUESTS):
        talk(RequestLog(app, which), client)
    assert _told(caplog) == ["/health", "/generate", "/none"][3 - told :]


def test_a_path_is_told_but_not_at_length(caplog: pytest.LogCaptureFixture) -> None:
    whole = "/" + "a" * (_PATH_LEN_MAX - 1)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connections: Connections) -> None:
        for path in (whole, whole + "b"):
            writer.write(f"GET {path} ".encode() + HEAD + b"\r\n")
            await reader.readuntil(b"\r\n\r\n")

    with caplog.at_level("INFO", REQUESTS):
        talk(RequestLog(PlainTextResponse(b""), "usual"), client)
    assert _told(caplog) == [whole, whole + "…"]


def _told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The paths of the requests that were told of."""
    return [record.getMessage().split()[1] for record in caplog.records if record.name == REQUESTS]
