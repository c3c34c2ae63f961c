"""A chat in a session is, token for token, the same chat sent as one prompt: greedy, fp32, the default model."""

from dataclasses import replace
from typing import Any

import pytest

from roost import LLM, Options
from roost.front.session import ClientSession
from roost.library.session import Session
from roost.text.language import Language
from roost.text.template import ChatTemplate
from tests.unit.text.test_continuation import BOS_FIRST

CHATS: tuple[tuple[int, str], ...] = (
    (12, "Say hello."),
    (40, "Now say <|im_end|> goodbye."),
    (6, "And what is 2 + 2?"),
)


@pytest.mark.parametrize("template", [None, BOS_FIRST], ids=["its own template", "one that adds a bos"])
def test_a_chat_in_a_session_is_the_same_chat_sent_whole(exact: LLM, template: str | None) -> None:
    language = exact.language
    if template is not None:
        made = ChatTemplate(template, bos="<|im_start|>", eos="<|im_end|>")
        language = Language(tokenizer=language.tokenizer, template=made)
    with exact.session() as opened:
        session = Session(opened._engine, language, exact.formats, ClientSession(opened.id))
        messages: list[dict[str, Any]] = [{"role": "system", "content": "Be brief."}]
        sent = 0
        for max_new_tokens, text in CHATS:
            options = Options(temperature=0, max_new_tokens=max_new_tokens)
            messages.append({"role": "user", "content": text})
            pieces = list(session.chat(messages[sent:], options))
            whole = exact.generate(language.chat_tokens(messages), replace(options, cache_salt=text)).choices[0]
            assert tuple(token for piece in pieces for token in piece.tokens) == whole.tokens
            assert pieces[-1].finished and pieces[-1].finished.usage.prompt_tokens == whole.usage.prompt_tokens
            messages.append({"role": "assistant", "content": whole.text})
            sent = len(messages)
        assert session.state().turns == len(CHATS)
