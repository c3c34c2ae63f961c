"""Tokenizers from GGUF metadata: byte-level BPE, and sentencepiece BPE whose merges are derived from its scores.

Owns the meaning of the `tokenizer.ggml.*` keys, given as plain Python values. Never reads a file; a missing or
inconsistent value is a ConfigError that names the key.
Called when a model is loaded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from roost.errors import ConfigError
from roost.text.tokenizer import SPACE_MARK, Spelling, Tokenizer

PREFIX = "tokenizer.ggml."
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of token_type; 5 is unused, 6 a byte
END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")  # end of text, of a turn, of a message
# ends of a turn by their text, for files that do not name theirs
TURN_ENDS = ("<end_of_turn>", "<|im_end|>", "<|eot_id|>", "<|end|>")

# Pre-tokenizer patterns, as the vocabularies were trained: contractions, letters, numbers, other, line ends, spaces.
LLAMA_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_WORDS = LLAMA_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")  # every digit is a word of its own

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Words:
    """How a byte-level vocabulary splits text into words before it merges."""

    cut: pre_tokenizers.PreTokenizer | None = None  # runs before the byte level
    uses_byte_level_words: bool = False  # the byte level's own pattern, which is GPT-2's
    takes_whole_words: bool = False  # a word in the vocabulary is one token, whatever the merges say
    composes: bool = False  # normalise to Unicode NFC first
    adds_bos: bool = False  # where the file does not say


def _words(pre: str) -> _Words:
    known = {
        "default": _Words(uses_byte_level_words=True),
        "gpt-2": _Words(uses_byte_level_words=True),
        "smollm": _Words(cut=pre_tokenizers.Digits(individual_digits=True), uses_byte_level_words=True),
        "llama-bpe": _Words(cut=_split(LLAMA_WORDS), takes_whole_words=True, adds_bos=True),
        "qwen2": _Words(cut=_split(QWEN_WORDS), composes=True),
    }
    if pre not in known:
        raise ConfigError(f"{PREFIX}pre: {pre!r} is not known; known: {', '.join(sorted(known))}")
    return known[pre]


def _split(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def tokenizer_from_gguf(fields: Mapping[str, object]) -> Tokenizer:
    """Build the tokenizer that a GGUF file's metadata describes."""
    model = _value(fields, "model", str)
    vocab = _Vocab.read(fields)
    if model == "gpt2":
        words = _words(_value(fields, "pre", str))
        inner = _byte_level(vocab, _merges(fields, vocab), words)
        adds_bos = words.adds_bos and PREFIX + "bos_token_id" in fields
        spelling: Spelling = "byte-level"
    elif model == "llama":
        inner = _sentencepiece(vocab, fields)
        adds_bos = PREFIX + "bos_token_id" in fields
        spelling = "sentencepiece"
    else:
        raise ConfigError(f"{PREFIX}model: {model!r} is not known; known: gpt2, llama")
    bos_id = _optional(fields, "bos_token_id", int)
    if PREFIX + "add_bos_token" in fields:
        adds_bos = _value(fields, "add_bos_token", bool)
    ends = [_optional(fields, key, int) for key in END_KEYS]
    eos_ids = {id for id in ends if id is not None}
    if PREFIX + "eot_token_id" not in fields:
        eos_ids |= {vocab.ids[text] for text in TURN_ENDS if vocab.is_control(text)}
    _add_tokens(inner, vocab, {id for id in (bos_id, *eos_ids) if id is not None})
    return Tokenizer(inner, spelling=spelling, eos_ids=eos_ids, bos_id=bos_id, adds_bos=adds_bos)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Vocab:
    """Tokens by id, and what kind each is."""

    tokens: list[str]
    types: list[int]
    ids: dict[str, int]

    def is_control(self, token: str) -> bool:
        """Whether there is such a token, and text never becomes it."""
        return token in self.ids and self.types[self.ids[token]] == CONTROL

    @classmethod
    def read(cls, fields: Mapping[str, object]) -> "_Vocab":
        tokens = _values(fields, "tokens", str)
        types = _values(fields, "token_type", int)
        ids = {token: id for id, token in enumerate(tokens)}
        if len(types) != len(tokens):
            raise ConfigError(f"{PREFIX}token_type: {len(types)} types for {len(tokens)} tokens")
        if len(ids) != len(tokens):
            twice = next(token for id, token in enumerate(tokens) if ids[token] != id)
            raise ConfigError(f"{PREFIX}tokens: {twice!r} is there twice")
        return cls(tokens=tokens, types=types, ids=ids)


def _byte_level(vocab: _Vocab, merges: list[tuple[str, str]], words: _Words) -> tokenizers.Tokenizer:
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab.ids, merges=merges, ignore_merges=words.takes_whole_words))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words.uses_byte_level_words)
    inner.pre_tokenizer = level if words.cut is None else pre_tokenizers.Sequence([words.cut, level])
    inner.decoder = decoders.ByteLevel()
    if words.composes:
        inner.normalizer = normalizers.NFC()
    return inner


def _merges(fields: Mapping[str, object], vocab: _Vocab) -> list[tuple[str, str]]:
    pairs = []
    for merge in _values(fields, "merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocab.ids or right not in vocab.ids or left + right not in vocab.ids:
            raise ConfigError(f"{PREFIX}merges: {merge!r} is not made of two tokens that make a third")
        pairs.append((left, right))
    return pairs


def _sentencepiece(vocab: _Vocab, fields: Mapping[str, object]) -> tokenizers.Tokenizer:
    scores = _values(fields, "scores", float)
    if len(scores) != len(vocab.tokens):
        raise ConfigError(f"{PREFIX}scores: {len(scores)} scores for {len(vocab.tokens)} tokens")
    unknown_id = _optional(fields, "unknown_token_id", int)
    if unknown_id is None:
        unknown_id = vocab.types.index(UNKNOWN) if UNKNOWN in vocab.types else None
    elif not 0 <= unknown_id < len(vocab.tokens):
        raise ConfigError(f"{PREFIX}unknown_token_id: {unknown_id} is outside of {len(vocab.tokens)} tokens")
    unknown = None if unknown_id is None else vocab.tokens[unknown_id]
    merges = _merges_by_score(vocab, scores)
    inner = tokenizers.Tokenizer(
        models.BPE(vocab=vocab.ids, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    marks = normalizers.Replace(" ", SPACE_MARK)
    if _optional(fields, "add_space_prefix", bool) is not False:
        inner.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE_MARK), marks])
    else:
        inner.normalizer = marks
    return inner


def _merges_by_score(vocab: _Vocab, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Sentencepiece merges the neighbours whose union scores best: all ways to make each token, best token first."""
    normal = {token: id for id, token in enumerate(vocab.tokens) if vocab.types[id] == NORMAL}
    merges = []
    for token in sorted(normal, key=lambda token: (-scores[normal[token]], normal[token])):
        for at in range(len(token) - 1, 0, -1):
            if token[:at] in normal and token[at:] in normal:
                merges.append((token[:at], token[at:]))
    return merges


def _add_tokens(inner: tokenizers.Tokenizer, vocab: _Vocab, named: set[int]) -> None:
    """Add special tokens, which plain text never becomes, and user-defined ones, which are never split."""
    for id, (token, type) in enumerate(zip(vocab.tokens, vocab.types, strict=True)):
        if type in (UNKNOWN, CONTROL) or id in named:
            inner.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif type == USER_DEFINED:
            inner.add_tokens([AddedToken(token, special=False, normalized=False)])


def _optional(fields: Mapping[str, object], key: str, kind: type[Value]) -> Value | None:
    return _value(fields, key, kind) if PREFIX + key in fields else None


def _value(fields: Mapping[str, object], key: str, kind: type[Value]) -> Value:
    value = _present(fields, key)
    if not _is_a(value, kind):
        raise ConfigError(f"{PREFIX}{key}: {value!r} is no {kind.__name__}")
    return value  # type: ignore[return-value]


def _values(fields: Mapping[str, object], key: str, kind: type[Value]) -> list[Value]:
    values = _present(fields, key)
    if not isinstance(values, list | tuple):
        raise ConfigError(f"{PREFIX}{key}: is no list")
    wrong = next((value for value in values if not _is_a(value, kind)), None)
    if wrong is not None:
        raise ConfigError(f"{PREFIX}{key}: {wrong!r} is no {kind.__name__}")
    return list(values)


def _present(fields: Mapping[str, object], key: str) -> object:
    value = fields.get(PREFIX + key)
    if value is None:
        raise ConfigError(f"{PREFIX}{key}: is missing in the model file")
    return value


def _is_a(value: object, kind: type) -> bool:
    if isinstance(value, bool):  # in Python also an int
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)
