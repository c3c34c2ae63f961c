"""Tools that a request defines, and which of them the model may or must call.

Owns what OpenAI's fields `tools`, `tool_choice` and `parallel_tool_calls` may hold: each is checked, and a refusal
names the path. A request's tools are plain records from here on. Knows no format and no model. Called by whoever
reads a request.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from roost.errors import RequestError
from roost.text.language import text_len
from roost.values import shown

NOT_ENFORCED = "cannot be enforced: "  # begins every refusal of a schema
TOOLS_MAX = 128
DEPTH_MAX = 64  # of a tool's parameters, and of the arguments of a call in the history
NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}", re.ASCII)  # of a tool, as OpenAI has it
_NAME_WORDS = "must be 1 to 64 letters, digits, underscores or dashes"
_ANY_ARGUMENTS: dict[str, Any] = {"type": "object"}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """One tool, checked."""

    name: str
    description: str = ""
    parameters: dict[str, Any] | None = None  # a JSON schema of type object; None: it takes none
    strict: bool = False  # whether a schema that cannot be enforced is refused

    def definition(self) -> dict[str, Any]:
        """The tool as chat templates read it, which is as OpenAI has it."""
        function: dict[str, Any] = {"name": self.name, "description": self.description}  # templates count on both
        function["parameters"] = {"type": "object", "properties": {}} if self.parameters is None else self.parameters
        return {"type": "function", "function": function}

    def schema(self) -> dict[str, Any]:
        """What arguments must look like."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return self.parameters if "type" in self.parameters else {"type": "object", **self.parameters}


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolRequest:
    """What a request says of tools."""

    tools: tuple[Tool, ...]  # all that the model is told of
    callable: tuple[Tool, ...]  # those that it may call
    is_required: bool = False  # it must call one, at once
    is_parallel: bool = True  # it may call several in one answer


def tools_len(request: ToolRequest | None) -> int:
    """Characters of all definitions."""
    return 0 if request is None else sum(text_len(tool.definition()) for tool in request.tools)


def read_tools(
    tools: object, tool_choice: object = None, parallel_tool_calls: bool | None = None
) -> ToolRequest | None:
    """What the three fields of a request say; None if it has no tools."""
    found = () if tools is None else _tools(tools)
    if not found:  # then either value of parallel_tool_calls asks for nothing
        if tool_choice not in (None, "none", "auto"):
            raise RequestError(400, "tool_choice", "needs tools")
        return None
    mode, names = _choice(tool_choice, [tool.name for tool in found])
    return ToolRequest(
        tools=found,
        callable=tuple(tool for tool in found if tool.name in names and mode != "none"),
        is_required=mode == "required",
        is_parallel=parallel_tool_calls is not False and not _is_named(tool_choice),
    )


def enforceable(request: ToolRequest, reasons: Sequence[str | None]) -> ToolRequest:
    """The request with schemas that can all be enforced.

    `reasons`: for each callable tool why its schema cannot be, None if it can. A strict tool is refused then; another
    one may be called with any object.
    """
    kept = []
    for tool, reason in zip(request.callable, reasons, strict=True):
        if reason is not None and tool.strict:
            raise RequestError(400, parameters_path(request, tool), NOT_ENFORCED + reason)
        kept.append(tool if reason is None else replace(tool, parameters=_ANY_ARGUMENTS))
    return replace(request, callable=tuple(kept))


def parameters_path(request: ToolRequest, tool: Tool) -> str:
    """Where the request has a tool's schema."""
    index = [each.name for each in request.tools].index(tool.name)
    return f"tools[{index}].function.parameters"


def check_depth(value: object, path: str) -> None:
    """Refuse a value that is nested too deep to be walked through."""
    level, depth = [value], 0
    while level:
        if depth == DEPTH_MAX:
            raise RequestError(400, path, f"must be nested at most {DEPTH_MAX} deep")
        inner: list[object] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        level, depth = inner, depth + 1


def _tools(given: object) -> tuple[Tool, ...]:
    if not isinstance(given, list):
        raise RequestError(400, "tools", f"must be a list, got {shown(given)}")
    if len(given) > TOOLS_MAX:
        raise RequestError(400, "tools", f"must be at most {TOOLS_MAX}, got {len(given)}")
    found = tuple(_tool(each, f"tools[{index}]") for index, each in enumerate(given))
    names = [tool.name for tool in found]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(400, f"tools[{index}].function.name", f"{shown(name)} is another tool's name already")
    return found


def _tool(given: object, path: str) -> Tool:
    if isinstance(given, dict) and given.get("type") != "function":  # others have other fields
        raise RequestError(400, f"{path}.type", f"must be 'function', got {shown(given.get('type'))}")
    entry = _object(given, path, allowed=("type", "function"))
    fields = _object(entry.get("function"), f"{path}.function", allowed=("name", "description", "parameters", "strict"))
    name, description = fields.get("name"), fields.get("description")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(400, f"{path}.function.name", f"{_NAME_WORDS}, got {shown(name)}")
    if description is not None and not isinstance(description, str):
        raise RequestError(400, f"{path}.function.description", f"must be a text, got {shown(description)}")
    strict, parameters = fields.get("strict"), fields.get("parameters")
    if strict is not None and not isinstance(strict, bool):
        raise RequestError(400, f"{path}.function.strict", f"must be true or false, got {shown(strict)}")
    if parameters is not None:
        _check_parameters(parameters, f"{path}.function.parameters")
    return Tool(name=name, description=description or "", parameters=parameters, strict=bool(strict))


def _check_parameters(given: object, path: str) -> None:
    if not isinstance(given, dict):
        raise RequestError(400, path, f"must be a JSON schema, got {shown(given)}")
    if given.get("type", "object") != "object":
        raise RequestError(400, f"{path}.type", f"must be 'object', got {shown(given['type'])}")
    check_depth(given, path)


def _choice(given: object, names: list[str]) -> tuple[Mode, list[str]]:
    """How tools are called, and which."""
    match given:
        case None:
            return "auto", names
        case "none" | "auto" | "required":
            return given, names
        case {"type": "function"}:
            return "required", [_known(given, "tool_choice", names)]
        case {"type": "allowed_tools"}:
            return _allowed(_object(given, "tool_choice", allowed=("type", "allowed_tools")), names)
    raise RequestError(
        400,
        "tool_choice",
        "must be none, auto, required, or an object of type function or allowed_tools, "
        f"got {shown(given.get('type')) if isinstance(given, dict) else shown(given)}",
    )


def _allowed(given: dict[str, Any], names: list[str]) -> tuple[Mode, list[str]]:
    """OpenAI's choice among some of the tools."""
    path = "tool_choice.allowed_tools"
    fields = _object(given.get("allowed_tools"), path, allowed=("mode", "tools"))
    mode, allowed = fields.get("mode"), fields.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(400, f"{path}.mode", f"must be auto or required, got {shown(mode)}")
    if not isinstance(allowed, list) or not allowed:
        raise RequestError(400, f"{path}.tools", "must be a list with at least 1 tool")
    return mode, [_known(each, f"{path}.tools[{index}]", names) for index, each in enumerate(allowed)]


def _known(given: object, path: str, names: list[str]) -> str:
    """The name of a tool that was defined."""
    entry = _object(given, path, allowed=("type", "function"))
    if entry.get("type") != "function":
        raise RequestError(400, f"{path}.type", f"must be 'function', got {shown(entry.get('type'))}")
    name = _object(entry.get("function"), f"{path}.function", allowed=("name",)).get("name")
    if not isinstance(name, str) or name not in names:
        raise RequestError(400, f"{path}.function.name", f"must be the name of one of tools, got {shown(name)}")
    return name


def _is_named(given: object) -> bool:
    """Whether the choice is one tool, which is then called once."""
    return isinstance(given, dict) and given.get("type") == "function"


def _object(given: object, path: str, *, allowed: tuple[str, ...]) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise RequestError(400, path, f"must be an object, got {shown(given)}")
    for key in given:
        if key not in allowed:
            raise RequestError(400, f"{path}.{key}", f"is not known; known: {', '.join(allowed)}")
    return given
