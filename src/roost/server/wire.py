"""Wire: messages as bytes between the server and the engine's process; msgpack, never pickle.

Each travels with the number of the conversation it belongs to. Only what is listed here can be decoded, and only into
the fields it has. Called on both sides of the socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from roost.messages import (
    Abort,
    CloseSession,
    Command,
    Event,
    Finished,
    FlushCache,
    Flushed,
    ForkSession,
    GetSession,
    GetSessions,
    GetStats,
    OpenSession,
    PromptScores,
    Refused,
    RewindSession,
    SessionClosed,
    SessionState,
    SessionStates,
    Stats,
    Submit,
    Tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The engine's process is ready; conversation 0."""

    model_name: str
    language: str  # as text.language writes it
    vocab_size: int
    context: int
    settings: dict[str, Any]  # resolved choices, for people
    load_s: float


_SESSION_COMMANDS = (OpenSession, CloseSession, RewindSession, ForkSession, GetSession, GetSessions)
_COMMANDS = (Submit, Abort, *_SESSION_COMMANDS, FlushCache, GetStats)
_SESSION_EVENTS = (SessionState, SessionStates, SessionClosed)
_EVENTS = (Tokens, PromptScores, Finished, Refused, *_SESSION_EVENTS, Flushed, Stats, Started)
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (*_COMMANDS, *_EVENTS)
}

_encoder = msgspec.msgpack.Encoder()
_envelopes = msgspec.msgpack.Decoder(list[tuple[int, str, msgspec.Raw]])


def pack(messages: Sequence[tuple[int, Command | Event | Started]]) -> bytes:
    """Numbered messages as bytes."""
    return _encoder.encode([(number, type(message).__name__, message) for number, message in messages])


def unpack(data: bytes) -> list[tuple[int, Any]]:
    """The numbered messages in some bytes."""
    return [(number, _DECODERS[name].decode(raw)) for number, name, raw in _envelopes.decode(data)]
