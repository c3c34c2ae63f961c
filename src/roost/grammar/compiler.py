"""Compiler: grammars by their text, for one tokenizer, with llguidance.

A grammar is tried in a process of its own, within limits of time and memory, then compiled on a thread beside the
engine's, and kept; whoever needs a matcher gets a copy. One that is known is there at once, also if it was refused. One
that takes long waits with its like, so that it holds up nobody else. Called by intake and by rows that begin.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from roost.errors import CapacityError, InvariantError, RequestError
from roost.grammar.build import build_matcher, build_tokenizer, check_size, plain_error
from roost.grammar.matcher import Mask
from roost.grammar.trial import Trial

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

COMPILED_MAX = 256  # grammars that are kept
REFUSED_MAX = 256  # the same of those that cannot be used
PENDING_MAX = 64  # grammars that may wait to be compiled
QUICK_S = 0.03  # processor time within which almost every grammar is compiled
SLOW_S = 2.0  # and which none may exceed
_NICENESS = 10  # of the threads that compile: steps go first

Value = TypeVar("Value")
Done = Callable[[str], None]  # told why a grammar cannot be used; '' if it can


class Compiler:
    """All grammars of an engine."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._settings = (tokenizer_json, vocab_size, frozenset(eos_ids))
        self._eos_ids = frozenset(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first
        self._refused: OrderedDict[str, str] = OrderedDict()  # why; the same
        self._lock = threading.Lock()
        self._quick = _Lane(Trial(*self._settings, time_s_max=QUICK_S), "grammar")
        self._slow = _Lane(Trial(*self._settings, time_s_max=SLOW_S), "slow-grammar")
        self._num_pending = 0

    def start(self, grammar: str, done: Done) -> None:
        """Compile a grammar, and say how it went, here or on a thread; raises if it is too large or too many wait."""
        check_size(grammar)
        with self._lock:
            if grammar in self._compiled or grammar in self._refused:
                known: str | None = self._refused.get(grammar, "")
            elif self._num_pending >= PENDING_MAX:
                raise CapacityError(429, f"{PENDING_MAX} grammars wait to be compiled: try again later")
            else:
                known = None
                self._num_pending += 1
        if known is None:
            self._quick.thread.submit(self._try, self._quick, grammar, done)
        else:
            done(known)

    def new_matcher(self, grammar: str) -> "GrammarMatcher":
        """A matcher of a grammar that was compiled before, or is now."""
        return GrammarMatcher(self._find(grammar).deep_copy(), self._eos_ids)

    def close(self) -> None:
        """End what compiles."""
        for lane in (self._quick, self._slow):
            lane.thread.shutdown(wait=False, cancel_futures=True)
            lane.trial.close()

    def _try(self, lane: "_Lane", grammar: str, done: Done) -> None:
        """On a lane's thread: try a grammar, and compile it if that went well."""
        error = lane.trial.run(grammar)
        if error is None and lane is self._quick:
            self._slow.thread.submit(self._try, self._slow, grammar, done)
            return
        if error is None:
            error = f"takes longer than {SLOW_S:g} s to compile"
        try:
            if not error:
                self._find(grammar)
        except RequestError as refused:
            error = refused.reason
        except Exception as broken:  # noqa: BLE001 (whatever llguidance does, somebody waits for an answer)
            error = f"cannot be compiled: {broken}"
        with self._lock:
            self._num_pending -= 1
            if error:
                _keep(self._refused, grammar, error, REFUSED_MAX)
        done(error)

    def _find(self, grammar: str) -> "LLMatcher":
        """The matcher of a grammar before its first token."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
            if self._tokenizer is None:
                self._tokenizer = build_tokenizer(*self._settings)
        matcher = build_matcher(self._tokenizer, grammar)
        with self._lock:
            _keep(self._compiled, grammar, matcher, COMPILED_MAX)
        return matcher


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

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next."""
        if not self._num_ends:
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
        if num_tokens > num_ends and not self._matcher.rollback(num_tokens - num_ends):
            raise InvariantError(f"a matcher cannot go back by {num_tokens} tokens: {self.error()}")

    def forced(self) -> list[int]:
        """The tokens that come next, as far as there is one way."""
        return [] if self._num_ends else self._matcher.compute_ff_tokens()

    def error(self) -> str:
        """Why it cannot go on."""
        return plain_error(self._matcher.get_error()) if self._matcher.is_error() else ""


def _keep(kept: OrderedDict[str, Value], grammar: str, value: Value, number_max: int) -> None:
    """Keep what came of a grammar, and forget what was not used for longest."""
    kept[grammar] = value
    while len(kept) > number_max:
        kept.popitem(last=False)


def _give_way() -> None:
    """Let steps go first, where the system knows threads' priorities."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
