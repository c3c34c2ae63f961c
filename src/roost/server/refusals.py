"""Refusals: the form of an error on OpenAI's endpoints, where clients read more than its message.

There `code` is a word or null, a prompt that does not fit is a 400 `context_length_exceeded` with the maximum length,
and an aborted output is an error, since OpenAI's `finish_reason` has no value for it. On other endpoints `code` is the
status, as in SGLang. Called by the app and by streams, wherever an error is sent.
"""

from typing import Any

from roost.errors import CapacityError

ABORTED = 499  # nginx' "client closed request": not a status that clients retry by themselves
_OVERFLOW = 413
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", ABORTED: "request_aborted"}


def is_openai_path(path: str) -> bool:
    """Whether a path belongs to OpenAI's API, implemented here or not."""
    return path.startswith("/v1/") and not f"{path}/".startswith("/v1/sessions/")


def error_for_path(path: str, status: int, body: dict[str, Any], context: int) -> tuple[int, dict[str, Any]]:
    """Status and body of an error in the form that its path calls for; `context`: most tokens of a sequence."""
    if not is_openai_path(path):
        return status, body
    error: dict[str, Any] = body["error"]
    param = error["param"]
    if status == _OVERFLOW and param != "body":  # too many tokens; too many bytes is another error
        reason = error["message"].removeprefix(f"{param}: ")
        message = f"{param}: This model's maximum context length is {context} tokens. However, {reason}"
        return 400, {**body, "error": {**error, "message": message, "code": "context_length_exceeded"}}
    code = "model_not_found" if (status, param) == (404, "model") else _CODES.get(status)
    return status, {**body, "error": {**error, "code": code}}


def aborted(*, is_draining: bool) -> CapacityError:
    """The error in place of an output that was aborted."""
    if is_draining:
        return CapacityError(503, "the server is stopping: the output was ended before it was complete")
    return CapacityError(ABORTED, "the request was aborted before its output was complete")
