"""Bodies: from the bytes of a request to a checked record, or to an error that names the parameter.

Owns the limits of size, depth and counts. A number that is not finite, a text that is not valid Unicode, an unknown
field or a wrong type is refused here, by name, before anything else sees it. Large bodies are parsed beside the event
loop, and those with too many values are refused before they are parsed. Called by the endpoints.
"""

import json
import math
import re
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from roost.errors import RequestError

BODY_BYTES_MAX = 16 * 1024 * 1024
DEPTH_MAX = 32
VALUES_MAX = 2**18  # in one body
PARTS_MAX = 2**16  # names, lists and objects, which take longer to parse than numbers
_NUMBER_END = 2**63
_DIGITS_MAX = 1024  # of a real number
_NAME_LEN_MAX = 100  # of a client's text that an error message quotes
_SLICE = 64 * 1024  # bytes scanned at a time, so that other threads get the GIL in between
_AT = re.compile(r" - at `\$\.?(.*?)`$")
_FIELD = re.compile(r"(?:unknown|required) field `(.*?)`")

_ENDLESS_LEN = 21  # from so many digits on, a number may be too long to parse
_ENDLESS = re.compile(rb"[0-9]{%d}" % _ENDLESS_LEN)

Body = TypeVar("Body", bound=msgspec.Struct)


async def read(request: Request, kind: type[Body]) -> Body:
    """The body of a request as a record."""
    media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media != "application/json":
        raise RequestError(415, "content-type", "must be application/json")
    data = await read_bytes(request)
    value: Body = await request.app.state.server.offload.run(len(data), lambda: convert(data, kind))
    return value


def convert(data: bytes, kind: type[Body]) -> Body:
    """JSON as a record; raises RequestError for the first value that is not finite or not of its type."""
    return record_of(parse(data), kind)


def parse(data: bytes) -> dict[str, Any]:
    """A JSON object; raises RequestError for the first value that is not finite."""
    has_endless = _check_counts(data)
    try:
        parse_float = _real_number if len(data) > _SLICE else None  # a Python callback lets other threads run
        values = json.loads(data.decode(), parse_float=parse_float, parse_int=_whole_number if has_endless else None)
    except RecursionError as error:
        raise RequestError(400, "body", f"must be nested at most {DEPTH_MAX} deep") from error
    except ValueError as error:
        raise RequestError(400, "body", f"is not JSON: {str(error)[:_NAME_LEN_MAX]}") from error
    if not isinstance(values, dict):
        raise RequestError(400, "body", "must be a JSON object")
    fault = _fault(values, 0)
    if fault is not None:
        raise RequestError(400, fault[0].removeprefix(".") or "body", fault[1])
    return values


def record_of(values: dict[str, Any], kind: type[Body]) -> Body:
    """A JSON object as a record; raises RequestError for the first value that is not of its type."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from error


async def read_bytes(request: Request) -> bytes:
    """The whole body; raises RequestError (413) once it is too long."""
    parts, length = [], 0
    async for part in request.stream():
        length += len(part)
        if length > BODY_BYTES_MAX:
            raise RequestError(413, "body", f"must be at most {BODY_BYTES_MAX} bytes")
        parts.append(part)
    return b"".join(parts)


def _check_counts(data: bytes) -> bool:
    """Refuse too many values before parsing, which cannot be interrupted; True if some number is very long."""
    start = in_text = num_values = num_parts = 0
    has_endless, tail = False, b""
    while start < len(data):
        piece = data[start : start + _SLICE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # do not cut an escape sequence in two
            piece += data[start + len(piece) : start + len(piece) + 1]
        start += len(piece)
        pieces = piece.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')
        outside = b"".join(pieces[in_text::2])
        in_text ^= (len(pieces) - 1) % 2
        has_endless = has_endless or _ENDLESS.search(tail + outside) is not None
        tail = (tail + outside)[-_ENDLESS_LEN:]  # a number may span two pieces
        num_values += outside.count(b",")
        num_parts += sum(map(outside.count, (b":", b"[", b"{")))
        if num_values > VALUES_MAX:
            raise RequestError(413, "body", f"must hold at most {VALUES_MAX} values")
        if num_parts > PARTS_MAX:
            raise RequestError(413, "body", f"must hold at most {PARTS_MAX} names, lists and objects")
    return has_endless


def _whole_number(digits: str) -> int | float:
    """A JSON integer; one that is too long to parse becomes infinite, which is refused later, by name."""
    return int(digits) if len(digits) < _ENDLESS_LEN else math.inf


def _real_number(digits: str) -> float:
    """A JSON real number; one that is too long to parse becomes infinite, which is refused later, by name."""
    return float(digits) if len(digits) <= _DIGITS_MAX else math.inf


def _fault(value: Any, depth: int) -> tuple[str, str] | None:
    """Path and reason of the first invalid value; paths are built only when one is found."""
    if not isinstance(value, dict | list):
        reason = _plain_fault(value)
        return None if reason is None else ("", reason)
    if depth >= DEPTH_MAX:
        return "", f"must be nested at most {DEPTH_MAX} deep"
    if isinstance(value, list):
        for number, each in enumerate(value):
            if type(each) in (int, float) and -_NUMBER_END < each < _NUMBER_END:
                continue  # the fast path, for lists of token ids
            if (fault := _fault(each, depth + 1)) is not None:
                return _shown(f"[{number}]{fault[0]}"), fault[1]
        return None
    for key, each in value.items():
        fault = _fault(each, depth + 1) if _is_unicode(key) else ("", "is not a name in valid Unicode")
        if fault is not None:
            return _shown(f".{_shown(key)}{fault[0]}"), fault[1]
    return None


def _plain_fault(value: Any) -> str | None:
    if isinstance(value, str):
        return None if _is_unicode(value) else "must be valid Unicode"
    if isinstance(value, float) and not math.isfinite(value):
        return "must be a finite number, less than 2**63 in size"
    if isinstance(value, int | float) and abs(value) >= _NUMBER_END:
        return "must be less than 2**63 in size"
    return None


def _is_unicode(text: str) -> bool:
    """Whether a text has no lone surrogate, which cannot be encoded."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(text: str) -> str:
    """A client's text for an error message: cut short, and valid UTF-8."""
    return text[:_NAME_LEN_MAX].encode("utf-8", "replace").decode()


def _named(message: str) -> RequestError:
    """An error that names the parameter, from msgspec's message."""
    at, field = _AT.search(message), _FIELD.search(message)
    said = _AT.sub("", message)
    path = at.group(1) if at else ""
    if field:
        path = f"{path}.{field.group(1)}" if path else field.group(1)
        said = "is required" if "required" in message else "is not a parameter of this endpoint"
    return RequestError(400, _shown(path) or "body", said[:1].lower() + said[1:])
