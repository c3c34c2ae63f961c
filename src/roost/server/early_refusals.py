"""Early refusals: responses to clients that do not get as far as the application.

Ready-made bytes, sent without a request having been parsed. Called by listeners and connections.
"""

import logging
from http import HTTPStatus

import msgspec

from roost.server.responses import error_body

_log = logging.getLogger("roost.server")


def refusal(status: int, message: str) -> bytes:
    """A complete response, after which the connection is closed."""
    body = msgspec.json.encode(error_body(status, message, None))
    retry = "retry-after: 1\r\n" if status == HTTPStatus.SERVICE_UNAVAILABLE else ""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
    )
    return head.encode() + body


def full() -> bytes:
    """The response when all slots are taken by requests at work; logs a warning for the operator too."""
    _log.warning("all connections are in use, so others are refused; --max-connections allows more")
    return _FULL


SERVER_FULL = "all connections of this server are at work"
_FULL = refusal(503, SERVER_FULL)
SLOW_HEADERS = refusal(408, "the request's headers took too long to arrive (--header-s)")
SLOW_BODY = refusal(408, "the request's body took too long to arrive (--body-s)")
