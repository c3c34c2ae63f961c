"""Grammars of a group: compiled on rank 0, which tries them first, then on every other rank, then known to be there.

So no step waits for a rank that compiles. What a follower forgets again it compiles when a row begins, as rank 0 does.
Called by intake, in place of the compiler.
"""

import struct
import threading
from contextlib import suppress
from dataclasses import dataclass

from roost.errors import CapacityError, RankError
from roost.grammar.compiler import Done
from roost.parallel.channel import Kind
from roost.parallel.ranks import Ranks
from roost.sched.request import StartCompiling

_NUMBER = struct.Struct("<I")


@dataclass(slots=True)
class _Compiling:
    """A grammar that followers compile."""

    missing: set[int]  # ranks that have not
    done: Done
    error: str = ""


class GroupGrammars:
    """What compiles a grammar on all ranks."""

    def __init__(self, start_here: StartCompiling, ranks: Ranks) -> None:
        self._start_here = start_here
        self._ranks = ranks
        self._lock = threading.Lock()
        self._compiling: dict[int, _Compiling] = {}
        self._num_asked = 0
        ranks.handle(Kind.COMPILED, self._compiled)

    def start(self, grammar: str, done: Done) -> None:
        """Compile a grammar, and say how it went; raises if it is too large or too many wait."""
        self._start_here(grammar, lambda refusal: done(refusal) if refusal else self._start_there(grammar, done))

    def _start_there(self, grammar: str, done: Done) -> None:
        with self._lock:
            number = self._num_asked = self._num_asked + 1
            self._compiling[number] = _Compiling(set(range(1, self._ranks.size)), done)
        with suppress(RankError):  # then the engine ends
            self._ranks.send(Kind.GRAMMAR, asked(number, grammar))

    def _compiled(self, rank: int, payload: bytes) -> None:
        number, error = numbered(payload)
        with self._lock:
            grammar = self._compiling[number]
            grammar.missing.discard(rank)
            grammar.error = grammar.error or error
            if grammar.missing:
                return
            del self._compiling[number]
        refusal = CapacityError(500, f"the grammar cannot be compiled: {grammar.error}") if grammar.error else None
        grammar.done(refusal)


def asked(number: int, text: str) -> bytes:
    """A numbered text as bytes: a grammar, or why it cannot be compiled."""
    return _NUMBER.pack(number) + text.encode()


def numbered(payload: bytes) -> tuple[int, str]:
    """The number and the text in some bytes."""
    (number,) = _NUMBER.unpack_from(payload)
    return number, payload[_NUMBER.size :].decode()
