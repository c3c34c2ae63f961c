"""What a user writes stays what it is on its way through a template, whatever characters and spellings are in it."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as Inner
from tokenizers import decoders as dec
from tokenizers import models, pre_tokenizers

from roost.errors import RequestError
from roost.text.escaping import ANSWER_MARK, Escaper
from roost.text.language import Language
from roost.text.template import ChatTemplate
from roost.text.tokenizer import Tokenizer
from tests.support.small_vocabularies import CONTROL, THINK, byte_level, piece_fields, sentencepiece
from tests.unit.text.test_continuation import Held
from tests.unit.text.test_template import CHAT

BYTE_LEVEL = byte_level(bos_token_id=0)
CHATML = Language(tokenizer=BYTE_LEVEL, template=ChatTemplate(CHAT, bos="<|endoftext|>", eos="<|im_end|>"))
private = [chr(first + offset) for first in (0xE000, 0xF0000, 0x100000) for offset in (0, 1, 2, 3, 16, 17)]
spellings = [*CONTROL, THINK, "<|im_", "end|>", "<", "|>", "<|im_<|im_end|>end|>"]
odd = [*private, "\U000ffffd", "\U0010fffd", "\U0010ffff", "\ud7ff", "\ue000", "\ufffd", "\x00", "é", "🦉", " ", "\n"]
any_text = st.lists(
    st.one_of(st.sampled_from(spellings), st.sampled_from(odd), st.text(st.characters(exclude_categories=["Cs"])))
).map("".join)


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@given(text=any_text)
def test_a_users_text_stays_text_character_by_character(text: str) -> None:
    tokens = CHATML.chat_tokens([_user(text)])
    start = CHATML.chat_tokens([_user("")])
    shown = BYTE_LEVEL.decode(tokens, skip_special=False)
    around = BYTE_LEVEL.decode(start, skip_special=False)
    head, tail = around[: around.index("user\n") + 5], around[around.index("user\n") + 5 :]
    assert shown == head + text + tail
    assert [each for each in tokens if BYTE_LEVEL.is_special(each)] == [each for each in start if each < len(CONTROL)]


@given(texts=st.lists(any_text, min_size=1, max_size=3), answer=any_text)
def test_a_users_text_stays_text_in_every_turn_of_a_session(texts: list[str], answer: str) -> None:
    held, whole = Held(CHATML), []
    for text in texts:
        held._add((_user(text),), BYTE_LEVEL.encode(answer, special=False))
        whole += [_user(text), {"role": "assistant", "content": answer}]
    held.append(_user("bye"))
    shown = BYTE_LEVEL.decode(held.tokens, skip_special=False)
    assert shown == BYTE_LEVEL.decode(
        CHATML.chat_tokens([*whole, _user("bye")], add_generation_prompt=False), skip_special=False
    )


@given(text=any_text, special=st.lists(st.sampled_from(["<s>", "s>", "a", "ab", "<|x|>", "|>", "é", "<s"]), max_size=4))
def test_an_escaped_text_spells_no_special_token_and_is_found_again(text: str, special: list[str]) -> None:
    escaper = Escaper(special)
    escaped = escaper.escape(text)
    assert escaper.unescape(escaped) == text and len(escaped) == len(text)
    assert not any(each in escaped for each in special)


def test_a_long_text_is_escaped_like_a_short_one_wherever_it_is_looked_through() -> None:
    text = "<|im_end|>" * 20_000 + "<|im_"
    escaped = BYTE_LEVEL.escaper.escape(text)
    assert escaped == BYTE_LEVEL.escaper.escape("<|im_end|>") * 20_000 + "<|im_"


@pytest.mark.parametrize(
    "message", [_user("a\ud800"), _user(ANSWER_MARK), {"role": "user", "\udfff": "x", "content": ""}]
)
def test_half_of_a_surrogate_pair_is_refused_and_never_read_as_a_mark(message: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match="messages: not valid Unicode") as refused:
        CHATML.chat_tokens([message])
    assert refused.value.status == 400


def test_a_text_that_spells_a_special_token_gets_no_space_that_others_do_not_get() -> None:
    fields = piece_fields()
    tokens = fields["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    inner = Inner(models.BPE({token: id for id, token in enumerate(tokens)}, [], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    inner.decoder = dec.Sequence([dec.Replace("▁", " "), dec.ByteFallback(), dec.Fuse()])
    inner.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer = Tokenizer(inner, spelling="sentencepiece", eos_ids=[2], bos_id=1)
    template = ChatTemplate(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", bos="<s>", eos="</s>"
    )
    language = Language(tokenizer=tokenizer, template=template)
    plain, spelt = (language.chat_tokens([_user(text), _user("c")]) for text in ("ab<>", "ab<s>"))
    shown = [re.sub("^<s>", "", tokenizer.decode(each, skip_special=False)) for each in (plain, spelt)]
    assert shown == ["ab<></s>c</s>", "ab<s></s>c</s>"]
    assert [language.tokenizer.is_special(each) for each in spelt].count(True) == 3


def test_a_vocabulary_without_special_tokens_escapes_nothing() -> None:
    assert Escaper([]).escape("<s>") == "<s>"
    assert json.loads(sentencepiece().to_json())["spelling"] == "sentencepiece"
