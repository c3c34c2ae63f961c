"""Failures: what clients are told by the ingress itself, in the form of the API that they speak.

Called where no replica answers any more, or none was asked.
"""

import msgspec
from starlette.responses import Response

from roost.errors import CapacityError, RequestError
from roost.server.refusals import error_for_path, is_message_path
from roost.server.responses import error_of, json_response

GONE = "the replica that answered has ended; sessions that are journaled go on, others are gone"


def error_response(path: str, error: RequestError | CapacityError) -> Response:
    """An error as a response."""
    status, body = error_for_path(path, error.status, error_of(error), 0)
    response = json_response(body, status)
    if error.status == 503:
        response.headers["retry-after"] = "1"
    return response


def last_event(path: str, error: CapacityError) -> bytes:
    """An error as the end of a stream of events that has begun."""
    body = error_for_path(path, error.status, error_of(error), 0)[1]
    if path == "/v1/responses" or is_message_path(path):
        return b"event: error\ndata: " + msgspec.json.encode({"type": "error", **body}) + b"\n\n"
    return b"data: " + msgspec.json.encode(body) + b"\n\ndata: [DONE]\n\n"
