"""Early refusals: answers to those who do not get as far as the application.

Bytes that can be sent without a request to answer. Called by listeners and connections.
"""

import logging
from http import HTTPStatus

import msgspec

from roost.server.context import error_body

_log = logging.getLogger("roost.server")


def refusal(status: int, message: str) -> bytes:
    """A whole answer, after which the connection is closed."""
    body = msgspec.json.encode(error_body(status, message, None))
    retry = "retry-after: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


def full() -> bytes:
    """The answer to who finds all places taken; the operator hears of it too."""
    _log.warning("all connections are at work, so that others are refused; --max-connections allows more")
    return _FULL


NO_ROOM = "all connections of this server are at work"
_FULL = refusal(503, NO_ROOM)
SLOW_HEADERS = refusal(408, "the request's headers took too long to arrive (--header-s)")
SLOW_BODY = refusal(408, "the request's body took too long to arrive (--body-s)")
