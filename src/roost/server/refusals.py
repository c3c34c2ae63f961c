"""Refusals: the form of an error on OpenAI's and Anthropic's endpoints, where clients read more than its message.

On OpenAI's `code` is a word or null, a prompt that does not fit is a 400 `context_length_exceeded` with the maximum
length, and an aborted output is an error, since OpenAI's `finish_reason` has no value for it. Anthropic's have an
envelope of their own, and agents look for `prompt is too long`. On other endpoints `code` is the status, as in SGLang.
Called by the app and by streams, wherever an error is sent.
"""

from typing import Any

from roost.errors import CapacityError
from roost.server.message_events import error_body as message_error

ABORTED = 499  # nginx' "client closed request": not a status that clients retry by themselves
_OVERFLOW = 413
_CODES_BY_PARAM = {
    (404, "model"): "model_not_found",
    (404, "previous_response_id"): "previous_response_not_found",
    (409, "conversation"): "conversation_locked",
}
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", ABORTED: "request_aborted"}


def is_openai_path(path: str) -> bool:
    """Whether a path belongs to OpenAI's API, implemented here or not."""
    return path.startswith("/v1/") and not f"{path}/".startswith("/v1/sessions/")


def is_message_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API."""
    return f"{path}/".startswith("/v1/messages/")


def error_for_path(path: str, status: int, body: dict[str, Any], context: int) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in the form that its path calls for; `context`: most tokens of a sequence."""
    if not is_openai_path(path):
        return status, body
    error: dict[str, Any] = body["error"]
    param = error["param"]
    if is_message_path(path):
        is_overflow = status == _OVERFLOW and param != "body"
        said = f"prompt is too long: {error['message']}" if is_overflow else error["message"]
        status = 400 if is_overflow else status
        # then Anthropic's own helpers go on without threads, by sending the whole history
        details = {"error_code": "thread_unsupported_request", "unsupported": []} if param == "thread" else None
        return status, message_error(status, said, details)
    if status == _OVERFLOW and param != "body":  # too many tokens; too many bytes is another error
        reason = error["message"].removeprefix(f"{param}: ")
        message = f"{param}: This model's maximum context length is {context} tokens. However, {reason}"
        return 400, {**body, "error": {**error, "message": message, "code": "context_length_exceeded"}}
    code = _CODES_BY_PARAM.get((status, param), _CODES.get(status))
    return status, {**body, "error": {**error, "code": code}}


def aborted(*, is_draining: bool) -> CapacityError:
    """The error in place of an output that was aborted."""
    if is_draining:
        return CapacityError(503, "the server is stopping: the output was ended before it was complete")
    return CapacityError(ABORTED, "the request was aborted before its output was complete")
