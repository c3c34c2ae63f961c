"""Compiler: grammars by their text, for one tokenizer, with llguidance.

A grammar is tried in a process of its own, within limits of time and memory, then compiled on a thread beside the
engine's, and kept; whoever needs a matcher gets a copy. One that is known is there at once, also if it was refused. One
that takes long waits with its like, so that it holds up nobody else. Called by intake and by rows that begin.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from roost.errors import CapacityError, InvariantError, RequestError, first_line
from roost.grammar.build import FORCED_MAX, TOO_FORCED, build_matcher, build_tokenizer, check_text, plain_error
from roost.grammar.matcher import Mask
from roost.grammar.trial import Trial
from roost.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED_MAX = 256  # grammars that are kept
COMPILED_BYTES_MAX = 512 * 2**20  # of memory that they took to compile, all together
REFUSED_MAX = 256  # grammars that cannot be used and are remembered
PENDING_MAX = 64  # grammars that may wait to be compiled
SLOW_PENDING_MAX = 8  # beside them, those that take longer than QUICK_S
QUICK_S = 0.03  # processor time within which almost every grammar is compiled
SLOW_S = 2.0  # and which none may exceed
_FILLS_LOOKED_AT = 16  # of so many masks one is asked how much is forced
_NICENESS = 10  # of the threads that compile: steps go first

Refusal = RequestError | CapacityError
Done = Callable[[Refusal | None], None]  # told why a grammar cannot be used; None if it can


@dataclass(frozen=True, slots=True)
class _Compiled:
    """A grammar that is kept: its matcher before the first token."""

    matcher: "LLMatcher"
    num_bytes: int


class Compiler:
    """All grammars of an engine."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._eos_ids = tokenizer.eos_ids
        self._settings = (tokenizer.to_json(), vocab_size)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, _Compiled] = OrderedDict()  # least recently used first
        self._refused: OrderedDict[str, str] = OrderedDict()  # why; the same
        self._waiting: dict[str, list[Done]] = {}  # who is told when a grammar that is compiled now is done
        self._num_slow = 0  # how many of those grammars are tried for longer
        self._lock = threading.Lock()  # of all of this
        self._quick = _Lane(Trial(*self._settings, time_s_max=QUICK_S), "grammar")
        self._slow = _Lane(Trial(*self._settings, time_s_max=SLOW_S), "slow-grammar")

    def start(self, grammar: str, done: Done) -> None:
        """Compile a grammar, and say how it went, here or on a thread; raises if it is too large or too many wait."""
        check_text(grammar)
        with self._lock:
            known = self._known(grammar)
            is_new = known is None and grammar not in self._waiting
            if is_new and len(self._waiting) - self._num_slow >= PENDING_MAX:
                raise CapacityError(429, f"{PENDING_MAX} grammars wait to be compiled: try again later")
            if known is None:
                self._waiting.setdefault(grammar, []).append(done)
        if known is not None:
            done(RequestError(400, "grammar", known) if known else None)
        elif is_new:
            self._quick.thread.submit(self._try, self._quick, grammar)

    def new_matcher(self, grammar: str) -> "GrammarMatcher":
        """A matcher of a grammar that was compiled before, or is now."""
        return GrammarMatcher(self._find(grammar).deep_copy(), self._eos_ids)

    def close(self) -> None:
        """End what compiles."""
        for lane in (self._quick, self._slow):
            lane.thread.shutdown(wait=False, cancel_futures=True)
            lane.trial.close()

    def _known(self, grammar: str) -> str | None:
        """What came of a grammar; None if nothing is known of it."""
        for kept in (self._compiled, self._refused):
            if grammar in kept:
                kept.move_to_end(grammar)
        return "" if grammar in self._compiled else self._refused.get(grammar)

    def _try(self, lane: "_Lane", grammar: str) -> None:
        """On a lane's thread: try a grammar, and compile it if that went well."""
        refusal: Refusal | None = None
        try:
            tried = lane.trial.run(grammar)
            if tried.error is None and lane is self._quick:
                self._try_longer(grammar)
                return
            error = f"takes longer than {SLOW_S:g} s to compile" if tried.error is None else tried.error
            if error:
                raise RequestError(400, "grammar", error)
            self._find(grammar, tried.num_bytes)
        except (RequestError, CapacityError) as refused:
            refusal = refused
        except Exception as broken:  # noqa: BLE001 (whatever it was, somebody waits for an answer)
            refusal = CapacityError(500, f"the grammar cannot be compiled: {first_line(broken)}")
        with self._lock:
            self._num_slow -= lane is self._slow
            waiting = self._waiting.pop(grammar)
            if isinstance(refusal, RequestError):
                self._refused[grammar] = refusal.reason
                while len(self._refused) > REFUSED_MAX:
                    self._refused.popitem(last=False)
        for done in waiting:
            done(refusal)

    def _try_longer(self, grammar: str) -> None:
        """Hand a grammar on to where it may take longer; raises CapacityError if too many are there."""
        with self._lock:
            if self._num_slow >= SLOW_PENDING_MAX:
                reason = f"{SLOW_PENDING_MAX} grammars wait that take long to compile, as this one does"
                raise CapacityError(429, f"{reason}: try again later")
            self._num_slow += 1
        self._slow.thread.submit(self._try, self._slow, grammar)

    def _find(self, grammar: str, num_bytes: int = 0) -> "LLMatcher":
        """The matcher of a grammar before its first token."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar].matcher
        if self._tokenizer is None:
            self._tokenizer = build_tokenizer(*self._settings)
        matcher = build_matcher(self._tokenizer, grammar)
        with self._lock:
            self._compiled[grammar] = _Compiled(matcher, num_bytes)
            while len(self._compiled) > COMPILED_MAX or (
                len(self._compiled) > 1 and self._num_bytes > COMPILED_BYTES_MAX
            ):
                self._compiled.popitem(last=False)
        return matcher

    @property
    def _num_bytes(self) -> int:
        """Of memory that the grammars took which are kept."""
        return sum(each.num_bytes for each in self._compiled.values())


class _Lane:
    """A thread that compiles one grammar after the other, and where they are tried first."""

    def __init__(self, trial: Trial, name: str) -> None:
        self.trial = trial
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name, initializer=_give_way)


class GrammarMatcher:
    """A matcher of llguidance; end tokens, which it takes or not by how the grammar ends, are counted here."""

    def __init__(self, matcher: "LLMatcher", eos_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_ids = eos_ids
        self._num_ends = 0  # end tokens that came last
        self._num_fills = 0
        self._is_too_forced = False  # it takes long in every step, which others wait for

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next."""
        if not self._num_ends:
            self._num_fills += 1
            if self._num_fills % _FILLS_LOOKED_AT == 0:
                self.forced()
            self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            return
        mask.fill(0)
        for token in self._eos_ids:
            mask.view(np.uint32)[token >> 5] |= np.uint32(1 << (token & 31))

    def consume(self, token: int) -> bool:
        """Go on by a token, if it may come next."""
        if token in self._eos_ids:
            is_end = self._num_ends > 0 or self._matcher.is_accepting()
            self._num_ends += is_end
            return is_end
        return not self._num_ends and token >= 0 and self._matcher.try_consume_tokens([token]) == 1

    def rollback(self, num_tokens: int) -> None:
        """Take the last tokens back."""
        num_ends = min(num_tokens, self._num_ends)
        self._num_ends -= num_ends
        if num_tokens > num_ends and not self._matcher.rollback(num_tokens - num_ends) and not self._matcher.is_error():
            raise InvariantError(f"a matcher cannot go back by {num_tokens} tokens")

    def forced(self) -> list[int]:
        """The tokens that come next, as far as there is one way."""
        if self._num_ends:
            return []
        tokens = self._matcher.compute_ff_tokens()
        self._is_too_forced = self._is_too_forced or len(tokens) > FORCED_MAX
        return tokens

    def error(self) -> str:
        """Why it cannot go on."""
        if self._matcher.is_error():
            return plain_error(self._matcher.get_error())
        return TOO_FORCED if self._is_too_forced else ""


def _give_way() -> None:
    """Let steps go first, where the system knows threads' priorities."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
