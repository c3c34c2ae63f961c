"""Calls and results in a conversation's history: checked, and written as the model's template wants them.

Arguments come as JSON texts and go to templates as objects. For a template that knows no tools, calls and results
become plain messages, and a system text lists the tools. Never renders. Called by tools.model_formats.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from roost.errors import RequestError
from roost.tools.definitions import NAME, Tool, check_depth
from roost.tools.hermes import written_call
from roost.values import shown

Message = dict[str, Any]

SYSTEM_TEXT = """# Tools

You may call one or more functions to help with the user's question.
Their signatures are between <tools> and </tools>, one in a line:
<tools>
{tools}
</tools>

To call a function, write its name and its arguments as JSON between <tool_call> and </tool_call>:
<tool_call>
{{"name": "...", "arguments": {{...}}}}
</tool_call>"""
RESULT_TEXT = "The function{name} returned:\n{content}\n\n"
AFTER_RESULTS = "Now answer my question in plain words, or call another function."


def checked_history(messages: Sequence[Message], *, is_continuation: bool = False) -> list[Message]:
    """Messages whose calls have objects as arguments, and whose results name an earlier call.

    `is_continuation`: they go on from a session, which may hold the call.
    """
    checked: list[Message] = []
    called: dict[str, str] = {}  # id -> name of the tool
    for number, message in enumerate(messages):
        path = f"messages[{number}]"
        if message.get("tool_calls") and message.get("role") != "assistant":
            raise RequestError(400, f"{path}.tool_calls", "are for the role assistant")
        if message.get("tool_call_id") is not None and message.get("role") != "tool":
            raise RequestError(400, f"{path}.tool_call_id", "is for the role tool")
        if message.get("role") == "tool":
            checked.append(_result(message, path, called, is_continuation=is_continuation))
        elif message.get("tool_calls") is not None:
            checked.append(_calls(message, path, called))
        else:
            checked.append(dict(message))
    return checked


def with_call_ids(messages: Sequence[Message], change: Callable[[str], str]) -> list[Message]:
    """The messages with other ids of calls."""
    changed = []
    for message in messages:
        new = dict(message)
        if "tool_calls" in new:
            new["tool_calls"] = [{**call, "id": change(call["id"])} for call in new["tool_calls"]]
        if "tool_call_id" in new:
            new["tool_call_id"] = change(new["tool_call_id"])
        changed.append(new)
    return changed


def as_plain(messages: Sequence[Message]) -> list[Message]:
    """The messages for a template that knows no tools: calls as text of the answer, results as the user's text."""
    plain: list[Message] = []
    is_after_result = False
    for message in messages:
        if message["role"] == "tool":
            before = plain.pop()["content"].removesuffix(AFTER_RESULTS) if is_after_result else ""
            name = f" {message['name']}" if "name" in message else ""
            text = RESULT_TEXT.format(name=name, content=message["content"])
            plain.append({"role": "user", "content": before + text + AFTER_RESULTS})
        elif "tool_calls" in message:
            calls = (each["function"] for each in message["tool_calls"])
            texts = [message["content"], *(written_call(call["name"], call["arguments"]) for call in calls)]
            plain.append({"role": "assistant", "content": "\n".join(text for text in texts if text)})
        else:
            plain.append(dict(message))
        is_after_result = message["role"] == "tool"
    return plain


def system_text(tools: Sequence[Tool]) -> str:
    """What tells a model of tools whose template does not."""
    lines = (json.dumps(tool.definition(), ensure_ascii=False) for tool in tools)
    return SYSTEM_TEXT.format(tools="\n".join(lines))


def with_system_text(messages: Sequence[Message], text: str, *, role: str = "system") -> list[Message]:
    """The messages with the text of the tools in the first one of that role, or in front of all."""
    first = messages[0] if messages else {}
    if first.get("role") == role:
        if not isinstance(first.get("content"), str):
            raise RequestError(400, "messages[0].content", f"must be a text, got {shown(first.get('content'))}")
        return [{**first, "content": _joined(first["content"], text, role)}, *messages[1:]]
    return [{"role": role, "content": text}, *messages]


def _joined(content: str, text: str, role: str) -> str:
    """A user's question comes last, a system's text first."""
    return f"{content}\n\n{text}" if role == "system" else f"{text}\n\n{content}"


def _calls(message: Message, path: str, called: dict[str, str]) -> Message:
    """An answer with calls."""
    given = message["tool_calls"]
    if not isinstance(given, list) or not given:
        raise RequestError(400, f"{path}.tool_calls", "must be a list with at least 1 call")
    calls = [_call(each, f"{path}.tool_calls[{index}]") for index, each in enumerate(given)]
    called.update((call["id"], call["function"]["name"]) for call in calls)
    return {**message, "content": message.get("content") or "", "tool_calls": calls}


def _call(given: object, path: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RequestError(400, path, f"must be an object, got {shown(given)}")
    if given.get("type", "function") != "function":
        raise RequestError(400, f"{path}.type", f"must be 'function', got {shown(given['type'])}")
    function, id = given.get("function"), given.get("id")
    if not isinstance(id, str) or not id:
        raise RequestError(400, f"{path}.id", f"must be a text, got {shown(id)}")
    if not isinstance(function, dict):
        raise RequestError(400, f"{path}.function", f"must be an object, got {shown(function)}")
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(400, f"{path}.function.name", f"must be the name of a tool, got {shown(name)}")
    arguments = _arguments(function.get("arguments"), f"{path}.function.arguments")
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(given: object, path: str) -> dict[str, Any]:
    """The object that the text of a call's arguments stands for."""
    try:
        value = json.loads(given) if isinstance(given, str) else None
    except (ValueError, RecursionError):
        value = None
    if given == "":  # some clients say so for a call without any
        value = {}
    if not isinstance(value, dict):
        raise RequestError(400, path, f"must be the text of a JSON object, got {shown(given)}")
    check_depth(value, path)
    return value


def _result(message: Message, path: str, called: dict[str, str], *, is_continuation: bool) -> Message:
    """What a tool returned."""
    id = message.get("tool_call_id")
    if not isinstance(id, str) or not id:
        raise RequestError(400, f"{path}.tool_call_id", f"must be the id of a call, got {shown(id)}")
    if id not in called and not is_continuation:
        raise RequestError(400, f"{path}.tool_call_id", f"must be the id of an earlier call, got {shown(id)}")
    if not isinstance(message.get("content"), str):
        raise RequestError(400, f"{path}.content", "must be a text")
    name = message.get("name") or called.get(id)
    return {"role": "tool", "content": message["content"], "tool_call_id": id} | ({"name": name} if name else {})
