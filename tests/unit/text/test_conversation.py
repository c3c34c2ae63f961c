"""Whole conversations as tokens: answers keep the tokens that the model gave them, wherever the template lets them."""

from typing import Any

import pytest

from roost.text.conversation import OwnAnswer, TextMemo, conversation_tokens
from roost.text.language import Language
from tests.support.chat_templates import GEMMA, LLAMA3, LLAMA31, MISTRAL, QWEN25
from tests.unit.text.test_continuation import LLAMA2, language
from tests.unit.text.test_template import CHAT

MEMO = TextMemo()
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' %}{{ m.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ m.content }}{% endif %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


TEMPLATES = {
    "chatml": CHAT,
    "llama3": LLAMA3,
    "llama31": LLAMA31,
    "gemma": GEMMA,
    "mistral": MISTRAL,
    "qwen25": QWEN25,
    "llama2": LLAMA2,
}


def turns(number: int) -> list[dict[str, Any]]:
    """A conversation whose last message is a user's."""
    said = [
        ("user", f"What is {place}?") if place % 2 == 0 else ("assistant", f"hello {place}.") for place in range(number)
    ]
    return [{"role": role, "content": content} for role, content in said]


def split_up(spoken: Language, text: str) -> tuple[int, ...]:
    """A text in other tokens than its usual ones: one for each character, and the end of a turn."""
    ids = [token for char in text for token in spoken.tokenizer.encode(char, special=False)]
    return (*ids, spoken.tokenizer.encode("<|im_end|>", special=True)[0])


@pytest.mark.parametrize("name", TEMPLATES)
def test_without_known_answers_it_is_what_a_chat_is(name: str) -> None:
    spoken = language(TEMPLATES[name])
    messages = turns(5)
    assert conversation_tokens(spoken, spoken.escape(messages), {}, MEMO) == spoken.chat_tokens(messages)


@pytest.mark.parametrize("name", TEMPLATES)
def test_an_answer_keeps_its_own_tokens_and_the_text_is_the_same(name: str) -> None:
    spoken, messages = language(TEMPLATES[name]), turns(5)
    own = {1: OwnAnswer(tokens=split_up(spoken, "hello 1."))}
    tokens = conversation_tokens(spoken, spoken.escape(messages), own, MEMO)
    usual = spoken.chat_tokens(messages)
    assert tokens != usual
    shown = [spoken.tokenizer.decode(each, skip_special=False).replace(" ", "") for each in (tokens, usual)]
    assert shown[0] == shown[1]
    start = tokens.index(own[1].tokens[0])
    assert any(tokens[at : at + len(own[1].tokens)] == own[1].tokens for at in range(start, len(tokens)))


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_conversation_that_goes_on_begins_as_it_was(name: str) -> None:
    spoken = language(TEMPLATES[name])
    own: dict[int, OwnAnswer] = {}
    before: tuple[int, ...] = ()
    for number in range(1, 9, 2):
        tokens = conversation_tokens(spoken, spoken.escape(turns(number)), own, MEMO)
        assert tokens[: len(before)] == before
        own[number] = OwnAnswer(tokens=split_up(spoken, f"hello {number}."))
        before = tokens + own[number].tokens


def test_an_answer_that_was_cut_off_is_ended_by_the_template() -> None:
    spoken = language(CHAT)
    cut = split_up(spoken, "hello 1.")[:-1]
    tokens = conversation_tokens(spoken, spoken.escape(turns(3)), {1: OwnAnswer(tokens=cut)}, MEMO)
    whole = conversation_tokens(
        spoken, spoken.escape(turns(3)), {1: OwnAnswer(tokens=split_up(spoken, "hello 1."))}, MEMO
    )
    assert tokens == whole


def test_what_a_template_drops_of_an_answer_is_not_kept() -> None:
    spoken = language(THINKING)
    thought = "<think>hm</think>\nhello 1."
    messages = turns(3)
    messages[1]["content"] = thought
    own = OwnAnswer(tokens=split_up(spoken, thought), has_reasoning=True)
    tokens = conversation_tokens(spoken, spoken.escape(messages), {1: own}, MEMO)
    assert "hm" not in spoken.tokenizer.decode(tokens, skip_special=False)
    assert tokens == spoken.chat_tokens(messages)


def test_a_memo_gives_what_the_tokenizer_gives_and_forgets_what_was_not_used() -> None:
    memo = TextMemo(chars_max=10)
    encoded: list[str] = []

    class Counting:
        def text_tokens(self, text: str, *, after: int | None, tokens_max: int | None) -> tuple[int, ...]:
            encoded.append(text)
            return (len(text), after or 0)

    language: Any = Counting()
    for text, after in (("abcd", None), ("abcd", 2), ("abcd", None), ("xyz", None), ("abcd", None), ("abcd", 2)):
        assert memo.tokens(language, text, after, None) == (len(text), after or 0)
    assert encoded == ["abcd", "abcd", "xyz", "abcd"]  # the one after a special token had to go
