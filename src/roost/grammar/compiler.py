"""Compiler: grammars by their text, for one tokenizer, with llguidance.

A grammar is compiled once, on a thread of its own beside the engine's, and kept; whoever needs a matcher gets a copy.
llguidance bounds its own work (lexer fuel, states, symbols), so a hostile grammar is refused instead of running on.
Nothing of llguidance is imported before the first grammar comes. Called by intake and by rows that begin.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from roost.errors import CapacityError, InvariantError, RequestError
from roost.grammar.matcher import Mask

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_BYTES_MAX = 256 * 1024
COMPILED_MAX = 256  # grammars that are kept
PENDING_MAX = 64  # grammars that may wait to be compiled
LEXER_FUEL_MAX = 1_000_000  # to build what tells tokens apart: about 20 ms
STATES_MAX = 50_000  # of that, while an output is matched: 1 to 2 kB each
SYMBOLS_MAX = 200_000  # of all rules together
_NICENESS = 10  # of the thread that compiles: steps go first

Done = Callable[[str], None]  # told why a grammar cannot be used; '' if it can


class Compiler:
    """All grammars of an engine."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Iterable[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_ids = frozenset(eos_ids)
        self._tokenizer: LLTokenizer | None = None
        self._compiled: OrderedDict[str, LLMatcher] = OrderedDict()  # least recently used first
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="grammar", initializer=_give_way)
        self._num_pending = 0

    def start(self, grammar: str, done: Done) -> None:
        """Compile a grammar on the thread, and say there how it went; raises if it is too large or too many wait."""
        check_size(grammar)
        with self._lock:
            if self._num_pending >= PENDING_MAX:
                raise CapacityError(429, f"{PENDING_MAX} grammars wait to be compiled: try again later")
            self._num_pending += 1
        self._thread.submit(self._compile, grammar, done)

    def new_matcher(self, grammar: str) -> "GrammarMatcher":
        """A matcher of a grammar that was compiled before, or is now."""
        return GrammarMatcher(self._find(grammar).deep_copy(), self._eos_ids)

    def _compile(self, grammar: str, done: Done) -> None:
        error = ""
        try:
            self._find(grammar)
        except RequestError as refused:
            error = refused.reason
        except Exception as broken:  # noqa: BLE001 (whatever llguidance does, somebody waits for an answer)
            error = f"cannot be compiled: {broken}"
        finally:
            with self._lock:
                self._num_pending -= 1
        done(error)

    def _find(self, grammar: str) -> "LLMatcher":
        """The matcher of a grammar before its first token."""
        with self._lock:
            if grammar in self._compiled:
                self._compiled.move_to_end(grammar)
                return self._compiled[grammar]
        matcher = self._built(grammar)
        with self._lock:
            self._compiled[grammar] = matcher
            while len(self._compiled) > COMPILED_MAX:
                self._compiled.popitem(last=False)
        return matcher

    def _built(self, grammar: str) -> "LLMatcher":
        """Compile a grammar, and compute its first mask: what is left to the first one may be most of the work."""
        from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415 - an extra, and only now is it needed

        limits = LLParserLimits(
            initial_lexer_fuel=LEXER_FUEL_MAX,
            max_lexer_states=STATES_MAX,
            max_grammar_size=SYMBOLS_MAX,
            verbose_errors=False,
        )
        matcher = LLMatcher(self._tokens(), grammar, log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(400, "grammar", f"cannot be enforced: {_reason(matcher.get_error())}")
        return matcher

    def _tokens(self) -> "LLTokenizer":
        """The tokenizer as llguidance reads it."""
        from llguidance import LLTokenizer  # noqa: PLC0415

        if self._tokenizer is None:
            self._tokenizer = LLTokenizer(
                self._tokenizer_json, n_vocab=self._vocab_size, eos_token=sorted(self._eos_ids)
            )
        return self._tokenizer


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
        return _reason(self._matcher.get_error()) if self._matcher.is_error() else ""


def is_installed() -> bool:
    """Whether llguidance is here."""
    return find_spec("llguidance") is not None


def check_size(grammar: str) -> None:
    """Raise RequestError for a grammar whose text is too long."""
    size = len(grammar.encode("utf-8", "surrogatepass"))
    if size > GRAMMAR_BYTES_MAX:
        raise RequestError(400, "grammar", f"{size} bytes long; at most {GRAMMAR_BYTES_MAX} are allowed")


def _reason(error: str) -> str:
    """What llguidance says, without the state of its parser."""
    return " ".join(error.removesuffix("<non-verbose/>").split())


def _give_way() -> None:
    """Let steps go first, where the system knows threads' priorities."""
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
