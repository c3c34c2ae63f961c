"""Tools, and calls of them as each format writes them."""

import json
from collections.abc import Sequence
from typing import Any

from roost.tools.definitions import Tool, ToolRequest, read_tools
from roost.tools.events import CallArguments, CallClosed, CallOpened, Content, Reasoning, ToolEvent
from roost.tools.format import ToolFormat
from roost.tools.machine import Machine, joined
from roost.tools.reasoning import ReasoningTags
from roost.tools.registry import FORMATS

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer"},
        "text": {"type": "string"},
        "flag": {"type": "boolean"},
        "one": {"enum": ["x y", 3, None]},
    },
    "required": ["count"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "find", "description": "Finds.", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "now-2"}},
]
BY_NAME: dict[str, ToolFormat] = {format.name: format for format in FORMATS}
THINKS = ReasoningTags(begin="<think>", end="</think>", is_open=False)
THINKS_AT_ONCE = ReasoningTags(begin="<think>", end="</think>", is_open=True)

Call = tuple[str, dict[str, Any]]
FIND: Call = ("find", {"count": 12, "text": 'it\'s "<b>" \\ é\n🦉', "flag": True, "one": "x y"})
NOW: Call = ("now-2", {})


def request(choice: object = None, *, parallel: bool = True, tools: object = None) -> ToolRequest:
    """What a request says of tools."""
    found = read_tools(TOOLS if tools is None else tools, choice, parallel)
    assert found is not None
    return found


def written(format: str, *calls: Call) -> str:
    """Calls as the models of a format write them."""
    match format:
        case "hermes":
            return "\n".join(f"<tool_call>\n{_json(call, 'arguments')}\n</tool_call>" for call in calls)
        case "qwen3-coder":
            return "\n".join(map(_tags, calls))
        case "mistral":
            return f"[TOOL_CALLS][{', '.join(_json(call, 'arguments') for call in calls)}]"
        case "mistral-args":
            return "".join(f"[TOOL_CALLS]{name}[ARGS]{_dumped(arguments)}" for name, arguments in calls)
        case "llama3-json":
            return "; ".join(_json(call, "parameters") for call in calls)
    return f"[{', '.join(map(_python, calls))}]"


def read(
    format: str | None,
    pieces: Sequence[str],
    *,
    tools: Sequence[Tool] | None = None,
    reasoning: ReasoningTags | None = None,
) -> list[ToolEvent]:
    """What a machine finds."""
    numbers = iter(range(1000))
    machine = Machine(
        format=None if format is None else BY_NAME[format],
        tools=request().callable if tools is None else tools,
        new_id=lambda: f"call_{next(numbers)}",
        reasoning=reasoning,
    )
    events = [event for piece in pieces for event in machine.feed(piece)]
    return joined([*events, *machine.end()])


def content(events: Sequence[ToolEvent]) -> str:
    """The content in these events."""
    return "".join(event.text for event in events if isinstance(event, Content))


def thought(events: Sequence[ToolEvent]) -> str:
    """The reasoning in these events."""
    return "".join(event.text for event in events if isinstance(event, Reasoning))


def calls(events: Sequence[ToolEvent]) -> list[tuple[str, str, bool]]:
    """Name, arguments' text and completeness of each call; also checks the order of events."""
    found: list[tuple[str, str, bool]] = []
    is_open = False
    for event in events:
        if isinstance(event, CallOpened):
            assert not is_open and event.index == len(found)
            found.append((event.name, "", False))
            is_open = True
        elif isinstance(event, CallArguments):
            assert is_open and event.index == len(found) - 1
            found[-1] = (found[-1][0], found[-1][1] + event.text, False)
        elif isinstance(event, CallClosed):
            assert is_open and event.index == len(found) - 1
            found[-1] = (*found[-1][:2], event.is_complete)
            is_open = False
    assert not is_open
    return found


def complete(events: Sequence[ToolEvent]) -> list[Call]:
    """The calls, all of them complete."""
    assert all(is_complete for *_, is_complete in calls(events))
    return [(name, json.loads(arguments)) for name, arguments, _ in calls(events)]


def _dumped(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _json(call: Call, key: str) -> str:
    return f'{{"name": "{call[0]}", "{key}": {_dumped(call[1])}}}'


def _tags(call: Call) -> str:
    lines = ["<tool_call>", f"<function={call[0]}>"]
    for key, value in call[1].items():
        lines += [f"<parameter={key}>", value if isinstance(value, str) else _dumped(value), "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def _python(call: Call) -> str:
    plain = {key: str(value) if isinstance(value, bool | None) else _dumped(value) for key, value in call[1].items()}
    return f"{call[0]}({', '.join(f'{key}={value}' for key, value in plain.items())})"
