"""A request's tools are taken as OpenAI has them; anything else is refused by its path."""

from typing import Any

import pytest

from roost.errors import RequestError
from roost.tools.call_ids import new_call_id, short_call_id
from roost.tools.definitions import DEPTH_MAX, TOOLS_MAX, enforceable, read_tools
from tests.unit.tools.written import TOOLS, request


def _tool(**fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", **fields}}


def _chosen(choice: object) -> tuple[list[str], bool, bool]:
    asked = request(choice)
    return [tool.name for tool in asked.callable], asked.is_required, asked.is_parallel


def test_a_choice_says_what_may_and_what_must_be_called() -> None:
    both = ["find", "now-2"]
    allowed = {"mode": "required", "tools": [{"type": "function", "function": {"name": "find"}}]}
    assert _chosen(None) == _chosen("auto") == (both, False, True)
    assert _chosen("required") == (both, True, True)
    assert _chosen("none") == ([], False, True)
    assert _chosen({"type": "function", "function": {"name": "find"}}) == (["find"], True, False)
    assert _chosen({"type": "allowed_tools", "allowed_tools": allowed}) == (["find"], True, True)
    assert not request(parallel=False).is_parallel


def test_a_tool_is_told_to_the_template_as_it_was_defined() -> None:
    assert request().tools[0].definition() == {
        "type": "function",
        "function": {key: value for key, value in TOOLS[0]["function"].items() if key != "strict"},  # type: ignore[attr-defined]
    }
    assert request().tools[1].definition()["function"]["parameters"] == {"type": "object", "properties": {}}


def test_no_tools_are_none() -> None:
    for tools in (None, []):
        assert read_tools(tools) is None and read_tools(tools, "none") is None and read_tools(tools, "auto") is None
        with pytest.raises(RequestError, match="tool_choice: needs tools"):
            read_tools(tools, "required")
        assert read_tools(tools, None, True) is None and read_tools(tools, None, False) is None


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ({}, "tools"),
        (["f"], "tools[0]"),
        ([{"type": "code", "function": {"name": "f"}}], "tools[0].type"),
        ([_tool(), {"type": "function"}], "tools[1].function"),
        ([_tool(name="a.b")], "tools[0].function.name"),
        ([_tool(name="")], "tools[0].function.name"),
        ([_tool(name="f" * 65)], "tools[0].function.name"),
        ([_tool(name="é")], "tools[0].function.name"),
        ([_tool(), _tool()], "tools[1].function.name"),
        ([_tool(description=1)], "tools[0].function.description"),
        ([_tool(strict="yes")], "tools[0].function.strict"),
        ([_tool(parameters=[])], "tools[0].function.parameters"),
        ([_tool(parameters={"type": "array"})], "tools[0].function.parameters.type"),
        ([_tool(args={})], "tools[0].function.args"),
        ([{**_tool(), "more": 1}], "tools[0].more"),
    ],
)
def test_a_tool_that_is_none_is_refused_by_its_path(tools: object, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        read_tools(tools)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("choice", "param"),
    [
        ("any", "tool_choice"),
        (3, "tool_choice"),
        ({"type": "custom"}, "tool_choice"),
        ({"type": "function"}, "tool_choice.function"),
        ({"type": "function", "function": {"name": "other"}}, "tool_choice.function.name"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": []}}, "tool_choice.allowed_tools.mode"),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}, "tool_choice.allowed_tools.tools"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [_tool()]}},
            "tool_choice.allowed_tools.tools[0].function.name",
        ),
    ],
)
def test_a_choice_that_is_none_is_refused_by_its_path(choice: object, param: str) -> None:
    with pytest.raises(RequestError) as refused:
        request(choice)
    assert (refused.value.status, refused.value.param) == (400, param)


def test_as_many_tools_as_openai_takes_are_taken_and_no_more() -> None:
    tools = [_tool(name=f"f{number}") for number in range(TOOLS_MAX + 1)]
    assert len(request(tools=tools[:-1]).tools) == TOOLS_MAX
    with pytest.raises(RequestError, match="must be at most 128"):
        request(tools=tools)


def test_what_cannot_be_enforced_is_refused_if_strict_and_any_object_if_not() -> None:
    asked = request()
    assert enforceable(asked, [None, None]) == asked
    loose = enforceable(asked, [None, "keyword not"])
    assert loose.callable[1].schema() == {"type": "object"} and loose.tools == asked.tools
    with pytest.raises(RequestError, match=r"tools\[0\].function.parameters: cannot be enforced: keyword not"):
        enforceable(asked, ["keyword not", None])


def test_call_ids_are_as_random_as_what_they_are_made_of() -> None:
    assert new_call_id(lambda size: bytes(range(size))) == "call_000102030405060708090a0b"
    short = short_call_id("call_000102030405060708090a0b")
    assert len(short) == 9 and short.isalnum() and short_call_id(short) == short and short_call_id("other") != short


def test_parameters_may_be_nested_as_deep_as_they_may_be_and_no_deeper() -> None:
    def nested(depth: int) -> dict[str, Any]:
        schema: dict[str, Any] = {}
        for _ in range(depth - 1):
            schema = {"items": schema}
        return schema

    assert request(tools=[_tool(parameters=nested(DEPTH_MAX))])
    for depth in (DEPTH_MAX + 1, 100_000):
        with pytest.raises(RequestError, match=r"tools\[0\].function.parameters: must be nested at most 64 deep"):
            request(tools=[_tool(parameters=nested(depth))])
