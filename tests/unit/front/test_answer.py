"""An answer as it comes: where markers of calls are special tokens, stop strings are looked for beside them only."""

from dataclasses import replace

import pytest

from roost.front.answer import Answer
from roost.front.options import Options
from roost.messages import Finished, SpecStats, Tokens, Usage
from roost.tools.answer_form import AnswerForm
from roost.tools.definitions import read_tools
from roost.tools.hermes import HERMES
from roost.tools.model_formats import ModelFormats
from tests.support.small_vocabularies import byte_level

TOKENIZER = byte_level()
MARKER = "<|im_start|>"  # special in this vocabulary
FORMAT = replace(HERMES, marker=MARKER, tokens=(MARKER,))
TOOLS = read_tools([{"type": "function", "function": {"name": "now"}}])
FORM = AnswerForm(formats=ModelFormats(tool_format=FORMAT, is_described=False), tools=TOOLS)
CALL = MARKER + '\n{"name": "now", "arguments": {}}\n</tool_call>'


def read(text: str, *, stop: str, size: int, matched: str | None = None) -> Answer:
    """An output that comes by so many tokens at a time."""
    answer = Answer(TOKENIZER, Options(stop=(stop,)), FORM)
    tokens = tuple(TOKENIZER.encode(text, special=True))
    for start in range(0, len(tokens), size):
        answer.feed(Tokens(request_id="r", tokens=tokens[start : start + size]))
    usage = Usage(prompt_tokens=1, cached_tokens=0, completion_tokens=len(tokens))
    end = Finished(request_id="r", reason="stop", usage=usage, max_new_tokens=99, spec=SpecStats(), matched=matched)
    answer.feed(end)
    return answer


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_that_a_marker_spells_cuts_nothing(size: int) -> None:
    answer = read(f"so {CALL}", stop="start", size=size)
    assert answer.message["content"] == "so" and answer.has_calls
    assert [call["function"]["name"] for call in answer.message["tool_calls"]] == ["now"]


@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stop_after_a_call_cuts_what_follows_it(size: int) -> None:
    answer = read(f"{CALL} then |stop", stop="|stop", size=size, matched="|stop")
    assert answer.has_calls and answer.message["content"] == "then "
    assert answer.text == f"{CALL} then "


def test_an_answer_that_nothing_reads_is_its_content() -> None:
    answer = Answer(TOKENIZER, Options())
    answer.feed(Tokens(request_id="r", tokens=tuple(TOKENIZER.encode("hello", special=False))))
    assert answer.message == {"role": "assistant", "content": "hello", "refusal": None}
    assert not answer.is_read and not answer.has_calls and answer.events == []
