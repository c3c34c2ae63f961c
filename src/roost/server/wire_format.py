"""Wire: messages as bytes between the server and the engine's process; msgpack, never pickle.

Each travels with the number of the exchange it belongs to; a command also with the time by which it must be read,
of the machine's monotonic clock, which both processes see. Only what is listed here can be decoded, and only into the
fields it has. Called on both sides of the socket.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from roost.messages import (
    Abort,
    Begun,
    CloseSession,
    Command,
    CompileGrammar,
    Event,
    Finished,
    FlushCache,
    Flushed,
    ForkSession,
    Frame,
    GetFrame,
    GetHistory,
    GetPages,
    GetSession,
    GetSessions,
    GetStats,
    GrammarCompiled,
    OpenSession,
    PromptLogprobs,
    Refused,
    RewindSession,
    SessionClosed,
    SessionHistory,
    SessionState,
    SessionStates,
    Stats,
    Submit,
    Tokens,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The engine's process is ready; sent as exchange 0."""

    model_name: str
    language: str  # as text.language writes it
    vocab_size: int
    context: int
    settings: dict[str, Any]  # resolved choices, for people
    load_s: float


_SESSION_COMMANDS = (OpenSession, CloseSession, RewindSession, ForkSession, GetSession, GetHistory, GetSessions)
_COMMANDS = (Submit, Abort, *_SESSION_COMMANDS, FlushCache, GetStats, GetFrame, GetPages, CompileGrammar)
_SESSION_EVENTS = (SessionState, SessionHistory, SessionStates, SessionClosed)
_REQUEST_EVENTS = (Begun, Tokens, PromptLogprobs, Finished, Refused)
_EVENTS = (*_REQUEST_EVENTS, *_SESSION_EVENTS, Flushed, Stats, Frame, GrammarCompiled, Started)
_DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (*_COMMANDS, *_EVENTS)
}

_encoder = msgspec.msgpack.Encoder()
_order = msgspec.msgpack.Decoder(tuple[int, int | None, str, msgspec.Raw])
_envelopes = msgspec.msgpack.Decoder(list[tuple[int, str, msgspec.Raw]])


def pack_command(number: int, command: Command, read_by: int | None) -> bytes:
    """A numbered command as bytes."""
    return _encoder.encode((number, read_by, type(command).__name__, command))


def unpack_command(data: bytes) -> tuple[int, Any, int | None]:
    """The number of a command, the command, and by when it must be read."""
    number, read_by, name, raw = _order.decode(data)
    return number, _DECODERS[name].decode(raw), read_by


def pack(events: Sequence[tuple[int, Event | Started]]) -> bytes:
    """Numbered events as bytes."""
    return _encoder.encode([(number, type(event).__name__, event) for number, event in events])


def unpack(data: bytes) -> list[tuple[int, Any]]:
    """The numbered events in some bytes."""
    return [(number, _DECODERS[name].decode(raw)) for number, name, raw in _envelopes.decode(data)]
