"""Formats of tool calls: the list of them, and which one a chat template writes.

A template is asked, not searched: it renders a conversation with a call in it, and the format whose reader finds that
call again is the model's. A new format is one file and one more entry in `FORMATS`. Read by the configuration and by
tools.model_formats.
"""

from collections.abc import Callable, Sequence
from typing import Any

from roost.errors import RequestError
from roost.tools.definitions import Tool
from roost.tools.events import CallArguments, CallOpened
from roost.tools.format import ToolFormat
from roost.tools.hermes import HERMES
from roost.tools.llama_json import LLAMA_JSON
from roost.tools.llama_pythonic import LLAMA_PYTHONIC
from roost.tools.machine import Machine
from roost.tools.mistral import MISTRAL, MISTRAL_ARGS
from roost.tools.qwen_coder import QWEN_CODER
from roost.tools.reasoning import ReasoningTags

Render = Callable[..., str]  # ChatTemplate.render

DESCRIBED = "described"  # of --tool-format: the template knows no tools, so a system text lists them
DETECTED = "auto"  # of --tool-format: what the template writes, or DESCRIBED
FORMATS: tuple[ToolFormat, ...] = (
    HERMES,
    QWEN_CODER,
    MISTRAL,
    MISTRAL_ARGS,
    LLAMA_JSON,
    LLAMA_PYTHONIC,
)

_CITY, _WORDS, _QUESTION, _RESULT = "Reykjavik", "Looks at the sky", "Will it rain?", "It will rain."
PROBE = Tool(
    name="look_outside",
    description=_WORDS,
    parameters={"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
)
_ASKED = {"role": "user", "content": _QUESTION}
_CALL = {"id": "probe0123", "type": "function", "function": {"name": PROBE.name, "arguments": {"city": _CITY}}}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOLD = {"role": "tool", "name": PROBE.name, "tool_call_id": "probe0123", "content": _RESULT}


def tool_format_names() -> tuple[str, ...]:
    """What --tool-format may be."""
    return (DETECTED, DESCRIBED, *(format.name for format in FORMATS))


def lists_tools(render: Render) -> bool:
    """Whether a template tells the model of tools."""
    text = rendered(render, [_ASKED], tools=[PROBE.definition()])
    return text is not None and PROBE.name in text and _WORDS in text


def detect(render: Render, formats: Sequence[ToolFormat] = FORMATS) -> ToolFormat | None:
    """The format in which a template writes calls; None if it lists no tools, or writes calls as no format does."""
    if not lists_tools(render):
        return None
    tools = [PROBE.definition()]
    before = rendered(render, [_ASKED], tools=tools, add_generation_prompt=True) or _QUESTION
    histories: list[list[dict[str, Any]]] = [[_ASKED, _CALLED, _TOLD], [_ASKED, _CALLED]]
    for history in histories:
        text = rendered(render, history, tools=tools) or ""
        answer = text.rpartition(before.rstrip())[2]  # some write other whitespace before a call than before an answer
        for format in formats:
            if _finds_the_call(format, answer):
                return format
    return None


def takes_several_calls(render: Render) -> bool:
    """Whether a template writes an answer with two calls; some take one at a time."""
    called = {**_CALLED, "tool_calls": [_CALL, {**_CALL, "id": "probe0124"}]}
    return rendered(render, [_ASKED, called], tools=[PROBE.definition()]) is not None


def rendered(render: Render, messages: list[dict[str, Any]], **options: Any) -> str | None:
    """What a template writes; None if it refuses."""
    try:
        return render(messages, **{"add_generation_prompt": False, **options})
    except RequestError:
        return None


def _finds_the_call(format: ToolFormat, text: str) -> bool:
    tags = ReasoningTags(begin="<think>", end="</think>", is_open=False)  # some templates write an empty thought first
    machine = Machine(format=format, tools=[PROBE], new_id=lambda: "", reasoning=tags)
    events = [*machine.feed(text), *machine.end()]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    opened = [event.name for event in events if isinstance(event, CallOpened)]
    return opened == [PROBE.name] and _CITY in arguments
