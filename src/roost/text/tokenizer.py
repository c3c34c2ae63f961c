"""Tokenizer: text to token ids, token ids to the bytes they stand for.

Owns the bytes of each token: decoding joins them, so decoding a stream and decoding at once cannot differ. A user's
text never becomes a special token. Knows nothing of messages or requests.
Called by the server and the library, and by the engine's search for stop strings.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers

from roost.errors import ConfigError, RequestError
from roost.text.escaping import Escaper
from roost.text.token_bounds import token_bounds_of

Spelling = Literal["byte-level", "sentencepiece"]  # how the vocabulary writes bytes down

SPACE_MARK = "▁"  # sentencepiece's space
CHARS_MAX = 4 * 1024 * 1024  # of a text with a limit in tokens
_GIL_RELEASE_CHARS = 4096  # texts at least this long are encoded without the GIL


class Tokenizer:
    """A vocabulary and its rules: encodes and decodes."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        spelling: Spelling,
        eos_ids: Iterable[int],
        bos_id: int | None = None,
        adds_bos: bool = False,
    ) -> None:
        inner.no_truncation()  # a file's settings for these are for training
        inner.no_padding()
        self._inner = inner
        self._spelling: Spelling = spelling
        added = inner.get_added_tokens_decoder()
        self.added_ids = {token.content: id for id, token in added.items()}
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._pieces = _pieces(inner, spelling)
        self.vocab_size = len(self._pieces)
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.adds_bos = adds_bos
        self._check_ids()
        self._plain, unknown_id = _without_special(inner, {added[id].content for id in self._special})
        self._continuing = _without_first_space(self._plain)
        byte_chars = _BYTE_OF if spelling == "byte-level" else None
        self.token_bounds = token_bounds_of(json.loads(inner.to_str()), self._pieces, byte_chars)
        self._unreachable = self._special - {unknown_id}  # ids that plain text must not become; <unk> is no harm
        specials = sorted((self.piece(id).decode() for id in self._special), key=len, reverse=True)
        self._specials = re.compile("|".join(map(re.escape, specials))) if specials else None
        self.escaper = Escaper(specials)
        self._adds_space = self.decode(self.encode("a", special=False), skip_special=False).startswith(" ")

    @classmethod
    def from_folder(cls, path: Path) -> "Tokenizer":
        """Read a model folder: tokenizer.json, and the settings beside it."""
        source = _read_json(path / "tokenizer.json", needed=True)
        spelling = _spelling(source)
        inner = _built(json.dumps(source), path / "tokenizer.json")
        settings = _read_json(path / "tokenizer_config.json")
        bos_id, eos_id = (_named_id(inner, settings, name) for name in ("bos_token", "eos_token"))
        eos_ids = _eos_ids(path) | (set() if eos_id is None else {eos_id})
        adds_bos = settings.get("add_bos_token")
        if adds_bos is None:  # then tokenizer.json's post-processor decides
            adds_bos = inner.encode("a").ids[:1] == [bos_id]
        return cls(inner, spelling=spelling, eos_ids=eos_ids, bos_id=bos_id, adds_bos=bool(adds_bos))

    def inner_json(self) -> str:
        """The tokenizer as the `tokenizers` library writes it."""
        return self._inner.to_str()

    def to_json(self) -> str:
        """Everything another process needs to build an equal one."""
        return json.dumps(
            {
                "inner": self.inner_json(),
                "spelling": self._spelling,
                "eos_ids": sorted(self.eos_ids),
                "bos_id": self.bos_id,
                "adds_bos": self.adds_bos,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> "Tokenizer":
        """What `to_json` wrote."""
        parts = json.loads(text)
        return cls(tokenizers.Tokenizer.from_str(parts.pop("inner")), **parts)

    def split_special(self, text: str) -> list[str]:
        """A text split before and after every special token that it spells."""
        parts, start = [], 0
        for found in self._specials.finditer(text) if self._specials else ():  # a loop, so that other threads may run
            parts += [text[start : found.start()], found[0]]
            start = found.end()
        return [part for part in (*parts, text[start:]) if part]

    def check_len(self, text: str, tokens_max: int | None) -> None:
        """Refuse a text that cannot have as few tokens as `tokens_max`, judged by its length alone."""
        if tokens_max is None:
            return
        if len(text) > CHARS_MAX:  # also where there is no bound: every character might be dropped
            raise RequestError(413, "tokens", f"a text of {len(text)} characters, at most {CHARS_MAX} are allowed")
        fewest = 0 if self.token_bounds is None else self.token_bounds.fewest_tokens(text)
        if fewest > tokens_max:
            raise too_long(f"at least {fewest}", tokens_max)

    def encode(
        self, text: str, *, special: bool, is_continuation: bool = False, tokens_max: int | None = None
    ) -> list[int]:
        """Token ids of a text; the strings of special tokens become those tokens only if `special`.

        `is_continuation`: a plain text after a special token, so without the space that some tokenizers put before a
        text. More than `tokens_max` tokens are refused, before tokenising if the text's length shows it. Long texts
        are encoded without the GIL.
        """
        self.check_len(text, tokens_max)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(400, "text", f"not valid Unicode at character {error.start}") from error
        inner = self._inner if special else self._continuing if is_continuation else self._plain
        if len(text) < _GIL_RELEASE_CHARS:
            found = inner.encode(text, add_special_tokens=False)
        else:
            (found,) = inner.encode_batch_fast([text], add_special_tokens=False)  # only batches release the GIL
        if tokens_max is not None and len(found) > tokens_max:
            raise too_long(str(len(found)), tokens_max)
        ids = found.ids
        if not special and not self._unreachable.isdisjoint(ids):
            raise RequestError(400, "text", "contains what this model keeps for a special token")
        return ids

    def encode_prompt(self, text: str, *, tokens_max: int | None = None) -> list[int]:
        """Token ids of a plain prompt, with a leading bos token if the model wants one."""
        ids = self.encode(text, special=False, tokens_max=tokens_max)
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool, at_start: bool = False) -> str:
        """Text of token ids; `at_start`: they begin a text, so the space that encoding puts in front is removed."""
        text = b"".join(self.shown(id, skip_special=skip_special) for id in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if at_start and self._adds_space else text

    def piece(self, id: int) -> bytes:
        """The bytes a token stands for; empty for an id without a token."""
        return self._pieces[id] if 0 <= id < self.vocab_size else b""

    def shown(self, id: int, *, skip_special: bool, kept: frozenset[int] = frozenset()) -> bytes:
        """The bytes a token adds to the text that a client sees; special tokens in `kept` are never skipped."""
        return b"" if skip_special and id in self._special and id not in kept else self.piece(id)

    def is_special(self, id: int) -> bool:
        """Whether plain text can never become this token."""
        return id in self._special

    def _check_ids(self) -> None:
        for name, id in [("bos_token_id", self.bos_id), *(("eos_token_id", id) for id in sorted(self.eos_ids))]:
            if id is not None and not 0 <= id < self.vocab_size:
                raise ConfigError(f"tokenizer: {name} {id} is outside of its vocabulary of {self.vocab_size}")
        if self.adds_bos and self.bos_id is None:
            raise ConfigError("tokenizer: prompts should begin with a bos token, but none is named")


def plain_encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """What encodes a text inside of another by plain tokens alone: text that spells an added token stays text."""
    source = json.loads(tokenizer.inner_json())
    source["added_tokens"] = []
    merges = source["model"]["merges"]
    source["model"]["merges"] = [pair for pair in merges if "".join(pair) not in tokenizer.added_ids]
    inner = _without_first_space(tokenizers.Tokenizer.from_str(json.dumps(source)))
    return lambda text: inner.encode(text, add_special_tokens=False).ids


def too_long(num_tokens: str, tokens_max: int) -> RequestError:
    """The refusal of a prompt that is longer than the context."""
    reason = f"prompt of {num_tokens} tokens exceeds the maximum allowed length: --context {tokens_max}"
    return RequestError(413, "tokens", reason)


def _pieces(inner: tokenizers.Tokenizer, spelling: Spelling) -> list[bytes]:
    vocab = inner.get_vocab(with_added_tokens=True)
    added = inner.get_added_tokens_decoder()
    pieces = [b""] * (max(vocab.values(), default=-1) + 1)  # ids may have gaps
    for text, id in vocab.items():
        if id in added:
            pieces[id] = (text if added[id].special else _spaced(text, spelling)).encode()
        elif spelling == "byte-level":
            pieces[id] = _from_byte_level(text)
        else:
            pieces[id] = _from_sentencepiece(text)
    return pieces


def _spaced(text: str, spelling: Spelling) -> str:
    return text.replace(SPACE_MARK, " ") if spelling == "sentencepiece" else text


def _byte_alphabet() -> dict[str, int]:
    """How byte-level vocabularies write bytes: printable ones as themselves, the others as chr(256), chr(257), …"""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + at): byte for at, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()


def _from_byte_level(text: str) -> bytes:
    spelled = [_BYTE_OF.get(char) for char in text]
    known = [byte for byte in spelled if byte is not None]
    return bytes(known) if len(known) == len(spelled) else text.encode()


def _from_sentencepiece(text: str) -> bytes:
    if len(text) == len("<0x00>") and text.startswith("<0x") and text.endswith(">"):
        try:
            return bytes([int(text[3:5], 16)])
        except ValueError:
            pass  # ordinary text that only looks like a byte token
    return text.replace(SPACE_MARK, " ").encode()


def _without_special(inner: tokenizers.Tokenizer, special: set[str]) -> tuple[tokenizers.Tokenizer, int | None]:
    """A copy that reads the strings of special tokens as plain text, and the id of its unknown token."""
    source = json.loads(inner.to_str())
    model = source["model"]
    # Without these, merges such as "<" + "s>" would build a special token again.
    model["merges"] = [pair for pair in model["merges"] if "".join(pair) not in special]
    plain = tokenizers.Tokenizer.from_str(json.dumps(source))
    plain.encode_special_tokens = True
    unknown = model["unk_token"]
    return plain, None if unknown is None else inner.token_to_id(unknown)


def _without_first_space(plain: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """A copy without the space that some vocabularies put before the first word of a text."""
    source = json.loads(plain.to_str())
    given = source["pre_tokenizer"] or {}
    first = [step for step in given.get("pretokenizers", [given]) if step.get("prepend_scheme") == "first"]
    for step in first:
        step["prepend_scheme"] = "never"
    if not first:
        return plain
    inside = tokenizers.Tokenizer.from_str(json.dumps(source))
    inside.encode_special_tokens = plain.encode_special_tokens
    return inside


def _read_json(path: Path, *, needed: bool = False) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        if needed:
            raise ConfigError(f"model folder: {path.name} is missing in {path.parent}") from error
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder: cannot read {path}: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"model folder: {path} holds no JSON object")
    return value


def _built(source: str, path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_str(source)
    except Exception as error:  # the tokenizers library raises bare Exceptions
        raise ConfigError(f"model folder: cannot use {path}: {error}") from error


def _spelling(source: dict[str, Any]) -> Spelling:
    model = (source.get("model") or {}).get("type")
    if model != "BPE":
        raise ConfigError(f"tokenizer.json: model {model} is not known; known: BPE")
    decoder = source.get("decoder") or {}
    steps = [step.get("type") for step in decoder.get("decoders", [decoder])]
    if "ByteLevel" in steps:
        return "byte-level"
    if "ByteFallback" in steps or "Metaspace" in steps:
        return "sentencepiece"
    raise ConfigError(f"tokenizer.json: decoder {steps} is not known; known: ByteLevel, ByteFallback, Metaspace")


def _named_id(inner: tokenizers.Tokenizer, settings: dict[str, Any], name: str) -> int | None:
    """Id of a token that the settings name; it becomes special even if the vocabulary does not say so."""
    value = settings.get(name)
    text = value.get("content") if isinstance(value, dict) else value
    if text is None:
        return None
    id = inner.token_to_id(text) if isinstance(text, str) else None
    if id is None:
        raise ConfigError(f"tokenizer_config.json: {name} {text!r} is not in the vocabulary")
    inner.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False)])
    return id


def _eos_ids(path: Path) -> set[int]:
    """The end-of-sequence ids, from generation_config.json or else config.json: of the text, where that is a part."""
    for name in ("generation_config.json", "config.json"):
        settings = _read_json(path / name)
        text = settings.get("text_config")
        value = settings.get("eos_token_id")
        if value is None and isinstance(text, dict):
            value = text.get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(id, int) for id in ids):
            raise ConfigError(f"{name}: eos_token_id {value!r} is neither a number nor a list of numbers")
        return set(ids)
    return set()
