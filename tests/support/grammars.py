"""Grammars of the tiny vocabulary: a compiler for it, and the tokens that a grammar allows after an output.

The vocabulary has its special tokens, then ASCII up to a caret: capital letters and digits, no small ones.
"""

from functools import cache

import numpy as np
from numpy.typing import NDArray

from roost.grammar.compiler import Compiler
from roost.grammar.matcher import num_words
from roost.text.gguf import tokenizer_from_gguf
from roost.text.tokenizer import Tokenizer
from tests.support.small_vocabularies import PREFIX, byte_fields
from tests.support.tiny_models import VOCAB

END = 2  # "<|im_end|>", which ends an output


@cache
def tiny_tokenizer() -> Tokenizer:
    """The byte-level vocabulary as far as the tiny models have it."""
    fields = byte_fields()
    tokens, kinds = (fields[PREFIX + name] for name in ("tokens", "token_type"))
    assert isinstance(tokens, list) and isinstance(kinds, list)
    return tokenizer_from_gguf(byte_fields(tokens=tokens[:VOCAB], token_type=kinds[:VOCAB], merges=[]))


@cache
def compiler() -> Compiler:
    """Compiles for it."""
    return Compiler(tiny_tokenizer(), VOCAB)


@cache
def allowed_after(grammar: str, output: tuple[int, ...]) -> NDArray[np.bool_]:
    """Which tokens may follow an output, which a new matcher reads from its beginning."""
    matcher = compiler().new_matcher(grammar)
    assert all(matcher.consume(token) for token in output), (grammar, output)
    mask = np.zeros(num_words(VOCAB), dtype=np.int32)
    matcher.fill(mask)
    return np.unpackbits(mask.view(np.uint8), bitorder="little")[:VOCAB].astype(np.bool_)
