"""An application that is run without a socket: what it is told, and what it sends in batches."""

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from roost.ray.app_run import AT_WORK, AppRun, Call

HTTP = {"type": "http", "method": "POST", "path": "/", "headers": [], "query_string": b"", "app": object()}


def _run(app: Any, call: Call, *, batches_max: int = 1000) -> list[Message]:
    """What an application sends to somebody who leaves after so many batches."""

    async def read() -> list[Message]:
        run, tasks = AppRun(call), []
        run.begin(app, tasks.append)
        found, batches, num_batches = [], run.batches(), 0
        async for batch in batches:
            found += batch
            num_batches += 1
            if num_batches == batches_max:
                break
        await batches.aclose()
        await asyncio.wait_for(tasks[0], 10)
        return found

    return asyncio.run(read())


def test_a_call_has_what_is_data_and_its_answer_comes_whole_and_in_order() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert "app" not in scope
        body = (await receive())["body"]
        await send({"type": "http.response.start", "status": 200})
        for each in body:
            await send({"type": "http.response.body", "body": bytes([each]), "more_body": True})
            await asyncio.sleep(0)
        await send({"type": "http.response.body"})

    start, *parts = _run(app, Call.of(HTTP, bytes(range(100))))
    assert start["status"] == 200
    assert b"".join(part.get("body", b"") for part in parts) == bytes(range(100))


def test_who_leaves_has_disconnected() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "http.response.start", "status": 200})
        assert (await receive())["type"] == "http.disconnect"

    assert _run(app, Call.of(HTTP), batches_max=1) == [{"type": "http.response.start", "status": 200}]


def test_a_socket_says_whether_its_client_waits() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["type"] == "websocket.connect"
        await send({"type": "websocket.accept"})
        scope["state"]["set_at_work"](True)

    accept, at_work = _run(app, Call.of({**HTTP, "type": "websocket"}, socket="s"))
    assert (accept["type"], at_work) == ("websocket.accept", {"type": AT_WORK, "value": True})
