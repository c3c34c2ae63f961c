"""A tokenizer gives back what it was given, shows the bytes of its tokens, and lets no user write a special token."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Inner
from tokenizers import decoders as dec

from roost.errors import ConfigError, RequestError
from roost.text.tokenizer import Tokenizer
from tests.support.small_vocabularies import CONTROL, THINK, byte_level, sentencepiece, spelled

BYTE_LEVEL = byte_level()
SENTENCEPIECE = sentencepiece()
any_text = st.text(st.characters(exclude_categories=["Cs"]))


@given(any_text)
def test_byte_level_text_survives_the_way_there_and_back(text: str) -> None:
    assert BYTE_LEVEL.decode(BYTE_LEVEL.encode(text, special=False), skip_special=True) == text


@given(any_text.filter(lambda text: "▁" not in text))
def test_sentencepiece_text_survives_the_way_there_and_back(text: str) -> None:
    ids = SENTENCEPIECE.encode(text, special=False)
    assert SENTENCEPIECE.decode(ids, skip_special=True, at_start=True) == text


def test_text_that_continues_another_keeps_its_first_space() -> None:
    ids = SENTENCEPIECE.encode("abc", special=False)
    assert SENTENCEPIECE.decode(ids, skip_special=True) == " abc"


@pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, byte_level("llama-bpe"), SENTENCEPIECE])
@given(st.lists(st.sampled_from([*CONTROL, "<s>", "</s>", "<unk>", "<s", "s>", "/", " ", "a"])).map("".join))
def test_a_user_cannot_write_a_special_token(tokenizer: Tokenizer, text: str) -> None:
    assert not any(tokenizer.is_special(id) for id in tokenizer.encode(text, special=False))


def test_a_special_token_in_trusted_text_is_one_token() -> None:
    assert BYTE_LEVEL.encode("<|im_end|>", special=True) == [2]
    assert SENTENCEPIECE.encode("</s>", special=True) == [2]
    assert len(BYTE_LEVEL.encode("<|im_end|>", special=False)) == len("<|im_end|>")


def test_a_user_defined_token_is_one_token_for_everybody_and_not_special() -> None:
    ids = BYTE_LEVEL.encode(THINK, special=False)
    assert ids == BYTE_LEVEL.encode(THINK, special=True) == [BYTE_LEVEL.vocab_size - 1]
    assert not BYTE_LEVEL.is_special(ids[0])
    assert BYTE_LEVEL.decode(ids, skip_special=True) == THINK


def test_skipping_leaves_out_special_tokens_only() -> None:
    ids = BYTE_LEVEL.encode("<|im_start|>hello<|im_end|>", special=True)
    assert BYTE_LEVEL.decode(ids, skip_special=True) == "hello"
    assert BYTE_LEVEL.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"


def test_a_piece_is_the_bytes_of_its_token() -> None:
    owl = BYTE_LEVEL.encode("🦉", special=False)
    assert [BYTE_LEVEL.piece(id) for id in owl] == ["🦉".encode()[:2], "🦉".encode()[2:3], "🦉".encode()[3:]]
    assert BYTE_LEVEL.piece(2) == b"<|im_end|>"
    assert [SENTENCEPIECE.piece(id) for id in SENTENCEPIECE.encode("abcé", special=False)] == [
        b" abc",
        b"\xc3",
        b"\xa9",
    ]
    assert [BYTE_LEVEL.piece(id) for id in (-1, BYTE_LEVEL.vocab_size)] == [b"", b""]  # embeddings may be padded


def test_only_a_plain_prompt_gets_a_first_token_and_only_if_the_model_wants_one() -> None:
    wants = byte_level(add_bos_token=True)
    assert wants.encode_prompt("he") == [1, *wants.encode("he", special=False)]
    assert BYTE_LEVEL.encode_prompt("he") == BYTE_LEVEL.encode("he", special=False)


def test_text_that_is_no_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode at character 1"):
        BYTE_LEVEL.encode("a\ud800", special=False)


def _inner() -> Inner:
    alphabet = [spelled(bytes([byte])) for byte in range(256)]
    vocab = {char: id for id, char in enumerate(alphabet)} | {"end": 256}
    inner = Inner(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    inner.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\s"), behavior="isolated"), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    inner.decoder = dec.ByteLevel()
    inner.add_special_tokens([AddedToken(token, normalized=False) for token in ("<bos>", "<eos>", "<eot>")])
    return inner


def _folder(path: Path, inner: Inner, **files: object) -> Path:
    (path / "tokenizer.json").write_text(inner.to_str())
    for name, value in files.items():
        (path / f"{name}.json").write_text(json.dumps(value))
    return path


def test_a_folder_says_what_ends_an_output(tmp_path: Path) -> None:
    settings = {"bos_token": {"content": "<bos>"}, "eos_token": "<eos>", "add_bos_token": True}
    path = _folder(tmp_path, _inner(), tokenizer_config=settings, config={"eos_token_id": 258})
    tokenizer = Tokenizer.from_folder(path)
    assert (tokenizer.bos_id, tokenizer.eos_ids, tokenizer.adds_bos) == (257, {258}, True)
    assert tokenizer.vocab_size == 260
    _folder(path, _inner(), generation_config={"eos_token_id": [258, 259]})
    assert Tokenizer.from_folder(path).eos_ids == {258, 259}


def test_the_end_of_a_text_part_beside_images_is_read_from_its_own_config(tmp_path: Path) -> None:
    nested = {"text_config": {"eos_token_id": 259}}
    path = _folder(tmp_path, _inner(), tokenizer_config={"eos_token": "<eos>"}, config=nested)
    assert Tokenizer.from_folder(path).eos_ids == {258, 259}


def test_a_folder_whose_own_rule_adds_the_first_token_wants_one(tmp_path: Path) -> None:
    inner = _inner()
    inner.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 257)])
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, inner, tokenizer_config={"bos_token": "<bos>"}))
    assert tokenizer.encode_prompt("a")[0] == 257
    assert tokenizer.encode("a", special=True) == [tokenizer.encode_prompt("a")[1]]


def test_a_word_that_could_only_be_read_as_a_special_token_is_refused(tmp_path: Path) -> None:
    path = _folder(tmp_path, _inner(), tokenizer_config={"eos_token": "end"})
    tokenizer = Tokenizer.from_folder(path)  # whole words are tokens here, and "end" is one
    assert tokenizer.eos_ids == {256}
    with pytest.raises(RequestError, match="special token"):
        tokenizer.encode("the end", special=False)


def test_merges_that_would_make_a_special_token_make_none_of_a_users_text(tmp_path: Path) -> None:
    vocab = {token: id for id, token in enumerate(["<unk>", "<s>", "<", "s", ">", "s>", "▁"])}
    inner = Inner(models.BPE(vocab=vocab, merges=[("s", ">"), ("<", "s>")], unk_token="<unk>", byte_fallback=True))
    inner.add_special_tokens(["<unk>"])
    inner.normalizer = normalizers.Replace(" ", "▁")
    inner.decoder = dec.Sequence([dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse()])
    tokenizer = Tokenizer.from_folder(_folder(tmp_path, inner, tokenizer_config={"bos_token": "<s>"}))
    assert tokenizer.encode(" <s>", special=False) == [vocab["▁"], vocab["<"], vocab["s>"]]
    assert tokenizer.encode("<s>", special=True) == [vocab["<s>"]]
    assert tokenizer.encode("?", special=False) == [vocab["<unk>"]]  # what it does not know is no forgery


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{", "cannot read"),
        ("tokenizer.json", '{"model": {"type": "Unigram"}}', "model Unigram is not known; known: BPE"),
        ("tokenizer.json", '{"model": {"type": "BPE"}, "decoder": {"type": "CTC"}}', "decoder .*CTC.* is not known"),
        ("tokenizer.json", '{"model": {"type": "BPE"}, "decoder": {"type": "ByteLevel"}}', "cannot use"),
        ("tokenizer_config.json", '{"eos_token": "<nothing>"}', "eos_token '<nothing>' is not in the vocabulary"),
        ("tokenizer_config.json", "[]", "holds no JSON object"),
        ("tokenizer_config.json", '{"add_bos_token": true}', "none is named"),
        ("config.json", '{"eos_token_id": "x"}', "neither a number nor a list"),
        ("config.json", '{"eos_token_id": 1000}', "outside of its vocabulary of 260"),
    ],
)
def test_a_folder_that_does_not_fit_says_why(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    _folder(tmp_path, _inner())
    (tmp_path / name).unlink(missing_ok=True)
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        Tokenizer.from_folder(tmp_path)
