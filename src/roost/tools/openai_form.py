"""Events as OpenAI's API shows them: deltas of a stream, a whole message, the reason why an output ended.

The one place that knows these shapes. Called by the server and the library.
"""

from collections.abc import Iterable
from typing import Any

from roost.tools.events import CallArguments, CallClosed, CallOpened, Content, Reasoning, ToolEvent


def delta_of(event: ToolEvent) -> dict[str, Any] | None:
    """What an event adds to a stream; None if nothing."""
    match event:
        case Content(text=text):
            return {"content": text}
        case Reasoning(text=text):
            return {"reasoning_content": text}
        case CallOpened(index=index):
            return {"tool_calls": [{"index": index, **_call(event, "")}]}
        case CallArguments(index=index, text=text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
        case CallClosed():
            return None


def message_of(events: Iterable[ToolEvent]) -> dict[str, Any]:
    """A whole answer; content is null if there are calls and nothing else."""
    content, thought, calls = "", "", list[dict[str, Any]]()
    for event in events:
        match event:
            case Content(text=text):
                content += text
            case Reasoning(text=text):
                thought += text
            case CallOpened():
                calls.append(_call(event, ""))
            case CallArguments(index=index, text=text):
                calls[index]["function"]["arguments"] += text
            case CallClosed():
                pass
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else ""), "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return message


def finish_reason(reason: str, *, has_calls: bool) -> str:
    """OpenAI's word for why an output ended; `has_calls`: it has calls, and all of them are complete."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def _call(opened: CallOpened, arguments: str) -> dict[str, Any]:
    return {"id": opened.id, "type": "function", "function": {"name": opened.name, "arguments": arguments}}
