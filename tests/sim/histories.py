"""Histories: what each session may be, from what was written to the journal and what clients were told.

While an engine writes, and after one has fallen, a session may be one of several histories; each answer says which. An
answer that no history explains is a failure, and so is a log that begins with one that a session cannot have. Reads no
engine.
"""

from array import array
from dataclasses import dataclass, field

import numpy as np

from roost.session.epoch_logs import records
from roost.session.journal import SESSION
from tests.sim.checker import Broken
from tests.sim.model import Model, states_of

POSSIBLE_MAX = 64


@dataclass(frozen=True, slots=True)
class History:
    """One course that a session can have taken."""

    tokens: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()  # its length after each turn

    def cut(self, length: int, num_turns: int) -> "History":
        """The same, rewound."""
        return History(self.tokens[:length], self.ends[:num_turns])


@dataclass(slots=True)
class Known:
    """What is known of one session."""

    possible: set[History | None] = field(default_factory=lambda: {None})  # None: there is none
    forked_from: str | None = None  # of a fork that is under way

    @property
    def open(self) -> list[History]:
        """The histories that it may have if there is one, in a fixed order."""
        return sorted((each for each in self.possible if each is not None), key=lambda each: (each.tokens, each.ends))


class Histories:
    """All sessions of a simulated run."""

    def __init__(self, model: Model) -> None:
        self._model = model
        self.sessions: dict[str, Known] = {}
        self.num_tokens = 0

    def written(self, name: str, data: bytes, *, is_newest: bool) -> None:
        """An engine is about to write this to a session's log; nobody may ever hear of it."""
        known = self.sessions[name]
        for said, raw in records(data):
            tokens = array("i")
            tokens.frombytes(raw)
            self._written(name, known, said["kind"], said, tuple(tokens), is_newest=is_newest)
        if len(known.possible) > POSSIBLE_MAX:
            raise AssertionError(f"{name} may be {len(known.possible)} histories: the workload asks too little")

    def _written(
        self, name: str, known: Known, kind: str, said: dict[str, object], tokens: tuple[int, ...], *, is_newest: bool
    ) -> None:
        if kind == "whole":
            ends = tuple(end for end, *_ in said["turns"])  # type: ignore[attr-defined]
            begun = History(tokens, ends)
            source = self.sessions.get(known.forked_from or "")
            is_fork = source is not None and any(each.tokens[: len(tokens)] == tokens for each in source.open)
            if None in known.possible and (is_fork or begun == History()):
                known.possible.add(begun)
            elif begun not in known.possible and is_newest:  # who is not the newest has no say
                raise Broken(f"journal: a log of {name} begins with {begun}, it can be {known.possible}")
        elif kind == "turn":
            for each in known.open:
                grown = each.tokens + tokens
                known.possible.add(History(grown, (*each.ends, len(grown))))
        elif kind == "rewind":
            length, num_turns = said["length"], said["turns"]
            assert isinstance(length, int) and isinstance(num_turns, int)
            known.possible |= {each.cut(length, num_turns) for each in known.open if len(each.tokens) >= length}
        elif kind == "closed":
            known.possible.add(None)
        else:
            assert kind == SESSION, kind

    def told(self, name: str, left: set[History | None], what: object) -> None:
        """Somebody was told something that only these histories explain."""
        known = self.sessions[name]
        if not left:
            raise Broken(f"history: {name} was answered with {what}, it can be {known.possible}")
        known.possible = left

    def committed(self, name: str, given: tuple[int, ...], output: list[int], prompt_len: int, what: object) -> None:
        """A turn was acknowledged: it is the last one, after a history of just this length."""
        added, end = given + tuple(output), prompt_len + len(output)
        left: set[History | None] = {
            each
            for each in self.sessions[name].open
            if len(each.tokens) == end and each.ends[-1:] == (end,) and each.tokens[end - len(added) :] == added
        }
        self.told(name, left, what)
        for each in self.sessions[name].open:
            self.check_output(name, output, list(each.tokens[:prompt_len]), what)

    def check_output(self, name: str, output: list[int], prompt: list[int], what: object) -> None:
        """What was generated is what the model says after a prompt."""
        if not output:
            return
        self.num_tokens += len(output)
        states = states_of(self._model, np.array(prompt + output, dtype=np.int64))
        expected = [self._model.next_token(state) for state in states[len(prompt) - 1 : -1].tolist()]
        if expected != output:
            raise Broken(f"tokens: {name} got {output}, the oracle says {expected}: {what}")

    def described(self, name: str, length: int, num_turns: int, what: object) -> None:
        """Somebody was told how long a session is."""
        left: set[History | None] = {
            each for each in self.sessions[name].open if len(each.tokens) == length and len(each.ends) == num_turns
        }
        self.told(name, left, what)

    def gone(self, name: str, what: object, *, is_last: bool = True) -> None:
        """Somebody was told that there is no such session; unless that is the last news, it may be open again."""
        left = self.sessions[name].possible & {None}
        self.told(name, left if is_last or not left else self.sessions[name].possible, what)

    def taken(self, name: str, number: int, what: object) -> None:
        """Somebody was told that a turn has this number."""
        self.told(name, {each for each in self.sessions[name].open if len(each.ends) > number}, what)
