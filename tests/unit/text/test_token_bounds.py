"""A text has at least the tokens that its length says; what can never fit is refused before it is tokenised."""

import json
import sys
import unicodedata
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner

from roost.errors import RequestError
from roost.text.token_bounds import DECOMPOSED_MAX
from roost.text.tokenizer import _GIL_RELEASE_CHARS, CHARS_MAX, Tokenizer
from tests.support.small_vocabularies import (
    CONTROL,
    THINK,
    byte_fields,
    byte_level,
    piece_fields,
    sentencepiece,
    spelled,
)


def _spacious() -> Tokenizer:
    """A byte-level vocabulary whose longest tokens are runs of spaces."""
    fields = byte_fields("gpt-2")
    tokens, types, merges = (fields[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "merges"))
    assert isinstance(tokens, list) and isinstance(types, list) and isinstance(merges, list)
    for length in (1, 2, 4, 8, 16, 32):
        run = spelled(b" " * length)
        merges.append(f"{run} {run}")
        tokens.append(run * 2)
        types.append(1)
    return byte_level("gpt-2", tokens=tokens, token_type=types, merges=merges)


def _without(pre: str, *gone: bytes) -> Tokenizer:
    """A byte-level vocabulary that lacks some bytes, which it leaves out of texts."""
    tokenizer = byte_level(pre)
    source = json.loads(json.loads(tokenizer.to_json())["inner"])
    lacking = {spelled(each) for each in gone}
    vocab = {token: id for token, id in source["model"]["vocab"].items() if token not in lacking}
    return _changed(tokenizer, model={"vocab": vocab})


def _changed(tokenizer: Tokenizer, **changes: Any) -> Tokenizer:
    parts = json.loads(tokenizer.to_json())
    source = json.loads(parts.pop("inner"))
    for name, value in changes.items():
        source[name] = value if name != "model" else {**source["model"], **value}
    return Tokenizer(Inner.from_str(json.dumps(source)), **parts)


VOCABULARIES = {
    "lacks bytes": _without("smollm", b"\x04", b"\x1d", b"\xf1", b"\xc0"),
    "lacks bytes and composes": _without("qwen2", b"\x04", b"\xf1"),
    **{pre: byte_level(pre) for pre in ("smollm", "llama-bpe", "qwen2")},
    "spaces": _spacious(),
    "sentencepiece": sentencepiece(),
    "no space before": sentencepiece(add_space_prefix=False),
}
composed = [
    "e\u0301",
    "\u1112\u1161\u11ab",
    "\u03b1\u0313\u0300\u0345",
    "\u212b",
    "u\u0308\u0304",
    "▁",
    "日",
    "🦉",
    "\x04",
    "\U00040000",
]
parts = st.sampled_from([*CONTROL, THINK, "hell", " hell", "123", " " * 64, "\n" * 9, "abc", " abc", "</s>", *composed])
texts = st.lists(st.one_of(parts, st.text(st.characters(exclude_categories=["Cs"]), max_size=5)), max_size=8).map(
    "".join
)


@pytest.mark.parametrize("tokenizer", VOCABULARIES.values(), ids=VOCABULARIES)
@pytest.mark.parametrize("special", [False, True])
@given(text=texts, times=st.integers(1, 20))
def test_a_text_has_at_least_the_tokens_that_its_length_says(
    tokenizer: Tokenizer, special: bool, text: str, times: int
) -> None:
    assert tokenizer.token_bounds is not None
    assert len(tokenizer.encode(text * times, special=special)) >= tokenizer.token_bounds.fewest_tokens(text * times)


@pytest.mark.parametrize("tokenizer", VOCABULARIES.values(), ids=VOCABULARIES)
def test_the_bound_is_reached_by_the_longest_token(tokenizer: Tokenizer) -> None:
    longest = max((tokenizer.piece(id) for id in range(tokenizer.vocab_size)), key=len).decode()
    assert tokenizer.token_bounds is not None
    assert tokenizer.token_bounds.fewest_tokens(longest) == len(tokenizer.encode(longest, special=True)) == 1
    assert tokenizer.token_bounds.fewest_tokens("") == 0


def test_no_character_is_composed_of_more_than_is_reckoned_with() -> None:
    longest = max(len(unicodedata.normalize("NFD", chr(code))) for code in range(sys.maxunicode + 1))
    assert longest == DECOMPOSED_MAX


def _stripping() -> Tokenizer:
    added = json.loads(json.loads(byte_level().to_json())["inner"])["added_tokens"]
    return _changed(byte_level(), added_tokens=[{**each, "rstrip": True} for each in added])


@pytest.mark.parametrize(
    "tokenizer",
    [
        _changed(byte_level(), normalizer={"type": "NFKC"}),
        _changed(byte_level(), normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        _changed(byte_level(), normalizer={"type": "Replace", "pattern": {"String": "  "}, "content": " "}),
        _changed(byte_level(), normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        _changed(byte_level(), pre_tokenizer={"type": "WhitespaceSplit"}),
        _changed(
            byte_level(),
            pre_tokenizer={"type": "Split", "pattern": {"String": " "}, "behavior": "Removed", "invert": False},
        ),
        _changed(sentencepiece(), model={"byte_fallback": False}),
        _without("qwen2", b"\x80"),
        _stripping(),
    ],
    ids=[
        "nfkc",
        "strip",
        "fewer spaces",
        "any spaces",
        "split",
        "removed",
        "unknown is fused",
        "lacks a byte of many",
        "strips",
    ],
)
def test_where_a_text_may_get_shorter_by_any_amount_its_length_says_nothing(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_bounds is None
    assert tokenizer.encode(" a " * 100, special=False, tokens_max=400)
    with pytest.raises(RequestError, match=r"prompt of .* tokens exceeds the maximum allowed length: --context 4"):
        tokenizer.encode("a b c " * 100, special=False, tokens_max=4)


class Watched:
    """A tokenizer's inside that notes how it is asked."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.asked: list[str] = []

    def __getattr__(self, name: str) -> Any:
        self.asked.append(name)
        return getattr(self.inner, name)


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_what_can_never_fit_is_refused_before_it_is_tokenised(make: Any) -> None:
    tokenizer = make()
    tokenizer._plain = watched = Watched(tokenizer._plain)
    most = tokenizer.token_bounds.size * 100
    with pytest.raises(RequestError, match=r"prompt of at least 101 tokens .*--context 100") as refused:
        tokenizer.encode("a" * (most + 1), special=False, tokens_max=100)
    assert refused.value.status == 413 and watched.asked == []
    with pytest.raises(RequestError, match=r"prompt of \d+ tokens exceeds"):
        tokenizer.encode("1" * most, special=False, tokens_max=100)
    assert watched.asked != []


def test_a_text_of_what_becomes_no_token_is_refused_before_it_is_tokenised_too() -> None:
    tokenizer = VOCABULARIES["lacks bytes"]
    assert tokenizer.encode("\x04" * 100, special=False, tokens_max=1) == []
    tokenizer._plain, before = Watched(tokenizer._plain), tokenizer._plain  # type: ignore[assignment]
    try:
        with pytest.raises(RequestError, match="characters, at most 4194304"):
            tokenizer.encode("\x04" * (CHARS_MAX + 1), special=False, tokens_max=1)
        tokenizer.check_len("\x04" * CHARS_MAX, 1)
        assert tokenizer._plain.asked == []  # type: ignore[attr-defined]
    finally:
        tokenizer._plain = before


@settings(max_examples=25, deadline=None)
@given(text=texts)
def test_a_long_text_is_tokenised_without_the_gil_and_just_like_a_short_one(text: str) -> None:
    long = (text + "hello abc " * (_GIL_RELEASE_CHARS // 10 + 1))[:_GIL_RELEASE_CHARS]
    for tokenizer in VOCABULARIES.values():
        for each, how in ((long, "encode_batch_fast"), (long[:-1], "encode")):
            watched, before = Watched(tokenizer._plain), tokenizer._plain
            tokenizer._plain = watched  # type: ignore[assignment]
            try:
                ids = tokenizer.encode(each, special=False)
            finally:
                tokenizer._plain = before
            assert watched.asked == [how]
            assert ids == before.encode(each, add_special_tokens=False).ids


def test_a_file_that_cuts_or_pads_texts_does_not_cut_or_pad_prompts() -> None:
    cut = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    assert _changed(byte_level(), truncation=cut).encode("abcdef", special=False) == byte_level().encode(
        "abcdef", special=False
    )


def test_unknown_characters_that_are_one_token_each_leave_a_bound() -> None:
    fields = piece_fields()
    assert fields["tokenizer.ggml.model"] == "llama"
    tokenizer = _changed(sentencepiece(), model={"byte_fallback": False, "fuse_unk": False})
    assert tokenizer.token_bounds is not None
    assert len(tokenizer.encode("🦉" * 50, special=False)) >= tokenizer.token_bounds.fewest_tokens("🦉" * 50)
