"""A machine finds the same in an output however it is cut, loses nothing of it, and takes anything."""

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from roost.tools.definitions import Tool
from roost.tools.events import CallArguments, CallClosed, CallOpened, Content
from roost.tools.machine import Machine
from tests.unit.tools.written import (
    BY_NAME,
    FIND,
    NOW,
    THINKS,
    THINKS_AT_ONCE,
    calls,
    complete,
    content,
    read,
    request,
    thought,
    written,
)

FORMATS = sorted(BY_NAME)
ANYWHERE = [name for name in FORMATS if BY_NAME[name].marker and not BY_NAME[name].first]
PARTS = [
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "find",
        "now-2",
        ">",
        "<parameter=count>",
        "</parameter>",
        "</function>",
    ),
    *("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", '{"name": "find", ', '"arguments": ', '"parameters": '),
    *(
        "{",
        "}",
        "[",
        "]",
        "(",
        ")",
        '"',
        "'",
        "\\",
        ",",
        ":",
        ";",
        "=",
        "1",
        "-2.5e3",
        "true",
        "None",
        "\\u12",
        "é🦉",
        "\n",
        " ",
    ),
    *('{"count": 1, "text": "a"}', "[find(count=1", "\ud800", "<think>", "</think>", "<"),
    *(written(name, FIND, NOW) for name in FORMATS),
]
any_output = st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=12).map("".join)


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_found_with_their_arguments_as_json(name: str) -> None:
    assert complete(read(name, [written(name, FIND, NOW)])) == [FIND, NOW]
    assert content(read(name, [written(name, FIND, NOW) + "\n"])) == ""


@pytest.mark.parametrize("name", ANYWHERE)
def test_text_may_come_before_calls_and_whitespace_between_is_layout(name: str) -> None:
    events = read(name, ["  Let me see.\n\n" + written(name, NOW) + "\n"])
    assert content(events) == "  Let me see." and complete(events) == [NOW]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("reasoning", [None, THINKS, THINKS_AT_ONCE], ids=["plain", "thinks", "thinks at once"])
def test_an_output_cut_at_every_character_reads_the_same(name: str, reasoning: Any) -> None:
    text = ("" if reasoning is None else "<think>") + "\nwell\n\n</think>\n\n" + written(name, FIND, NOW) + "\nso"
    text = text.removeprefix("<think>") if reasoning is THINKS_AT_ONCE else text
    whole = read(name, [text], reasoning=reasoning)
    assert read(name, list(text), reasoning=reasoning) == whole
    for cut in range(len(text)):
        assert read(name, [text[:cut], text[cut:]], reasoning=reasoning) == whole


@given(
    name=st.sampled_from(FORMATS), text=any_output, sizes=st.lists(st.integers(1, 9), min_size=1), thinks=st.booleans()
)
def test_anything_is_read_without_an_error_and_the_same_in_any_pieces(
    name: str, text: str, sizes: list[int], thinks: bool
) -> None:
    pieces, start = [], 0
    while start < len(text):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(text[start : start + size])
        start += size
    reasoning = THINKS if thinks else None
    whole = read(name, [text], reasoning=reasoning)
    assert read(name, pieces, reasoning=reasoning) == whole
    for _, arguments, is_complete in calls(whole):
        assert not is_complete or isinstance(json.loads(arguments), dict)


@given(name=st.sampled_from(FORMATS), text=any_output)
@example(name="hermes", text="a\n<tool_call>\n<tool_call>\n{} </tool_call> ")
def test_what_calls_no_tool_is_content_word_for_word(name: str, text: str) -> None:
    assert content(read(name, [text], tools=[Tool(name="other")])) == text


@given(
    name=st.sampled_from(ANYWHERE),
    parts=st.lists(st.one_of(st.sampled_from([FIND, NOW]), st.from_regex("[a-z][a-z <{}=\\n]*[a-z]", fullmatch=True))),
)
def test_text_and_calls_in_any_order_are_both_found(name: str, parts: list[Any]) -> None:
    if BY_NAME[name].between is None:  # nothing follows a block of calls
        parts = [*(part for part in parts if isinstance(part, str)), NOW]
    written_parts = (part if isinstance(part, str) else "\n" + written(name, part) for part in parts)
    events = read(name, ["".join(written_parts)])
    assert complete(events) == [part for part in parts if not isinstance(part, str)]
    assert content(events) == "".join(part for part in parts if isinstance(part, str))


@given(text=any_output)
def test_without_tools_everything_is_content(text: str) -> None:
    assert content(read(None, list(text))) == text


@pytest.mark.parametrize("name", FORMATS)
def test_a_call_that_is_cut_keeps_the_arguments_that_came(name: str) -> None:
    text = written(name, ("find", {"count": 12, "text": "abcdef"}))
    events = read(name, [text[: text.index("def")]])
    ((called, arguments, is_complete),) = calls(events)
    assert called == "find" and arguments.endswith('"text": "abc') and not is_complete
    assert content(events) == ""


def test_what_follows_broken_arguments_is_content() -> None:
    events = read("hermes", ['<tool_call>\n{"name": "find", "arguments": {"count": 1 2}}\n</tool_call> oh'])
    assert calls(events) == [("find", '{"count": 1 ', False)]
    assert content(events) == "2}}\n</tool_call> oh"


def test_arguments_come_as_they_are_written() -> None:
    machine = Machine(format=BY_NAME["hermes"], tools=request().callable, new_id=lambda: "call_1")
    assert machine.feed('<tool_call>\n{"name": "find", "arguments"') == []
    assert machine.feed(": {") == [CallOpened(index=0, id="call_1", name="find"), CallArguments(index=0, text="{")]
    assert machine.feed('"text": "ab') == [CallArguments(index=0, text='"text": "ab')]
    assert machine.feed('c"}') == [CallArguments(index=0, text='c"}'), CallClosed(index=0, is_complete=True)]
    assert machine.feed("}\n</tool_call>\n") == machine.end() == [] and machine.has_calls


def test_a_text_between_tags_comes_as_it_is_written() -> None:
    machine = Machine(format=BY_NAME["qwen3-coder"], tools=request().callable, new_id=lambda: "call_1")
    machine.feed("<tool_call>\n<function=find>\n<parameter=text>\n")
    assert machine.feed('say "hi" <b') == [CallArguments(index=0, text='say \\"hi\\" <b')]
    assert machine.feed("\n") == []  # it may belong to the closing tag


@pytest.mark.parametrize("first", ['{"name": "find"', "[find(", "{}", "[1]"])
@pytest.mark.parametrize("name", ["llama3-json", "llama-pythonic"])
def test_where_calls_begin_an_answer_they_do_not_begin_later(name: str, first: str) -> None:
    assert content(read(name, ["Well: " + written(name, NOW)])) == "Well: " + written(name, NOW)
    assert content(read(name, [first + "?" + written(name, NOW)], tools=[])) == first + "?" + written(name, NOW)


def test_a_marker_brings_llamas_calls_anywhere() -> None:
    events = read("llama3-json", ["Well: <|python_tag|>" + written("llama3-json", NOW)])
    assert content(events) == "Well:" and complete(events) == [NOW]


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("'a\\'\\n\\x41\\u00e9\\q'", "a'\nAé\\q"),
        ("[1, (2.5, None,), {'k': [True, false]}, []]", [1, [2.5, None], {"k": [True, False]}, []]),
        ("-1_000", -1000),
        ("0x1f", 31),
        (".5", 0.5),
        ("{}", {}),
    ],
)
def test_python_literals_become_json(value: str, found: object) -> None:
    tools = [Tool(name="f")]
    assert complete(read("llama-pythonic", [f"[f(a={value}, b=1,)]"], tools=tools)) == [("f", {"a": found, "b": 1})]


@pytest.mark.parametrize(
    "value", ["x", "1 2", "'a", "[1", "{1: 2}", "f'x'", "1__0", "nan", "1e999x", "(1;)", "'\\U00110000'"]
)
def test_what_is_no_python_literal_breaks_the_call_off(value: str) -> None:
    events = read("llama-pythonic", [f"[f(a={value})]"], tools=[Tool(name="f")])
    assert [is_complete for *_, is_complete in calls(events)] == [False]


@pytest.mark.parametrize(
    ("schema", "value", "found"),
    [
        ({"type": "string"}, "12", "12"),
        ({"type": "integer"}, "12", 12),
        ({"type": "boolean"}, "True", True),
        ({"type": ["string", "null"]}, "null", None),
        ({"type": ["string", "null"]}, "12", "12"),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, "None", None),
        ({"enum": ["a", 1]}, "1", 1),
        ({"$ref": "#/$defs/Colour"}, "red", "red"),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({"type": "integer"}, "many", "many"),
        ({}, '"quoted"', '"quoted"'),
        ({}, "\n two\nlines \n", "\n two\nlines \n"),
    ],
)
def test_a_value_between_tags_is_what_its_schema_says(schema: dict[str, Any], value: str, found: object) -> None:
    defs = {"Colour": {"type": "string", "enum": ["red"]}}
    tool = Tool(name="f", parameters={"type": "object", "properties": {"a": schema}, "$defs": defs})
    text = f"<tool_call>\n<function=f>\n<parameter=a>\n{value}\n</parameter>\n</function>\n</tool_call>"
    assert complete(read("qwen3-coder", [text], tools=[tool])) == [("f", {"a": found})]


def test_reasoning_is_told_from_the_answer() -> None:
    events = read("hermes", ["<think>\na <b \n</think>\n\nHi " + written("hermes", NOW)], reasoning=THINKS)
    assert (thought(events), content(events), complete(events)) == ("a <b", "Hi", [NOW])
    assert thought(read(None, ["well</think>so"], reasoning=THINKS_AT_ONCE)) == "well"
    assert content(read(None, ["well</think>so"], reasoning=THINKS)) == "well</think>so"
    assert thought(read(None, ["<think>cut </thi"], reasoning=THINKS)) == "cut </thi"


def test_calls_inside_of_reasoning_are_reasoning() -> None:
    text = "<think>" + written("hermes", NOW) + "</think>ok"
    events = read("hermes", [text], reasoning=THINKS)
    assert thought(events) == written("hermes", NOW) and events[-1] == Content(text="ok")


def test_a_call_has_as_much_whitespace_as_it_may_and_no_more() -> None:
    for blanks, num_calls in ((64, 1), (65, 0)):
        text = written("hermes", NOW).replace(": ", ":" + " " * blanks)
        assert len(calls(read("hermes", [text]))) == num_calls


def _tags(key: str, value: str) -> str:
    return f"<tool_call><function=f><parameter={key}>{value}</parameter></function></tool_call>"


def test_a_parameter_has_a_name_as_long_as_it_may_and_no_longer() -> None:
    for length, is_complete in ((256, True), (257, False)):
        events = read("qwen3-coder", [_tags("k" * length, "1")], tools=[Tool(name="f", parameters={})])
        assert [each[-1] for each in calls(events)] == [is_complete]


def test_a_parameter_is_found_through_as_many_references_as_may_be_and_no_more() -> None:
    for num_refs, found in ((8, "1"), (9, 1)):
        defs: dict[str, Any] = {f"d{index}": {"$ref": f"#/$defs/d{index + 1}"} for index in range(num_refs - 1)}
        defs[f"d{num_refs - 1}"] = {"type": "string"}
        tool = Tool(name="f", parameters={"properties": {"a": {"$ref": "#/$defs/d0"}}, "$defs": defs})
        assert complete(read("qwen3-coder", [_tags("a", "1")], tools=[tool])) == [("f", {"a": found})]
