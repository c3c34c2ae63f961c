"""How a grammar is built with llguidance: its tokenizer, a matcher, and the limits on both.

llguidance bounds most of its own work (lexer fuel, states, symbols); for the rest a grammar is tried in a process of
its own first. Nothing of llguidance is imported before it is needed. Called by grammar.compiler and grammar.trial.
"""

import re
from importlib.util import find_spec
from typing import TYPE_CHECKING

import numpy as np

from roost.errors import RequestError
from roost.text.tokenizer import Tokenizer, plain_encoder
from roost.tools.definitions import NOT_ENFORCED

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

GRAMMAR_BYTES_MAX = 256 * 1024
LEXER_FUEL_MAX = 1_000_000  # to build what tells tokens apart: about 20 ms
STATES_MAX = 50_000  # of that, while an output is matched: 1 to 2 kB each
SYMBOLS_MAX = 200_000  # of all rules together
FORCED_MAX = 2048  # tokens that may be forced one after the other: all of them are looked at in each step
TOO_FORCED = f"leaves no choice for more than {FORCED_MAX} tokens"
ERROR_LEN_MAX = 400  # characters of what llguidance says that are passed on
NO_GRAMMARS = "this engine enforces no grammars: install llguidance (pip install llguidance)"


def is_installed() -> bool:
    """Whether llguidance is here."""
    return find_spec("llguidance") is not None


def check_text(grammar: str) -> None:
    """Raise RequestError for a grammar whose text is too long, or no text."""
    try:
        size = len(grammar.encode())
    except UnicodeEncodeError as error:
        raise RequestError(400, "grammar", "must be valid Unicode") from error
    if size > GRAMMAR_BYTES_MAX:
        raise RequestError(400, "grammar", f"{size} bytes long; at most {GRAMMAR_BYTES_MAX} are allowed")


class _Vocabulary:
    """A tokenizer as llguidance asks it: added tokens are no text, and text that spells one is not that token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.eos_token_id = min(tokenizer.eos_ids)
        self.bos_token_id = None
        self.tokens = [tokenizer.piece(id) for id in range(tokenizer.vocab_size)]
        self.special_token_ids = sorted(tokenizer.added_ids.values())
        self._encode = plain_encoder(tokenizer)

    def __call__(self, text: str) -> list[int]:
        """The tokens of a text that goes on."""
        if not isinstance(text, str):
            raise TypeError  # llguidance asks with bytes first, to see whether they are taken
        return self._encode(text)


def build_tokenizer(tokenizer_json: str, vocab_size: int) -> "LLTokenizer":
    """A tokenizer as llguidance reads it; ids from its own vocabulary's end to `vocab_size` are never allowed."""
    from llguidance import LLTokenizer, TokenizerWrapper  # noqa: PLC0415 - an extra, and only now is it needed

    tokenizer = Tokenizer.from_json(tokenizer_json)
    if not tokenizer.eos_ids:
        raise RequestError(400, "grammar", NOT_ENFORCED + "the model has no token that ends an output")
    wrapped = TokenizerWrapper(_Vocabulary(tokenizer))
    return LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=sorted(tokenizer.eos_ids))


def build_matcher(tokenizer: "LLTokenizer", grammar: str) -> "LLMatcher":
    """The matcher of a grammar before its first token; raises RequestError if the grammar cannot be enforced.

    Its first mask is computed, too: what is left to that may be most of the work.
    """
    from llguidance import LLMatcher, LLParserLimits  # noqa: PLC0415

    limits = LLParserLimits(
        initial_lexer_fuel=LEXER_FUEL_MAX,
        max_lexer_states=STATES_MAX,
        max_grammar_size=SYMBOLS_MAX,
        verbose_errors=False,
    )
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    if not matcher.is_error():
        _walk(matcher.deep_copy())
        matcher.compute_bitmask()
    if matcher.is_error():
        raise RequestError(400, "grammar", NOT_ENFORCED + plain_error(matcher.get_error()))
    return matcher


def _walk(matcher: "LLMatcher") -> None:
    """Refuse a matcher that cannot go back by a token, which drafts need, or that forces too long a text."""
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    if len(matcher.compute_ff_tokens()) > FORCED_MAX:
        raise RequestError(400, "grammar", TOO_FORCED)
    if len(allowed) and not matcher.is_error() and matcher.try_consume_tokens([int(allowed[0])]) == 1:
        matcher.compute_bitmask()
        matcher.rollback(1)
    if matcher.is_error():
        raise RequestError(400, "grammar", NOT_ENFORCED + plain_error(matcher.get_error()))


def plain_error(error: str) -> str:
    """What llguidance says, without the state of its parser and the line of the grammar that it points to."""
    said = re.sub(r"^\s*(\d+ \|.*|\^+)$", "", error.removesuffix("<non-verbose/>"), flags=re.MULTILINE)
    plain = re.sub(r"^at \d+\(\d+\): ", "", " ".join(said.partition("<backtrace>")[0].split()))
    if plain.startswith("NoExtension"):
        return "no text matches it"
    return plain if len(plain) <= ERROR_LEN_MAX else plain[:ERROR_LEN_MAX] + "…"
