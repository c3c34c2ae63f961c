"""Channel: messages between rank 0 and one follower, over a pair of connected unix sockets that nobody else can open.

A message is its length, its kind and its bytes. Several threads may send, one receives. The other end's death is the
end of the stream, whatever ended it. Called on both sides.
"""

import json
import socket
import struct
import threading
from contextlib import suppress
from enum import IntEnum
from typing import Any

from roost.errors import InvariantError

MESSAGE_BYTES_MAX = 2**30  # no plan is near it: what says more is no message
_HEAD = struct.Struct("<IB")


class Kind(IntEnum):
    """What a message says."""

    TELL = 1  # JSON, while the group starts: who one is, what is loaded, what is agreed
    STEP = 2  # to a follower: a plan to launch
    CHECK = 3  # to a follower: collect these steps, and say what came of them
    GRAMMAR = 4  # to a follower: a grammar that rows may begin with soon
    BEAT = 5  # both ways: the sender is alive
    DIGEST = 6  # from a follower: what came of the steps up to a check
    BROKE = 7  # from a follower: a step that broke
    COMPILED = 8  # from a follower: it has compiled a grammar
    FAILED = 9  # from a follower: it cannot go on


class Gone(Exception):
    """The other end is not there any more."""


class Channel:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._sending = threading.Lock()

    @property
    def fileno(self) -> int:
        """Its file descriptor, to be waited for."""
        return self._socket.fileno()

    def send(self, kind: Kind, payload: bytes = b"") -> None:
        """Send a message; raises Gone."""
        try:
            with self._sending:
                self._socket.sendall(_HEAD.pack(len(payload), kind) + payload)
        except OSError as error:
            raise Gone from error

    def beat(self) -> None:
        """Send a sign of life, unless something is being sent: that is one."""
        if self._sending.acquire(blocking=False):
            try:
                self._socket.send(_HEAD.pack(0, Kind.BEAT), socket.MSG_DONTWAIT)
            except OSError:  # it is full, or gone: whoever receives will notice
                pass
            finally:
                self._sending.release()

    def receive(self) -> tuple[Kind, bytes]:
        """Wait for the next message; raises Gone."""
        length, kind = _HEAD.unpack(self._exactly(_HEAD.size))
        if length > MESSAGE_BYTES_MAX or kind not in set(Kind):
            raise InvariantError(f"a rank sent what is no message: kind {kind}, {length} bytes")
        return Kind(kind), self._exactly(length)

    def tell(self, said: dict[str, Any], kind: Kind = Kind.TELL) -> None:
        """Send a message that is a JSON object."""
        self.send(kind, json.dumps(said).encode())

    def close(self) -> None:
        """Close this end, and wake whoever waits at it."""
        with suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _exactly(self, num_bytes: int) -> bytes:
        received = bytearray()
        while len(received) < num_bytes:
            try:
                some = self._socket.recv(min(2**20, num_bytes - len(received)))
            except OSError as error:
                raise Gone from error
            if not some:
                raise Gone
            received += some
        return bytes(received)
