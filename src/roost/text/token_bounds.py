"""Reach: how much text one token can stand for at most, read off a vocabulary and its rules.

What is so much longer than its limit in tokens can be refused without being tokenised. Rules that may make a text
shorter by any amount (removed characters, unknown ones that become one token) leave no such bound; what is not known to
leave one is taken to leave none. Called by text.tokenizer.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DECOMPOSED_MAX = 4  # characters that Unicode composes into one at most
_ASCII_END = 0x80
_INNER = frozenset(range(0x80, 0xC0))  # bytes of characters beyond ASCII, after the first
_KEEPING = ("ByteLevel", "Digits", "Metaspace", "Split", "Punctuation")  # cut a text, if they are not told to remove


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """The most that a token stands for."""

    size: int
    in_bytes: bool  # or in characters
    missing: bytes = b""  # which no token stands for: they are left out of a text

    def fewest_tokens(self, text: str) -> int:
        """Tokens that a text has at least."""
        if self.in_bytes:
            length = len(text.encode("utf-8", "surrogatepass").translate(None, self.missing))
        else:
            length = len(text) - sum(text.count(chr(byte)) for byte in self.missing if byte < _ASCII_END)
        return -(-length // self.size)


def reach_of(source: Mapping[str, Any], pieces: list[bytes], byte_chars: Mapping[str, int] | None) -> Reach | None:
    """The reach of a tokenizer.json; `byte_chars`: how a byte-level vocabulary writes bytes, None for sentencepiece."""
    if any(token["lstrip"] or token["rstrip"] for token in source["added_tokens"]):
        return None  # they take all the space around them
    shrinks_by = _shrinks_by(source["normalizer"])
    if shrinks_by is None or not _keeps_all(source["pre_tokenizer"]):
        return None
    if byte_chars is not None:
        missing = bytes(byte for char, byte in byte_chars.items() if char not in source["model"]["vocab"])
        size, in_bytes = max(1, *map(len, pieces)) * shrinks_by, shrinks_by == 1
        # in characters each must have a byte that is there, and all but ASCII have one of these
        return Reach(size=size, in_bytes=in_bytes, missing=missing) if in_bytes or not _INNER & {*missing} else None
    if not _is_complete(source["model"]):
        return None
    tokens = (*source["model"]["vocab"], *(token["content"] for token in source["added_tokens"]))
    return Reach(size=max(1, *map(len, tokens)) * shrinks_by, in_bytes=False)


def _is_complete(model: Mapping[str, Any]) -> bool:
    """Whether every character becomes a token or more, none of which stands for many unknown ones."""
    has_bytes = model["byte_fallback"] and all(f"<0x{byte:02X}>" in model["vocab"] for byte in range(256))
    return has_bytes or (model["unk_token"] is not None and not model["fuse_unk"])


def _keeps_all(given: Mapping[str, Any] | None) -> bool:
    if given is None:
        return True
    if given["type"] == "Sequence":
        return all(map(_keeps_all, given["pretokenizers"]))
    return given["type"] in _KEEPING and given.get("behavior") != "Removed"


def _shrinks_by(given: Mapping[str, Any] | None) -> int | None:
    """Of how many characters a normalizer makes one at most; None: nobody knows."""
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
