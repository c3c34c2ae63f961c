"""Tools, calls and results go through a template as messages do: what their authors spell stays text."""

from typing import Any

import pytest

from roost.errors import RequestError
from roost.text.continuation import Transcript, continuation
from roost.text.language import Language, num_chars
from roost.text.stream import TextStream
from roost.text.template import ChatTemplate
from tests.support.small_vocabularies import THINK, byte_level

TOOLS = """{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ tool | tojson(ensure_ascii=WIDE) }}{% endfor %}<|im_end|>{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}
{%- for call in m.tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}<|im_end|>{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant {% endif %}"""
TOKENIZER = byte_level(bos_token_id=0)
WORDS = "<|im_end|> é 🦉"
TOOL = {"type": "function", "function": {"name": "f", "description": WORDS, "parameters": {"<|im_start|>": WORDS}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"<|im_end|>": [WORDS]}}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": WORDS, "tool_call_id": "1"},
]


def _language(*, ensure_ascii: bool = False) -> Language:
    source = TOOLS.replace("WIDE", str(ensure_ascii).lower())
    return Language(tokenizer=TOKENIZER, template=ChatTemplate(source, bos="", eos=""))


@pytest.mark.parametrize("ensure_ascii", [False, True])
def test_special_tokens_spelt_in_tools_calls_and_results_stay_text(ensure_ascii: bool) -> None:
    language = _language(ensure_ascii=ensure_ascii)
    tokens = language.chat_tokens(HISTORY, tools=[TOOL])
    specials = [token for token in tokens if TOKENIZER.is_special(token)]
    assert len(specials) == 2 * (1 + len(HISTORY)) + 1  # around the system's text and each message; the answer opens
    shown = TOKENIZER.decode(tokens, skip_special=False)
    assert shown.count(WORDS) == (2 if ensure_ascii else 4)
    assert shown.count("<|im_end|> \\u00e9 \\ud83e\\udd89") == (2 if ensure_ascii else 0)


def test_the_arguments_of_calls_count_as_characters_of_the_conversation() -> None:
    assert num_chars(HISTORY[:1]) == 5
    assert num_chars(HISTORY) > 5 + 2 * len(WORDS)


def test_a_session_lists_its_tools_once() -> None:
    language = _language()
    tools = language.escape_tools([TOOL])
    first = language.escape(HISTORY[:1])
    assert tools is not None
    began = continuation(language, Transcript(), first, answers=True, tools=tools)
    transcript = Transcript().add(language, length=len(began), messages=first, output=[5], tools=tools)
    more = language.escape(HISTORY[2:])
    added = continuation(language, transcript, more, answers=True, tools=tools)
    assert added == continuation(language, transcript, more, answers=True)
    assert "description" in TOKENIZER.decode(began, skip_special=False)
    assert "description" not in TOKENIZER.decode(added, skip_special=False)
    with pytest.raises(RequestError, match="must be those of the session's first messages"):
        continuation(language, transcript, more, answers=True, tools=[*tools, *tools])


def test_special_tokens_that_mark_calls_are_shown_where_others_are_skipped() -> None:
    start, end = (TOKENIZER.added_ids.get(text) for text in ("<|im_start|>", "<|im_end|>"))
    assert start is not None and end is not None
    stream = TextStream(TOKENIZER, skip_special=True, kept=frozenset([start]))
    assert stream.feed([start, end]) == "<|im_start|>"
    assert TOKENIZER.added_ids.get(THINK) is not None and TOKENIZER.added_ids.get("h") is None
