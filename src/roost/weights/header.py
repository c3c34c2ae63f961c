"""The header of a safetensors file: names, types and offsets of its tensors, checked against the file's length.

Layout: 8 bytes with the header's length, the header as JSON, then the tensors' bytes. Reads no tensor. A truncated
file, or one of another format, is refused with a clear message before anything maps it. Called by the folder.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from roost.errors import ConfigError

_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
FLOATS = ("F64", "F32", "F16", "BF16")
INTEGERS = ("I64", "I32", "BOOL")

Dtypes = Callable[[str], tuple[str, ...]]  # a tensor's name -> the types that it may have


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """The tensors of a file."""

    path: Path
    num_bytes: dict[str, int]  # by tensor


def floats(name: str) -> tuple[str, ...]:
    """The types of plain weights, whatever the tensor."""
    return FLOATS


def read_header(path: Path, allowed: Dtypes = floats) -> Header:
    """Read and check one file's header; each tensor must be of a type that is allowed."""
    file_len = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
        if start == _LFS_POINTER:
            raise ConfigError(f"{path} is a Git LFS pointer and not the weights: fetch them with git lfs pull")
        header_len = int.from_bytes(start[:_LENGTH_BYTES], "little")
        if len(start) < _LENGTH_BYTES or start[_LENGTH_BYTES : _LENGTH_BYTES + 1] not in (b"{", b""):
            raise ConfigError(f"{path} is not a safetensors file")
        data_start = _LENGTH_BYTES + header_len
        if file_len < data_start:
            raise _truncated(path, data_start, file_len)
        file.seek(_LENGTH_BYTES)
        text = file.read(header_len)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        places = {name: tuple(entry["data_offsets"]) for name, entry in entries.items()}
        dtypes = {name: entry["dtype"] for name, entry in entries.items()}
        num_bytes = {name: end - begin for name, (begin, end) in places.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a safetensors file: its header cannot be read ({error!r})") from error
    expected_len = data_start + max((end for _, end in places.values()), default=0)
    if file_len < expected_len:
        raise _truncated(path, expected_len, file_len)
    if file_len > expected_len:
        raise ConfigError(f"{path} is longer than its header says: {file_len} bytes instead of {expected_len}")
    for name, dtype in dtypes.items():
        if dtype not in allowed(name):
            raise ConfigError(f"{path}: {name} is of type {dtype}; it is read as {', '.join(allowed(name))}")
    return Header(path=path, num_bytes=num_bytes)


def _truncated(path: Path, expected_len: int, file_len: int) -> ConfigError:
    return ConfigError(
        f"{path} is truncated: its header says {expected_len} bytes, the file has {file_len}; download it again"
    )
