"""Input of OpenAI's Responses API: items as chat messages and as complete items, and its tools as tools of a chat.

One output of the model comes back as several items (reasoning, a message, calls), which are one message again here, so
that a history reads as it was written. A function in a namespace has both names in one for the model; a custom tool is
a function with one text. Only text is read: anything else is refused by its path. Pure: never waits, never looks an
item up by itself. Called by the endpoints of responses and conversations.
"""

import json
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from roost.errors import RequestError
from roost.tools.definitions import NAME, ToolRequest, check_depth, read_tools
from roost.values import shown

Fields = dict[str, Any]  # an item, a tool, a message: as JSON has it

CUSTOM_INPUT = "input"  # the one parameter of a custom tool's function
_ROLES = ("system", "developer", "user", "assistant")
_LABELS = ("type", "id", "status", "phase", "caller", "created_by", "end_turn", "metadata")
_FIELDS = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary", "encrypted_content"),
    "function_call": ("call_id", "name", "namespace", "arguments"),
    "custom_tool_call": ("call_id", "name", "namespace", "input"),
    "function_call_output": ("call_id", "name", "namespace", "output"),
    "custom_tool_call_output": ("call_id", "name", "namespace", "output"),
}
_ID_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "custom_tool_call": "ctc",
    "function_call_output": "fco",
    "custom_tool_call_output": "ctco",
}
_TEXT_PARTS = {  # by type of a part, the field with its text
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
_PART_LABELS = ("type", "annotations", "logprobs", "prompt_cache_breakpoint")
_TOOL_LABELS = ("type", "defer_loading", "output_schema", "allowed_callers")
_TOOL_FIELDS = {
    "function": ("name", "description", "parameters", "strict"),
    "custom": ("name", "description", "format"),
    "namespace": ("name", "description", "tools"),
}
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_INPUT: {"type": "string"}},
    "required": [CUSTOM_INPUT],
    "additionalProperties": False,
}
_IN_FUNCTION = re.compile(r"tools\[(\d+)\](?:\.function)?(.*)", re.DOTALL)


def input_messages(
    given: str | list[Fields] | None,
    path: str = "input",
    *,
    earlier_calls: Collection[str] | None = None,
) -> list[Fields]:
    """Input as plain chat messages.

    `earlier_calls`: ids of the calls before this input, of which a result may be; None: results are not checked.
    """
    reader = _ItemReader(earlier_calls)
    for at, item in _read_items(given, path):
        reader.read(item, at)
    return reader.finish()


def input_items(given: str | list[Fields] | None, new_id: Callable[[str], str], path: str = "input") -> list[Fields]:
    """Input as complete items; `new_id` gives an id for a prefix."""
    items = []
    for _, item in _read_items(given, path):
        id = item.get("id") or new_id(_ID_PREFIXES[item["type"]])
        items.append({**item, "id": id, "status": item.get("status") or "completed"})
    return items


def function_name(namespace: str | None, name: str) -> str:
    """What the model calls a function that may be in a namespace."""
    if not namespace:
        return name
    return f"{namespace}{name}" if namespace.endswith("__") else f"{namespace}__{name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class CalledAs:
    """How a client knows a function that the model calls."""

    name: str
    namespace: str | None = None
    is_custom: bool = False


def called_as(tools: Sequence[Fields]) -> dict[str, CalledAs]:
    """How a client knows its functions, by the names that the model has for them; `tools` as a response shows them."""
    return {function["name"]: called for _, function, called in _functions(tools)}


def read_response_tools(
    tools: list[Fields] | None, tool_choice: object = None, parallel_tool_calls: bool | None = None
) -> tuple[ToolRequest | None, list[Fields]]:
    """What the three fields of a request say, and the tools as its response shows them.

    Tools that only a hosted service can run, and custom ones whose input must match a grammar, are left out.
    """
    offered = _shown_tools([] if tools is None else tools, "tools")
    functions = _functions(offered)
    choice = _chat_choice(tool_choice, [(function["name"], called) for _, function, called in functions])
    try:
        asked = read_tools(
            [{"type": "function", "function": function} for _, function, _ in functions], choice, parallel_tool_calls
        )
    except RequestError as error:
        raise renamed_tool_error(error, tools) from error
    return asked, offered


def renamed_tool_error(error: RequestError, tools: list[Fields] | None) -> RequestError:
    """An error about one of a chat's tools with the path that this tool has in a response's request."""
    found = _IN_FUNCTION.fullmatch(error.param)
    if found is None:
        return error
    paths = [at for at, _, _ in _functions(_shown_tools(tools or [], "tools", keeps_place=True))]
    return RequestError(error.status, paths[int(found[1])] + found[2], error.reason)


# --- items ---


class _ItemReader:
    """Makes messages of items: what one output of the model was is one message of the assistant."""

    def __init__(self, earlier_calls: Collection[str] | None) -> None:
        self._messages: list[Fields] = []
        self._thought = ""  # belongs to the answer that follows
        self._answer: Fields | None = None  # the last message, if it is the assistant's
        self._called: set[str] | None = None if earlier_calls is None else set(earlier_calls)

    def read(self, item: Fields, path: str) -> None:
        """Add an item."""
        match item["type"]:
            case "reasoning":
                self._thought += _thought_of(item)
            case "message" if item["role"] == "assistant":
                if self._thought or self._answer is None or "tool_calls" not in self._answer:
                    self._begin_answer()
                assert self._answer is not None
                self._answer["content"] += _text_of(item["content"])
            case "message":
                role = "system" if item["role"] == "developer" else item["role"]
                self._say({"role": role, "content": _text_of(item["content"])})
            case "function_call" | "custom_tool_call":
                self._call(item, path)
            case "function_call_output" | "custom_tool_call_output":
                id = item["call_id"]
                if self._called is not None and id not in self._called:
                    raise RequestError(400, f"{path}.call_id", f"must be the id of an earlier call, got {shown(id)}")
                self._say({"role": "tool", "content": _text_of(item["output"]), "tool_call_id": id})

    def finish(self) -> list[Fields]:
        """All messages."""
        if self._thought:  # and then nothing was said
            self._begin_answer()
        return self._messages

    def _begin_answer(self) -> None:
        self._answer = {"role": "assistant", "content": ""}
        if self._thought:
            self._answer["reasoning_content"], self._thought = self._thought, ""
        self._messages.append(self._answer)

    def _say(self, message: Fields) -> None:
        self.finish()
        self._answer = None
        self._messages.append(message)

    def _call(self, item: Fields, path: str) -> None:
        function = _called_function(item, path)
        if function is None:
            return
        if self._thought or self._answer is None:
            self._begin_answer()
        assert self._answer is not None
        call = {"id": item["call_id"], "type": "function", "function": function}
        self._answer.setdefault("tool_calls", []).append(call)
        if self._called is not None:
            self._called.add(item["call_id"])


def _called_function(item: Fields, path: str) -> Fields | None:
    """The function of a call; None for one that the model was cut off in, so that there is nothing to run."""
    name = function_name(item.get("namespace"), item["name"])
    if not NAME.fullmatch(name):
        raise RequestError(400, f"{path}.name", f"must be the name of a tool, got {shown(name)}")
    if item["type"] == "custom_tool_call" and item.get("status") == "incomplete":
        return None
    if item["type"] == "custom_tool_call":
        return {"name": name, "arguments": json.dumps({CUSTOM_INPUT: item["input"]}, ensure_ascii=False)}
    arguments = item["arguments"]
    try:
        value = json.loads(arguments or "{}")  # some clients say so for a call without any
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        if item.get("status") == "incomplete":
            return None
        raise RequestError(400, f"{path}.arguments", f"must be the text of a JSON object, got {shown(arguments)}")
    check_depth(value, f"{path}.arguments")
    return {"name": name, "arguments": arguments or "{}"}


def _read_items(given: str | list[Fields] | None, path: str) -> list[tuple[str, Fields]]:
    """Items with all that their kind has but ids, and the path of each."""
    if given is None:
        return []
    if isinstance(given, str):
        return [(path, _message({"role": "user", "content": given}, path))]
    places = [f"{path}[{number}]" for number in range(len(given))]
    return [(at, _read_item(each, at)) for at, each in zip(places, given, strict=True)]


def _read_item(given: object, path: str) -> Fields:
    if not isinstance(given, dict):
        raise RequestError(400, path, f"must be an object, got {shown(given)}")
    kind = given.get("type")
    if kind is None:
        kind = "item_reference" if "role" not in given and "id" in given else "message"
    if kind == "item_reference":
        raise RequestError(400, f"{path}.type", "must not be item_reference: send the item itself")
    if not isinstance(kind, str) or kind not in _FIELDS:
        raise RequestError(400, f"{path}.type", f"must be one of {', '.join(_FIELDS)}, got {shown(kind)}")
    _check_known(given, path, (*_LABELS, *_FIELDS[kind]))
    for name in ("id", "status", "namespace"):
        _optional_text(given, name, path)
    labels = {name: given[name] for name in _LABELS if given.get(name) is not None}
    match kind:
        case "message":
            return {**labels, **_message(given, path)}
        case "reasoning":
            return {**labels, **_reasoning(given, path)}
        case "function_call" | "custom_tool_call":
            said = "arguments" if kind == "function_call" else "input"
            texts = {name: _required_text(given, name, path) for name in ("call_id", "name", said)}
            namespace = {"namespace": given["namespace"]} if given.get("namespace") else {}
            return {**labels, "type": kind, **texts, **namespace}
        case _:
            output = given.get("output")
            if not isinstance(output, str):
                output = [{"type": "input_text", "text": text} for _, text in _texts(output, f"{path}.output")]
            return {**labels, "type": kind, "call_id": _required_text(given, "call_id", path), "output": output}


def _message(given: Fields, path: str) -> Fields:
    role, content = given.get("role"), given.get("content")
    if role not in _ROLES:
        raise RequestError(400, f"{path}.role", f"must be {', '.join(_ROLES)}, got {shown(role)}")
    texts = [("text", content)] if isinstance(content, str) else _texts(content, f"{path}.content")
    if role != "assistant":
        parts = [{"type": "input_text", "text": text} for _, text in texts]
    else:
        parts = [
            {"type": "refusal", "refusal": text} if kind == "refusal" else output_text(text) for kind, text in texts
        ]
    return {"type": "message", "role": role, "content": parts}


def output_text(text: str, logprobs: Sequence[Fields] = ()) -> Fields:
    """A part of what the model has said."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": list(logprobs)}


def _reasoning(given: Fields, path: str) -> Fields:
    content, summary = given.get("content"), given.get("summary")
    texts = [] if content is None else [text for _, text in _texts(content, f"{path}.content")]
    sums = [] if summary is None else [text for _, text in _texts(summary, f"{path}.summary")]
    _optional_text(given, "encrypted_content", path)
    if given.get("encrypted_content") and not texts and not sums:
        reason = "cannot be read: it was encrypted by another server; leave the item out"
        raise RequestError(400, f"{path}.encrypted_content", reason)
    return {
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": text} for text in sums],
        "content": [{"type": "reasoning_text", "text": text} for text in texts],
        "encrypted_content": None,
    }


def _thought_of(item: Fields) -> str:
    """What was thought, in full if that is given."""
    return _text_of(item["content"]) or "\n\n".join(part["text"] for part in item["summary"])


def _text_of(content: str | list[Fields]) -> str:
    if isinstance(content, str):
        return content
    return "".join(part[_TEXT_PARTS[part["type"]]] for part in content)


def _texts(given: object, path: str) -> list[tuple[str, str]]:
    """Type and text of each part."""
    if not isinstance(given, list):
        raise RequestError(400, path, f"must be a text or a list of parts, got {shown(given)}")
    texts = []
    for index, part in enumerate(given):
        at = f"{path}[{index}]"
        if not isinstance(part, dict):
            raise RequestError(400, at, f"must be an object, got {shown(part)}")
        kind = part.get("type")
        if not isinstance(kind, str) or kind not in _TEXT_PARTS:
            raise RequestError(400, f"{at}.type", f"must be a text ({', '.join(_TEXT_PARTS)}), got {shown(kind)}")
        _check_known(part, at, (*_PART_LABELS, _TEXT_PARTS[kind]))
        texts.append((kind, _required_text(part, _TEXT_PARTS[kind], at)))
    return texts


# --- tools ---

_Function = tuple[str, Fields, CalledAs]  # its path, its definition in a chat, and how the client knows it
_Known = list[tuple[str, CalledAs]]  # names of functions, for the model and for the client


def _shown_tools(given: object, path: str, *, keeps_place: bool = False) -> list[Fields]:
    """The tools that the model can be told of, as a response shows them; `keeps_place`: {} for any other."""
    if not isinstance(given, list):
        raise RequestError(400, path, f"must be a list, got {shown(given)}")
    tools = [_shown_tool(each, f"{path}[{index}]", keeps_place=keeps_place) for index, each in enumerate(given)]
    return [tool for tool in tools if tool or keeps_place]


def _shown_tool(given: object, path: str, *, keeps_place: bool) -> Fields:
    if not isinstance(given, dict):
        raise RequestError(400, path, f"must be an object, got {shown(given)}")
    kind = _required_text(given, "type", path)
    if kind not in _TOOL_FIELDS:
        return {}
    _check_known(given, path, (*_TOOL_LABELS, *_TOOL_FIELDS[kind]))
    named = {"type": kind, "name": _required_text(given, "name", path)}
    if kind == "namespace":
        _optional_text(given, "description", path)
        members = _shown_tools(given.get("tools"), f"{path}.tools", keeps_place=keeps_place)
        return {**named, "description": given.get("description") or "", "tools": members} if any(members) else {}
    callers = given.get("allowed_callers")
    if callers is not None and not isinstance(callers, list):
        raise RequestError(400, f"{path}.allowed_callers", f"must be a list, got {shown(callers)}")
    if callers and "direct" not in callers:
        return {}
    labels = {name: given[name] for name in _TOOL_LABELS if given.get(name) is not None}
    described = {**labels, **named, "description": given.get("description")}
    if kind == "function":
        return {**described, "parameters": given.get("parameters"), "strict": given.get("strict")}
    format = {"type": "text"} if given.get("format") is None else given["format"]
    if not isinstance(format, dict) or format.get("type") not in ("text", "grammar"):
        raise RequestError(400, f"{path}.format.type", "must be text or grammar")
    if format["type"] == "grammar":
        return {}
    return {**described, "description": described["description"] or "", "format": format}


def _functions(tools: Sequence[Fields], path: str = "tools", namespace: str | None = None) -> list[_Function]:
    """The functions of shown tools."""
    found: list[_Function] = []
    for index, tool in enumerate(tools):
        at = f"{path}[{index}]"
        if not tool:
            continue
        if tool["type"] == "namespace":
            found += _functions(tool["tools"], f"{at}.tools", tool["name"])
            continue
        is_custom = tool["type"] == "custom"
        function = {"name": function_name(namespace, tool["name"]), "description": tool["description"]}
        if is_custom:
            function["parameters"] = _CUSTOM_PARAMETERS
        else:
            function |= {"parameters": tool["parameters"], "strict": tool["strict"]}
        found.append((at, function, CalledAs(name=tool["name"], namespace=namespace, is_custom=is_custom)))
    return found


def _chat_choice(given: object, known: _Known) -> object:
    """`tool_choice` as a chat has it."""
    if given == "required" and not known:
        raise RequestError(400, "tool_choice", "required needs tools of type function or custom")
    if not isinstance(given, dict):
        return given
    match given.get("type"):
        case "function" | "custom":
            return _named_function(_chosen(given, "tool_choice", known))
        case "allowed_tools":
            return _allowed_tools(given, known)
    raise RequestError(
        400,
        "tool_choice.type",
        f"must be function, custom or allowed_tools, got {shown(given.get('type'))}: others only a hosted service runs",
    )


def _allowed_tools(given: Fields, known: _Known) -> object:
    _check_known(given, "tool_choice", ("type", "mode", "tools"))
    mode, allowed = given.get("mode"), given.get("tools")
    if mode not in ("auto", "required"):
        raise RequestError(400, "tool_choice.mode", f"must be auto or required, got {shown(mode)}")
    if not isinstance(allowed, list) or not allowed:
        raise RequestError(400, "tool_choice.tools", "must be a list with at least 1 tool")
    names = []
    for index, each in enumerate(allowed):
        at = f"tool_choice.tools[{index}]"
        if not isinstance(each, dict):
            raise RequestError(400, at, f"must be an object, got {shown(each)}")
        kind = _required_text(each, "type", at)
        if kind == "namespace":
            names += [name for name, called in known if called.namespace == _required_text(each, "name", at)]
        elif kind in ("function", "custom"):
            names.append(_chosen(each, at, known))
    if not names and mode == "required":
        raise RequestError(400, "tool_choice.tools", "required needs tools of type function or custom")
    if not names:
        return "none"
    return {
        "type": "allowed_tools",
        "allowed_tools": {"mode": mode, "tools": [_named_function(name) for name in names]},
    }


def _named_function(name: str) -> Fields:
    return {"type": "function", "function": {"name": name}}


def _chosen(given: Fields, path: str, known: _Known) -> str:
    """The model's name of the function that a choice names."""
    _check_known(given, path, ("type", "name", "namespace"))
    name, namespace = _required_text(given, "name", path), given.get("namespace")
    is_custom = given["type"] == "custom"
    for function, called in known:
        is_meant = name in (called.name, function) and namespace in (None, called.namespace)
        if is_meant and called.is_custom == is_custom:
            return function
    raise RequestError(400, f"{path}.name", f"must be the name of one of tools, got {shown(name)}")


# --- fields ---


def _check_known(given: Fields, path: str, known: tuple[str, ...]) -> None:
    """Refuse a field that nobody here knows and that asks for something."""
    for name, value in given.items():
        if name not in known and value is not None and value is not False:
            raise RequestError(400, f"{path}.{name[:40]}", f"is not known; known: {', '.join(known)}")


def _required_text(given: Fields, name: str, path: str) -> str:
    value = given.get(name)
    if not isinstance(value, str):
        raise RequestError(400, f"{path}.{name}", f"must be a text, got {shown(value)}")
    return value


def _optional_text(given: Fields, name: str, path: str) -> None:
    if given.get(name) is not None:
        _required_text(given, name, path)
