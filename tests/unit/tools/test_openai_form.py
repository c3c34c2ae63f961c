"""What a machine finds is shown as OpenAI shows it, streamed or whole."""

from typing import Any

import pytest

from roost.tools.openai_form import delta_of, finish_reason, message_of
from tests.unit.tools.written import BY_NAME, FIND, NOW, THINKS, read, written


@pytest.mark.parametrize("name", sorted(BY_NAME))
def test_deltas_add_up_to_the_message(name: str) -> None:
    events = read(name, list("<think>hm</think>" + written(name, FIND, NOW)), reasoning=THINKS)
    added: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for delta in filter(None, map(delta_of, events)):
        for key, value in delta.items():
            if key != "tool_calls":
                added[key] += value
                continue
            ((call,),) = (value,)
            if call["index"] == len(added["tool_calls"]):
                assert call["function"]["arguments"] == ""
                added["tool_calls"].append({key: each for key, each in call.items() if key != "index"})
            else:
                added["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    message = message_of(events)
    assert message["content"] is None and message["role"] == "assistant" and message["refusal"] is None
    assert message["tool_calls"] == added["tool_calls"] and message["reasoning_content"] == "hm"
    assert [call["id"] for call in message["tool_calls"]] == ["call_0", "call_1"]


def test_an_answer_without_calls_has_its_text_alone() -> None:
    assert message_of(read("hermes", ["Hi"])) == {"role": "assistant", "content": "Hi", "refusal": None}
    assert message_of([]) == {"role": "assistant", "content": "", "refusal": None}


def test_an_output_that_ends_with_calls_says_so() -> None:
    assert finish_reason("stop", has_calls=True) == "tool_calls"
    assert finish_reason("stop", has_calls=False) == "stop"
    assert finish_reason("length", has_calls=True) == "length"
