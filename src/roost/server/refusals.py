"""Refusals: the form that an error has on OpenAI's endpoints, where clients read more into it than a text.

There `code` is a word or null, a prompt that does not fit is a 400 `context_length_exceeded` that says how long one may
be, and what was aborted is an error, since OpenAI's `finish_reason` has no word for it. Elsewhere `code` is the status,
as SGLang's is. Called by the app and by streams, wherever an error leaves.
"""

from typing import Any

from roost.errors import CapacityError

ABORTED = 499  # as nginx calls a request that was closed; nothing that clients would send again by themselves
_OVERFLOW = 413
_CODES = {401: "invalid_api_key", 429: "rate_limit_exceeded", ABORTED: "request_aborted"}


def is_openais(path: str) -> bool:
    """Whether a path is one of OpenAI's, known here or not."""
    return path.startswith("/v1/") and not f"{path}/".startswith("/v1/sessions/")


def shaped(path: str, status: int, body: dict[str, Any], context: int) -> tuple[int, dict[str, Any]]:
    """Status and body of an error at a path; `context`: most tokens of a sequence."""
    if not is_openais(path):
        return status, body
    error: dict[str, Any] = body["error"]
    param = error["param"]
    if status == _OVERFLOW and param != "body":  # of tokens; a body of too many bytes is something else
        reason = error["message"].removeprefix(f"{param}: ")
        message = f"{param}: This model's maximum context length is {context} tokens. However, {reason}"
        return 400, {**body, "error": {**error, "message": message, "code": "context_length_exceeded"}}
    code = "model_not_found" if (status, param) == (404, "model") else _CODES.get(status)
    return status, {**body, "error": {**error, "code": code}}


def aborted(*, is_draining: bool) -> CapacityError:
    """What is said instead of an answer that was ended before it was done."""
    if is_draining:
        return CapacityError(503, "the server is stopping: the output was ended before it was complete")
    return CapacityError(ABORTED, "the request was aborted before its output was complete")
