"""Tokenizer: text to token ids, token ids to the bytes they stand for.

Owns the vocabulary's bytes: decoding is joining them, so a stream and a whole decode cannot differ. A user's text never
becomes a special token. Knows nothing of messages or of requests.
Called by the front end, and by the stop search of the engine.
"""

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import tokenizers

from roost.errors import ConfigError, RequestError
from roost.text.escaping import Escaper
from roost.text.token_bounds import reach_of

Spelling = Literal["byte-level", "sentencepiece"]  # how the vocabulary writes bytes down

SPACE_MARK = "▁"  # sentencepiece's space
CHARS_MAX = 4 * 1024 * 1024  # of a text that is to fit some number of tokens
_LONG = 4096  # characters from which on it pays to let other threads run meanwhile


class Tokenizer:
    """A vocabulary with its rules, both ways."""

    def __init__(
        self,
        inner: tokenizers.Tokenizer,
        *,
        spelling: Spelling,
        eos_ids: Iterable[int],
        bos_id: int | None = None,
        adds_bos: bool = False,
    ) -> None:
        inner.no_truncation()  # what a file says of these is for training
        inner.no_padding()
        self._inner = inner
        self._spelling: Spelling = spelling
        added = inner.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._pieces = _pieces(inner, spelling)
        self.vocab_size = len(self._pieces)
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        self.adds_bos = adds_bos
        self._check_ids()
        self._plain, unknown_id = _without_special(inner, {added[id].content for id in self._special})
        self._going_on = _without_first_space(self._plain)
        byte_chars = _BYTE_OF if spelling == "byte-level" else None
        self.reach = reach_of(json.loads(inner.to_str()), self._pieces, byte_chars)
        self._unreachable = self._special - {unknown_id}  # by text alone; text may well be unknown
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
        if adds_bos is None:  # then the file's own rule for a whole text says
            adds_bos = inner.encode("a").ids[:1] == [bos_id]
        return cls(inner, spelling=spelling, eos_ids=eos_ids, bos_id=bos_id, adds_bos=bool(adds_bos))

    def to_json(self) -> str:
        """Everything another process needs to build the same."""
        return json.dumps(
            {
                "inner": self._inner.to_str(),
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
        """A text cut before and after every special token that it spells."""
        parts, start = [], 0
        for found in self._specials.finditer(text) if self._specials else ():  # other threads may run in between
            parts += [text[start : found.start()], found[0]]
            start = found.end()
        return [part for part in (*parts, text[start:]) if part]

    def check_len(self, text: str, tokens_max: int | None) -> None:
        """Refuse a text that must have more tokens; this takes no time, whatever the text."""
        if tokens_max is None:
            return
        if len(text) > CHARS_MAX:  # of which all may be such as become no token
            raise RequestError(413, "tokens", f"a text of {len(text)} characters, at most {CHARS_MAX} are allowed")
        fewest = 0 if self.reach is None else self.reach.fewest_tokens(text)
        if fewest > tokens_max:
            raise too_long(f"at least {fewest}", tokens_max)

    def encode(self, text: str, *, special: bool, goes_on: bool = False, tokens_max: int | None = None) -> list[int]:
        """Token ids of a text; the strings of special tokens become those tokens only if `special`.

        A plain text that goes on after a special token gets no space that is only for a text's beginning. A text of
        more tokens than `tokens_max` is refused, before it is tokenised if that can be. Others run meanwhile.
        """
        self.check_len(text, tokens_max)
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(400, "text", f"not valid Unicode at character {error.start}") from error
        inner = self._inner if special else self._going_on if goes_on else self._plain
        if len(text) < _LONG:
            found = inner.encode(text, add_special_tokens=False)
        else:
            (found,) = inner.encode_batch_fast([text], add_special_tokens=False)  # only this form lets go of the GIL
        if tokens_max is not None and len(found) > tokens_max:
            raise too_long(str(len(found)), tokens_max)
        ids = found.ids
        if not special and not self._unreachable.isdisjoint(ids):
            raise RequestError(400, "text", "contains what this model keeps for a special token")
        return ids

    def encode_prompt(self, text: str, *, tokens_max: int | None = None) -> list[int]:
        """Token ids of a plain prompt, with the model's first token if it wants one."""
        ids = self.encode(text, special=False, tokens_max=tokens_max)
        return [self.bos_id, *ids] if self.adds_bos and self.bos_id is not None else ids

    def decode(self, ids: Sequence[int], *, skip_special: bool, at_start: bool = False) -> str:
        """Text of token ids; `at_start`: a text of its own, without the space that encoding puts in front."""
        text = b"".join(self.shown(id, skip_special=skip_special) for id in ids).decode("utf-8", "replace")
        return text.removeprefix(" ") if at_start and self._adds_space else text

    def piece(self, id: int) -> bytes:
        """The bytes a token stands for; none for an id without a token."""
        return self._pieces[id] if 0 <= id < self.vocab_size else b""

    def shown(self, id: int, *, skip_special: bool) -> bytes:
        """The bytes a token adds to a text for a reader."""
        return b"" if skip_special and id in self._special else self.piece(id)

    def is_special(self, id: int) -> bool:
        """Whether a token is one that plain text cannot make."""
        return id in self._special

    def _check_ids(self) -> None:
        for name, id in [("bos_token_id", self.bos_id), *(("eos_token_id", id) for id in sorted(self.eos_ids))]:
            if id is not None and not 0 <= id < self.vocab_size:
                raise ConfigError(f"tokenizer: {name} {id} is outside of its vocabulary of {self.vocab_size}")
        if self.adds_bos and self.bos_id is None:
            raise ConfigError("tokenizer: prompts are to begin with a bos token, but none is named")


def too_long(num_tokens: str, tokens_max: int) -> RequestError:
    """The refusal of what no request can hold."""
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
    """Byte-level vocabularies write a printable byte as itself, the others as characters from 256 on, in order."""
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
            pass  # ordinary text that looks alike
    return text.replace(SPACE_MARK, " ").encode()


def _without_special(inner: tokenizers.Tokenizer, special: set[str]) -> tuple[tokenizers.Tokenizer, int | None]:
    """A copy that reads special tokens' strings as plain text, and the id it gives to what it does not know."""
    source = json.loads(inner.to_str())
    model = source["model"]
    model["merges"] = [
        pair for pair in model["merges"] if "".join(pair) not in special
    ]  # else "<", "s>" may meet again
    plain = tokenizers.Tokenizer.from_str(json.dumps(source))
    plain.encode_special_tokens = True
    unknown = model["unk_token"]
    return plain, None if unknown is None else inner.token_to_id(unknown)


def _without_first_space(plain: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same, without the space that some vocabularies put before a text, but not after a special token."""
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
    except Exception as error:  # the library raises nothing more precise
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
    """Id of a token the settings name; it is special, whatever the vocabulary says."""
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
    """What ends an output: the generation settings say, or else the model's."""
    for name in ("generation_config.json", "config.json"):
        value = _read_json(path / name).get("eos_token_id")
        if value is None:
            continue
        ids = value if isinstance(value, list) else [value]
        if not all(isinstance(id, int) for id in ids):
            raise ConfigError(f"{name}: eos_token_id {value!r} is neither a number nor a list of numbers")
        return set(ids)
    return set()
