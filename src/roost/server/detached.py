"""Detached requests: a request whose client is not waited for any more, or that came over a WebSocket.

It has the key, the application and the headers of what it came from, and counts as connected until it is told
otherwise. Called by whoever runs a response beside an HTTP request.
"""

import asyncio
from collections.abc import MutableMapping
from typing import Any

from starlette.requests import HTTPConnection, Request


def detached(source: HTTPConnection) -> Request:
    """A request in place of a connection, which never disconnects by itself."""

    async def receive() -> MutableMapping[str, Any]:
        await asyncio.Event().wait()
        return {"type": "http.disconnect"}

    return Request({**source.scope, "type": "http", "method": "POST"}, receive)
