"""What a GGUF file's metadata says about text is what its tokenizer does."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.errors import ConfigError
from roost.text.gguf import tokenizer_from_gguf
from roost.text.tokenizer import Tokenizer
from tests.support.small_vocabularies import PIECES, byte_fields, byte_level, piece_fields, sentencepiece

SENTENCEPIECE = sentencepiece()


def _cut(tokenizer: Tokenizer, text: str) -> list[str]:
    return [tokenizer.piece(id).decode() for id in tokenizer.encode(text, special=False)]


def test_merges_are_applied_in_their_order() -> None:
    assert _cut(byte_level(), "hell hell") == ["hell", " hell"]


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("smollm", ["1", "2", "3", " ", "1", "2"]),
        ("gpt-2", ["123", " ", "12"]),
        ("default", ["123", " ", "12"]),
        ("llama-bpe", ["123", " ", "12"]),
        ("qwen2", ["1", "2", "3", " ", "1", "2"]),
    ],
)
def test_numbers_are_cut_as_the_vocabulary_was_trained(pre: str, expected: list[str]) -> None:
    assert _cut(byte_level(pre), "123 12") == expected


def test_llama_words_end_after_three_digits_where_gpt_2_words_do_not() -> None:
    fields = byte_fields()
    tokens, types = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = fields["tokenizer.ggml.merges"]
    assert isinstance(tokens, list) and isinstance(types, list) and isinstance(merges, list)
    more = {"tokens": [*tokens, "1231"], "token_type": [*types, 1], "merges": [*merges, "123 1"]}
    assert _cut(byte_level("llama-bpe", **more), "1231") == ["123", "1"]
    assert _cut(byte_level("gpt-2", **more), "1231") == ["1231"]


def test_only_qwen_composes_characters_first() -> None:
    assert "".join(_cut(byte_level("qwen2"), "e\u0301")) == "é"
    ids = byte_level("llama-bpe").encode("e\u0301", special=False)
    assert byte_level("llama-bpe").decode(ids, skip_special=True) == "e\u0301"


def test_llama_takes_a_whole_word_of_its_vocabulary_whatever_the_merges() -> None:
    fields = byte_fields("llama-bpe", merges=[])
    assert _cut(tokenizer_from_gguf(fields), "hell") == ["hell"]
    assert _cut(tokenizer_from_gguf(byte_fields("gpt-2", merges=[])), "hell") == ["h", "e", "l", "l"]


def _joined_by_score(text: str) -> list[str]:
    """Sentencepiece in plain words: join the neighbours whose union scores best, the leftmost first."""
    parts = list("▁" + text.replace(" ", "▁"))
    while True:
        joins = [(PIECES.index(a + b), at) for at, (a, b) in enumerate(pairwise(parts)) if a + b in PIECES]
        if not joins:
            return parts
        at = min(joins)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


@given(st.text("abc s<>/", min_size=1))
def test_sentencepiece_joins_the_best_scoring_neighbours_first(text: str) -> None:
    assert _cut(SENTENCEPIECE, text) == [part.replace("▁", " ") for part in _joined_by_score(text)]


def test_a_piece_marked_unused_is_never_made() -> None:
    unused = [2, 3, 3] + [6] * 256 + [5 if piece == "▁abc" else 1 for piece in PIECES]
    assert _cut(SENTENCEPIECE, "abc") == [" abc"]
    assert _cut(sentencepiece(token_type=unused), "abc") != [" abc"]


def test_what_sentencepiece_has_no_piece_for_is_written_in_bytes() -> None:
    ids = SENTENCEPIECE.encode("日", special=False)
    assert b"".join(SENTENCEPIECE.piece(id) for id in ids) == " 日".encode()
    assert len(ids) == 4


def test_the_first_space_is_added_unless_the_file_says_no() -> None:
    assert _cut(SENTENCEPIECE, "a") == [" a"]
    assert _cut(sentencepiece(add_space_prefix=False), "a") == ["a"]


def test_a_first_token_is_added_as_the_file_or_else_its_kind_says() -> None:
    assert SENTENCEPIECE.adds_bos
    assert not sentencepiece(add_bos_token=False).adds_bos
    assert byte_level("llama-bpe", add_bos_token=None).adds_bos
    assert not byte_level("gpt-2", add_bos_token=None).adds_bos
    assert not byte_level("llama-bpe", add_bos_token=None, bos_token_id=None).adds_bos


def test_ends_of_turns_end_an_output_too_and_are_special_whatever_their_type() -> None:
    tokenizer = byte_level(eot_token_id=0, eom_token_id=7)
    assert tokenizer.eos_ids == {0, 2, 7}
    assert tokenizer.is_special(7)


def test_the_end_of_a_turn_ends_an_output_where_a_file_names_the_end_of_text_alone() -> None:
    head = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(255)), "<end_of_turn>"]
    types = [2, 3, 3] + [6] * 255 + [3] + [1] * len(PIECES)
    fields = piece_fields(tokens=[*head, *PIECES], token_type=types)
    assert tokenizer_from_gguf(fields).eos_ids == {2, head.index("<end_of_turn>")}
    plain = [*types[:258], 1, *types[259:]]  # no control token: text
    assert tokenizer_from_gguf(piece_fields(tokens=[*head, *PIECES], token_type=plain)).eos_ids == {2}
    named = piece_fields(tokens=[*head, *PIECES], token_type=types, eot_token_id=1)
    assert tokenizer_from_gguf(named).eos_ids == {1, 2}


def test_unknown_and_control_tokens_are_special() -> None:
    assert [SENTENCEPIECE.is_special(id) for id in range(4)] == [True, True, True, False]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "tokenizer.ggml.model: is missing"),
        (byte_fields(tokens=None), "tokens: is missing"),
        (byte_fields(token_type=None), "token_type: is missing"),
        (byte_fields(token_type=[1]), "token_type: 1 types for"),
        (byte_fields(merges=None), "merges: is missing"),
        (byte_fields(merges=["h q"]), "merges: 'h q' is not made of"),
        (byte_fields(merges=["hq"]), "merges: 'hq' is not made of"),
        (byte_fields(merges=[3]), "merges: 3 is no str"),
        (byte_fields(merges="h e"), "merges: is no list"),
        (byte_fields(pre=None), "pre: is missing"),  # type: ignore[arg-type]
        (byte_fields("deepseek"), "pre: 'deepseek' is not known; known: default, gpt-2, llama-bpe, qwen2, smollm"),
        (byte_fields(model="bert"), "model: 'bert' is not known; known: gpt2, llama"),
        (byte_fields(tokens=["a", "a"], token_type=[1, 1]), "tokens: 'a' is there twice"),
        (byte_fields(eos_token_id=5000), "eos_token_id 5000 is outside"),
        (byte_fields(eos_token_id="2"), "eos_token_id: '2' is no int"),
        (byte_fields(add_bos_token=1), "add_bos_token: 1 is no bool"),
        (byte_fields(add_bos_token=True, bos_token_id=None), "none is named"),
        (piece_fields(scores=None), "scores: is missing"),
        (piece_fields(scores=[0.0]), "scores: 1 scores for"),
        (piece_fields(unknown_token_id=-1), "unknown_token_id: -1 is outside"),
    ],
)
def test_metadata_that_does_not_fit_says_why(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tokenizer_from_gguf(fields)
