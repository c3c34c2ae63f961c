"""Bodies: from the bytes of a request to a checked record, or to an error that names the parameter.

Owns the limits of size and depth. A number that is not finite, an unknown field or a wrong type is refused here, by
name, before anything else sees it. Called by the endpoints.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from roost.errors import RequestError

BODY_BYTES_MAX = 16 * 1024 * 1024
_NUMBER_MAX = 2.0**63
_AT = re.compile(r" - at `\$\.?(.*?)`$")
_FIELD = re.compile(r"(?:unknown|required) field `(.*?)`")

Body = TypeVar("Body", bound=msgspec.Struct)


async def read(request: Request, kind: type[Body]) -> Body:
    """The body of a request as a record."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise RequestError(415, "content-type", "must be application/json")
    return convert(await _bytes(request), kind)


def convert(data: bytes, kind: type[Body]) -> Body:
    """Some JSON as a record; every value in it finite and of the right type."""
    try:
        values = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, "body", f"is not JSON: {_short(error)}") from error
    if not isinstance(values, dict):
        raise RequestError(400, "body", "must be a JSON object")
    _check_numbers(values, "")
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error


async def _bytes(request: Request) -> bytes:
    """The whole body, as long as it is not too long."""
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > BODY_BYTES_MAX:
            raise RequestError(413, "body", f"must be at most {BODY_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _check_numbers(value: Any, path: str) -> None:
    """Refuse NaN, infinities and numbers that no option can mean, wherever they are."""
    if isinstance(value, dict):
        for key, each in value.items():
            _check_numbers(each, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for each in value:
            _check_numbers(each, path)
    elif isinstance(value, float) and not math.isfinite(value):
        raise RequestError(400, path, "must be a finite number")
    elif isinstance(value, int | float) and abs(value) >= _NUMBER_MAX:
        raise RequestError(400, path, "must be less than 2**63 in size")


def _named(message: str) -> RequestError:
    """An error that names the parameter, from what the converter said."""
    at, field = _AT.search(message), _FIELD.search(message)
    said = _AT.sub("", message)
    path = at.group(1) if at else ""
    if field:
        path = f"{path}.{field.group(1)}" if path else field.group(1)
        said = "is required" if "required" in message else "is not a parameter of this endpoint"
    return RequestError(400, path or "body", said[:1].lower() + said[1:])


def _short(error: Exception) -> str:
    return str(error)[:100] or type(error).__name__
