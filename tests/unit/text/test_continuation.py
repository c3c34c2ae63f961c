"""A session's next messages add exactly what one long conversation would have there."""

from datetime import datetime
from typing import Any

import pytest

from roost.errors import RequestError
from roost.text.continuation import Transcript, continuation
from roost.text.language import Language
from roost.text.template import ChatTemplate
from tests.support.small_vocabularies import byte_level, sentencepiece
from tests.unit.text.test_template import CHAT

SYSTEM = {"role": "system", "content": "be <|im_end|> brief"}
HELLO = {"role": "user", "content": "hello"}
MORE = {"role": "user", "content": " and <|im_start|> more\n"}
EARLIER = {"role": "assistant", "content": "said before"}
BOS_FIRST = "{{ bos_token }}" + CHAT.strip()
GEMMA = """{{ bos_token }}{%- if messages[0].role == 'system' -%}{%- set first = messages[0].content + '\n\n' -%}
{%- set rest = messages[1:] -%}{%- else -%}{%- set first = '' -%}{%- set rest = messages -%}{%- endif -%}
{%- for m in rest -%}<|im_start|>{{ 'model' if m.role == 'assistant' else m.role }}
{{ (first if loop.first else '') + m.content | trim }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>model
{% endif %}"""
# what the system says moves to the last message of a user
MOVING = """{% for m in messages if m.role != 'system' %}[{{ m.role }}]
{%- if loop.last %}{{ messages[0].content }} {% endif %}{{ m.content }}<|im_end|>{% endfor %}"""
LLAMA2 = """{% for m in messages %}{% if m.role == 'user' %}{{ bos_token + '[' + m.content + ']' }}
{%- else %}{{ ' ' + m.content + ' ' + eos_token }}{% endif %}{% endfor %}"""


def language(source: str) -> Language:
    """A vocabulary with a template."""
    tokenizer = byte_level(bos_token_id=0)
    template = ChatTemplate(source, bos="<|endoftext|>", eos="<|im_end|>", now=lambda: datetime(2024, 2, 29))
    return Language(tokenizer=tokenizer, template=template)


class Held:
    """A session as the engine would hold it: tokens, and the transcript beside them."""

    def __init__(self, language: Language) -> None:
        self.language = language
        self.tokens: list[int] = []
        self.transcript = Transcript()

    def append(self, *messages: dict[str, Any]) -> None:
        """New messages without an answer."""
        self._add(messages, None)

    def answer(self, *messages: dict[str, Any], text: str, end: str = "<|im_end|>") -> None:
        """New messages, and what the model says to them."""
        self._add(messages, self.language.tokenizer.encode(text + end, special=True))

    def _add(self, messages: tuple[dict[str, Any], ...], output: list[int] | None) -> None:
        escaped = self.language.escape(messages)
        self.tokens += continuation(self.language, self.transcript, escaped, answers=output is not None)
        self.tokens += output or []
        self.transcript = self.transcript.add(self.language, length=len(self.tokens), messages=escaped, output=output)


def said(text: str) -> dict[str, str]:
    """What the model said, as a message."""
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize("source", [CHAT, BOS_FIRST, GEMMA], ids=["chatml", "bos first", "gemma"])
@pytest.mark.parametrize("first", [(HELLO,), (SYSTEM, HELLO), (SYSTEM, HELLO, EARLIER, MORE)])
@pytest.mark.parametrize("end", ["<|im_end|>", ""], ids=["ended", "cut by length"])
def test_turns_make_the_tokens_of_one_conversation(source: str, first: tuple[dict[str, Any], ...], end: str) -> None:
    held = Held(language(source))
    held.answer(*first, text="fine 12", end=end)
    held.answer(MORE, text="123", end=end)
    held.append(HELLO)
    whole = [*first, said("fine 12"), MORE, said("123"), HELLO]
    assert tuple(held.tokens) == held.language.chat_tokens(whole, add_generation_prompt=False)
    held.answer(text="hell")
    assert tuple(held.tokens) == (
        *held.language.chat_tokens(whole, add_generation_prompt=True),
        *held.language.tokenizer.encode("hell<|im_end|>", special=True),
    )
    assert held.tokens.count(0) == (0 if source is CHAT else 1)


@pytest.mark.parametrize("source", [CHAT, BOS_FIRST, GEMMA], ids=["chatml", "bos first", "gemma"])
def test_messages_appended_one_by_one_are_those_appended_together(source: str) -> None:
    held = Held(language(source))
    for message in (SYSTEM, HELLO, EARLIER, MORE):
        held.append(message)
    whole = held.language.chat_tokens([SYSTEM, HELLO, EARLIER, MORE], add_generation_prompt=False)
    assert tuple(held.tokens) == whole


def test_an_answer_that_goes_on_is_one_answer() -> None:
    held = Held(language(CHAT))
    held.answer(HELLO, text="fine", end="")
    held.answer(text=" 12")
    held.answer(MORE, text="x")
    whole = held.language.chat_tokens([HELLO, said("fine 12"), MORE])
    assert tuple(held.tokens[: len(whole)]) == whole


def test_a_turn_without_output_leaves_an_open_answer() -> None:
    held = Held(language(CHAT))
    held.answer(HELLO, text="", end="")
    held.answer(text="", end="")
    held.answer(text="x")
    held.append(MORE)
    whole = held.language.chat_tokens([HELLO, said("x"), MORE], add_generation_prompt=False)
    assert tuple(held.tokens) == whole


def test_a_space_that_a_template_puts_before_the_end_is_not_put_after_it() -> None:
    tokenizer = sentencepiece()
    template = ChatTemplate(LLAMA2, bos="<s>", eos="</s>")
    held = Held(Language(tokenizer=tokenizer, template=template))
    held.answer({"role": "user", "content": "ab"}, text="c", end="</s>")
    before = len(held.tokens)
    held.append({"role": "user", "content": "ca"})
    assert tokenizer.decode(held.tokens[before:], skip_special=False).replace(" ", "") == "<s>[ca]"


def test_a_template_that_rewrites_what_was_said_is_refused_with_the_reason() -> None:
    held = Held(language(MOVING))
    held.append(SYSTEM, HELLO)
    with pytest.raises(RequestError, match="earlier messages differently when later ones follow") as refused:
        held.append(MORE)
    assert (refused.value.status, refused.value.param) == (400, "messages")


def test_messages_do_not_follow_plain_text() -> None:
    spoken = language(CHAT)
    plain = Transcript().add(spoken, length=3, messages=None, output=None)
    with pytest.raises(RequestError, match="the session holds plain text or ids"):
        continuation(spoken, plain, spoken.escape([HELLO]), answers=True)


def test_a_cut_transcript_is_the_one_of_its_last_whole_turn() -> None:
    held = Held(language(CHAT))
    held.answer(HELLO, text="fine")
    one, length = held.transcript, len(held.tokens)
    held.answer(MORE, text="12")
    held.append(HELLO)
    assert held.transcript.cut(length, 1) is one
    assert held.transcript.cut(0, 0).all_messages() == []
    middle = held.transcript.cut(length + 2, 1)
    assert (middle.length, middle.num_turns, middle.is_chat) == (length + 2, 1, False)
    assert middle.add(held.language, length=length + 5, messages=None, output=None).cut(length, 1) is one


def test_forks_share_what_was_said_and_nothing_else() -> None:
    held = Held(language(CHAT))
    held.answer(HELLO, text="fine")
    other = Held(held.language)
    other.tokens, other.transcript = list(held.tokens), held.transcript
    held.answer(MORE, text="12")
    other.append(HELLO)
    assert tuple(other.tokens) == held.language.chat_tokens([HELLO, said("fine"), HELLO], add_generation_prompt=False)
    assert len(held.transcript.all_messages()) == 4
