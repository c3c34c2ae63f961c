"""Epoch logs: what a journal of sessions is kept in, and the form of what is written there.

A session has one append-only log for each time that an engine has taken it over: its ownership epoch. A log is a list
of records, each framed with its length and checksums, so that a write that was cut short is told from a damaged log.
Knows no session. Used by `session.journal`; kept in files by `session.journal_files`.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol
from zlib import crc32

_HEAD = struct.Struct("<II")  # bytes of the body, its checksum; then the checksum of these two
_NUMBER = struct.Struct("<I")
_HEAD_BYTES = _HEAD.size + _NUMBER.size

Said = dict[str, Any]


class EpochLogs(Protocol):
    """The logs of all sessions, by a session's key; every replica sees the same. Each call may raise OSError."""

    def epochs(self, key: str) -> list[int]:
        """The epochs of a session that have a log, in order."""
        ...

    def create(self, key: str, epoch: int) -> bool:
        """Make an empty log; False if there is one already. Of several who try, one succeeds."""
        ...

    def append(self, key: str, epoch: int, data: bytes) -> bool:
        """Add to a log; False if there is none any more."""
        ...

    def read(self, key: str, epoch: int) -> bytes:
        """All that a log holds now; nothing if there is none any more."""
        ...

    def remove(self, key: str, epoch: int) -> None:
        """Remove a log, if there is one."""
        ...

    def idle_ns(self, key: str, epoch: int) -> int:
        """How long ago a log was last added to."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class OwnedLog:
    """The log that a session is written to, as its owner knows it."""

    key: str
    epoch: int
    num_bytes: int = 0
    whole_bytes: int = 0  # of these, its first record, which is the whole session
    is_sound: bool = True  # False: a write has failed, and may have left a part of a record


class DamagedLog(Exception):
    """A log holds something that was never written there."""

    def __init__(self, at: int) -> None:
        super().__init__(f"damaged at byte {at}")


def framed(said: Said, tokens: bytes = b"") -> bytes:
    """A record: what JSON can say of it, and tokens."""
    text = json.dumps(said, separators=(",", ":")).encode()
    body = _NUMBER.pack(len(text)) + text + tokens
    head = _HEAD.pack(len(body), crc32(body))
    return head + _NUMBER.pack(crc32(head)) + body


def records(data: bytes) -> Iterator[tuple[Said, bytes]]:
    """The records of a log; one that was cut short at its end is left out, anything else that is wrong is raised."""
    at = 0
    while len(data) - at >= _HEAD_BYTES:
        head = data[at : at + _HEAD.size]
        if _NUMBER.unpack_from(data, at + _HEAD.size)[0] != crc32(head):
            if not any(data[at:]):  # a machine that fell may leave zeros where the rest should be
                return
            raise DamagedLog(at)
        length, checksum = _HEAD.unpack(head)
        body = data[at + _HEAD_BYTES : at + _HEAD_BYTES + length]
        if len(body) < length:
            return
        if crc32(body) != checksum:
            raise DamagedLog(at)
        end = _NUMBER.size + _NUMBER.unpack_from(body)[0]
        yield json.loads(body[_NUMBER.size : end]), body[end:]
        at += _HEAD_BYTES + length
