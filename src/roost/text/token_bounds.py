"""Token bounds: the most text that one token can stand for, derived from a vocabulary and its rules.

From it follows the fewest tokens that a text can have, so that a text which cannot fit is refused without being
tokenised. Rules that may shorten a text by any amount (removed characters, runs of unknown ones that become a single
token) leave no bound, and a rule that is not known here is assumed to leave none. Called by text.tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DECOMPOSED_MAX = 4  # most characters that NFC composes into one
_ASCII_END = 0x80
_CONTINUATION_BYTES = frozenset(range(0x80, 0xC0))  # of UTF-8: every character beyond ASCII has at least one
_LOSSLESS_SPLITS = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")  # unless their behavior is "Removed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBounds:
    """The most text that one token stands for."""

    size: int
    in_bytes: bool  # else in characters
    missing: bytes = b""  # bytes without a token: the tokenizer drops them, so they do not count

    def fewest_tokens(self, text: str) -> int:
        """A lower bound for the number of tokens of a text."""
        if self.in_bytes:
            length = len(text.encode("utf-8", "surrogatepass").translate(None, self.missing))
        else:
            length = len(text) - sum(text.count(chr(byte)) for byte in self.missing if byte < _ASCII_END)
        return -(-length // self.size)


def token_bounds_of(
    source: Mapping[str, Any], pieces: list[bytes], byte_chars: Mapping[str, int] | None
) -> TokenBounds | None:
    """The bounds of a tokenizer.json, None if it has none.

    `byte_chars`: how a byte-level vocabulary writes bytes; None for sentencepiece.
    """
    if any(token["lstrip"] or token["rstrip"] for token in source["added_tokens"]):
        return None  # such a token swallows any amount of whitespace around it
    shrinks_by = _shrinks_by(source["normalizer"])
    if shrinks_by is None or not _keeps_all(source["pre_tokenizer"]):
        return None
    if byte_chars is not None:
        missing = bytes(byte for char, byte in byte_chars.items() if char not in source["model"]["vocab"])
        size, in_bytes = max(1, *map(len, pieces)) * shrinks_by, shrinks_by == 1
        if not in_bytes and _CONTINUATION_BYTES & {*missing}:
            return None  # a character beyond ASCII might be dropped altogether, and characters are what is counted
        return TokenBounds(size=size, in_bytes=in_bytes, missing=missing)
    if not _is_complete(source["model"]):
        return None
    tokens = (*source["model"]["vocab"], *(token["content"] for token in source["added_tokens"]))
    return TokenBounds(size=max(1, *map(len, tokens)) * shrinks_by, in_bytes=False)


def _is_complete(model: Mapping[str, Any]) -> bool:
    """Whether every character becomes at least one token, and no token stands for a run of unknown characters."""
    has_bytes = model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return has_bytes or (model["unk_token"] is not None and not model["fuse_unk"])


def _keeps_all(given: Mapping[str, Any] | None) -> bool:
    if given is None:
        return True
    if given["type"] == "Sequence":
        return all(map(_keeps_all, given["pretokenizers"]))
    return given["type"] in _LOSSLESS_SPLITS and given.get("behavior") != "Removed"


def _shrinks_by(given: Mapping[str, Any] | None) -> int | None:
    """The most characters that a normalizer turns into one; None: unknown."""
    if given is None or given["type"] == "Prepend":
        return 1
    if given["type"] == "NFC":
        return DECOMPOSED_MAX
    if given["type"] == "Replace":
        pattern = given["pattern"].get("String")
        return 1 if pattern is not None and len(given["content"]) >= len(pattern) else None
    if given["type"] != "Sequence":
        return None
    product = 1
    for each in map(_shrinks_by, given["normalizers"]):
        if each is None:
            return None
        product *= each
    return product
