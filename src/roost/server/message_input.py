"""Input of Anthropic's Messages API: messages of content blocks as chat messages, and its tools as tools of a chat.

Consecutive messages of the user or of the assistant are one, as there. Blocks of the assistant are joined as they are,
so that an answer that comes back reads as it was given; all others are joined by a newline, since each is a text of its
own. Tool results come before the text of the same message. Only text is read: anything else is refused by its path.
Pure: never waits, never renders. Called by the endpoints of messages.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from roost.errors import RequestError
from roost.server.message_schema import Fields, InputMessage
from roost.tools.definitions import NAME, ToolRequest, check_depth, read_tools
from roost.values import shown

BILLING_HEADER = "x-anthropic-billing-header"  # what a client puts first, different with every request
ERROR_PREFIX = "Error: "  # tells the model that a tool failed
_ROLES = ("user", "assistant", "system")
_LABELS = ("type", "cache_control")
_BLOCK_FIELDS = {
    "text": ("text", "citations"),  # what an earlier answer cited, the model does not read
    "thinking": ("thinking", "signature"),
    "redacted_thinking": ("data",),
    "tool_use": ("id", "name", "input", "caller", "toolset_name"),
    "tool_result": ("tool_use_id", "content", "is_error", "toolset_name"),
    "tool_reference": ("tool_name",),
}
_ROLE_BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "system": ("text",),
}
# a client's own search among tools finds some: all of them are listed anyway, so that their names say enough
_RESULT_BLOCKS = ("text", "tool_reference")
_TOOL_FIELDS = ("name", "description", "input_schema", "strict")
_TOOL_LABELS = (*_LABELS, "allowed_callers", "defer_loading", "eager_input_streaming", "input_examples")
_HOSTED = re.compile(r"[a-z0-9_]+_20[0-9]{6}|mcp_toolset", re.ASCII)  # types of tools that Anthropic defines
_CHAT_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_CHOICE_FIELDS = ("type", "name", "disable_parallel_tool_use")
_IN_FUNCTION = re.compile(r"tools\[(\d+)\](?:\.function)?(?:\.(parameters))?(.*)", re.DOTALL)


# --- messages ---


def input_messages(
    messages: Sequence[InputMessage], system: str | list[Fields] | None = None, *, may_end_with_answer: bool = False
) -> list[Fields]:
    """Messages and system text as plain chat messages.

    `may_end_with_answer`: nothing is generated after them. Otherwise a last message of the assistant would have to be
    continued by the answer, and is refused.
    """
    reader = _BlockReader()
    if text := _system_text(system):
        reader.messages.append({"role": "system", "content": text})
    for index, message in enumerate(messages):
        path = f"messages[{index}]"
        if message.role not in _ROLES:
            raise RequestError(400, f"{path}.role", f"must be {' or '.join(_ROLES)}, got {shown(message.role)}")
        reader.read(message.role, _content(message, path), path)
    if messages and messages[-1].role == "assistant" and not may_end_with_answer:
        path = f"messages[{len(messages) - 1}]"
        raise RequestError(400, path, "an assistant message last (a prefill) is not supported: end with the user's")
    return reader.messages


class _BlockReader:
    """Makes chat messages of blocks."""

    def __init__(self) -> None:
        self.messages: list[Fields] = []
        self._called: set[str] = set()  # ids of calls so far

    def read(self, role: str, blocks: list[Fields], path: str) -> None:
        """Add a message."""
        at = [(f"{path}.content[{index}]", block) for index, block in enumerate(blocks)]
        for place, block in at:
            _check_block(block, place, _ROLE_BLOCKS[role], f" in a message of the {role}")
        if role == "assistant":
            self._answer(at)
            return
        results = [(place, block) for place, block in at if block["type"] == "tool_result"]
        for place, block in results:
            self._result(block, place)
        text = "\n".join(block["text"] for _, block in at if block["type"] == "text" and block["text"])
        if text or (role == "user" and not results):
            self._say(role, text)

    def _say(self, role: str, text: str) -> None:
        """Add text that is not the assistant's."""
        if role == "user" and self.messages and self.messages[-1]["role"] == role:
            self.messages[-1]["content"] += f"\n{text}"
        else:
            self.messages.append({"role": role, "content": text})

    def _answer(self, at: list[tuple[str, Fields]]) -> None:
        """Add what the assistant thought, said and called."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
        answer = self.messages[-1]
        for path, block in at:
            match block["type"]:
                case "text":
                    answer["content"] += block["text"]
                case "thinking" if block["thinking"]:  # empty if it was not to be shown
                    answer["reasoning_content"] = answer.get("reasoning_content", "") + block["thinking"]
                case "tool_use":
                    answer.setdefault("tool_calls", []).append(self._call(block, path))

    def _call(self, block: Fields, path: str) -> Fields:
        id, name, given = block.get("id"), block.get("name"), block.get("input")
        if not isinstance(id, str) or not id:
            raise RequestError(400, f"{path}.id", f"must be a text, got {shown(id)}")
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RequestError(400, f"{path}.name", f"must be the name of a tool, got {shown(name)}")
        if not isinstance(given, dict):
            raise RequestError(400, f"{path}.input", f"must be an object, got {shown(given)}")
        check_depth(given, f"{path}.input")
        if block.get("caller") not in (None, {"type": "direct"}):
            raise RequestError(400, f"{path}.caller", "must be of type direct: no tool runs on this server")
        self._called.add(id)
        arguments = json.dumps(given, ensure_ascii=False, separators=(",", ":"))
        return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, block: Fields, path: str) -> None:
        id, is_error = block.get("tool_use_id"), block.get("is_error")
        if not isinstance(id, str) or id not in self._called:
            raise RequestError(400, f"{path}.tool_use_id", f"must be the id of an earlier tool_use, got {shown(id)}")
        if is_error is not None and not isinstance(is_error, bool):
            raise RequestError(400, f"{path}.is_error", f"must be true or false, got {shown(is_error)}")
        text = _result_text(block.get("content"), f"{path}.content")
        if is_error and not text.startswith(ERROR_PREFIX):
            text = ERROR_PREFIX + text
        self.messages.append({"role": "tool", "content": text, "tool_call_id": id})


def _system_text(system: str | list[Fields] | None) -> str:
    """The system text without what is different with every request and no words for the model."""
    if system is None or isinstance(system, str):
        return system or ""
    for index, block in enumerate(system):
        _check_block(block, f"system[{index}]", _ROLE_BLOCKS["system"], "")
    texts = [block["text"] for block in system]
    if texts and texts[0].lower().startswith(BILLING_HEADER):
        _, _, texts[0] = texts[0].partition("\n")
    return "\n".join(text for text in texts if text)


def _content(message: InputMessage, path: str) -> list[Fields]:
    """The blocks of a message; a text is one."""
    given = message.content
    if isinstance(given, str):
        return [{"type": "text", "text": given}]
    if given is None and message.output_config is None:
        raise RequestError(400, f"{path}.content", "is required")
    if given == [] and message.role == "user":
        raise RequestError(400, f"{path}.content", "must hold at least 1 block")
    return given or []


def _result_text(given: object, path: str) -> str:
    """What a tool returned; nothing is an empty text."""
    if given is None or isinstance(given, str):
        return given or ""
    if not isinstance(given, list):
        raise RequestError(400, path, f"must be a text or a list of blocks, got {shown(given)}")
    for index, block in enumerate(given):
        _check_block(block, f"{path}[{index}]", _RESULT_BLOCKS, " of a tool")
    return "\n".join(block["text"] if block["type"] == "text" else block["tool_name"] for block in given)


def _check_block(block: object, path: str, allowed: tuple[str, ...], where: str) -> None:
    """Refuse a block that is not one of some types, has unknown fields, or lacks its text."""
    if not isinstance(block, dict):
        raise RequestError(400, path, f"must be an object, got {shown(block)}")
    kind = block.get("type")
    if kind not in allowed:
        reason = f"must be {' or '.join(allowed)}{where}, got {shown(kind)}: only text is supported"
        raise RequestError(400, f"{path}.type", reason)
    _check_fields(block, path, (*_LABELS, *_BLOCK_FIELDS[kind]))
    for name in ("text", "thinking", "tool_name"):
        if name in _BLOCK_FIELDS[kind] and not isinstance(block.get(name), str):
            raise RequestError(400, f"{path}.{name}", f"must be a text, got {shown(block.get(name))}")
    if block.get("toolset_name") is not None:
        raise RequestError(400, f"{path}.toolset_name", "is not supported by this server; leave it out")
    if block.get("data"):  # encrypted by another service, for a model of its own
        raise RequestError(400, f"{path}.data", "is not supported except as '': nobody here can read it")


# --- tools ---


def read_message_tools(tools: list[Fields] | None, tool_choice: Fields | None = None) -> ToolRequest | None:
    """What the two fields of a request say; None if it has no tools.

    Tools that only Anthropic defines or runs are left out where the model may do without.
    """
    offered, hosted = _told_apart(tools or [])
    choice, is_parallel = _chat_choice(tool_choice)
    kind = None if tool_choice is None else tool_choice["type"]
    for index, tool in hosted.items():
        if kind == "any" or (isinstance(choice, dict) and tool.get("name") == choice["function"]["name"]):
            reason = f"is not supported by this server: it cannot be run with tool_choice {kind}"
            raise RequestError(400, f"tools[{index}].type", reason)
    functions = [{"type": "function", "function": _function(tool, f"tools[{index}]")} for index, tool in offered]
    try:
        return read_tools(functions, choice, is_parallel)
    except RequestError as error:
        raise renamed_tool_error(error, tools) from error


def renamed_tool_error(error: RequestError, tools: list[Fields] | None) -> RequestError:
    """An error about one of a chat's tools with the path that this tool has in a message's request."""
    if error.param == "tool_choice.function.name":
        return RequestError(error.status, "tool_choice.name", error.reason)
    found = _IN_FUNCTION.fullmatch(error.param)
    if found is None:
        return error
    offered, _ = _told_apart(tools or [])
    path = f"tools[{offered[int(found[1])][0]}]" + (".input_schema" if found[2] else "")
    return RequestError(error.status, path + found[3], error.reason)


def _told_apart(tools: list[Fields]) -> tuple[list[tuple[int, Fields]], dict[int, Fields]]:
    """The tools that the model is told of, and those that are left out, by their places."""
    offered, hosted = list[tuple[int, Fields]](), dict[int, Fields]()
    for index, tool in enumerate(tools):
        kind, callers = tool.get("type"), tool.get("allowed_callers")
        if kind is not None and not isinstance(kind, str):
            raise RequestError(400, f"tools[{index}].type", f"must be a text, got {shown(kind)}")
        if callers is not None and not isinstance(callers, list):
            raise RequestError(400, f"tools[{index}].allowed_callers", f"must be a list, got {shown(callers)}")
        if kind not in (None, "custom") and not _HOSTED.fullmatch(kind):
            raise RequestError(400, f"tools[{index}].type", f"must be custom, got {shown(kind)}")
        if kind not in (None, "custom") or (callers and "direct" not in callers):
            hosted[index] = tool
        else:
            offered.append((index, tool))
    return offered, hosted


def _function(tool: Fields, path: str) -> Fields:
    """A tool as OpenAI has it."""
    _check_fields(tool, path, (*_TOOL_LABELS, *_TOOL_FIELDS))
    schema = tool.get("input_schema")
    if schema is None:
        raise RequestError(400, f"{path}.input_schema", "is required")
    if isinstance(schema, dict):
        schema = {name: value for name, value in schema.items() if value is not None}  # clients may send nulls
    given = {"name": tool.get("name"), "description": tool.get("description"), "strict": tool.get("strict")}
    return {**given, "parameters": schema}


def _chat_choice(given: Fields | None) -> tuple[str | Fields | None, bool | None]:
    """OpenAI's tool_choice and parallel_tool_calls."""
    if given is None:
        return None, None
    kind, name, is_single = given.get("type"), given.get("name"), given.get("disable_parallel_tool_use")
    if kind not in (*_CHAT_CHOICES, "tool"):
        raise RequestError(400, "tool_choice.type", f"must be auto or any or tool or none, got {shown(kind)}")
    _check_fields(given, "tool_choice", _CHOICE_FIELDS)
    if is_single is not None and not isinstance(is_single, bool):
        path = "tool_choice.disable_parallel_tool_use"
        raise RequestError(400, path, f"must be true or false, got {shown(is_single)}")
    is_parallel = None if is_single is None else not is_single
    if kind == "tool":
        return {"type": "function", "function": {"name": name}}, is_parallel
    if name is not None:
        raise RequestError(400, "tool_choice.name", "is for the type tool")
    return _CHAT_CHOICES[kind], is_parallel


def _check_fields(given: dict[Any, Any], path: str, allowed: tuple[str, ...]) -> None:
    for name in given:
        if name not in allowed:
            raise RequestError(400, f"{path}.{name}", f"is not known; known: {', '.join(allowed)}")
    if not isinstance(given.get("cache_control"), dict | None):
        raise RequestError(400, f"{path}.cache_control", f"must be an object, got {shown(given['cache_control'])}")
