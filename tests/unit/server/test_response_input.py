"""Input of the Responses API: which messages its items are, which tools it has, and what is refused by which name."""

import json
from itertools import count
from typing import Any

import pytest
from openai.types.responses import ResponseItemList
from openai.types.responses.response_create_params import ResponseCreateParamsStreaming
from openai.types.responses.tool import Tool as ShownTool
from pydantic import TypeAdapter

from roost.errors import RequestError
from roost.server.body_reader import convert
from roost.server.compat import NO_OP_VALUES
from roost.server.response_input import called_as, input_items, input_messages, read_response_tools, renamed_tool_error
from roost.server.response_schema import (
    RESPONSE_UNSUPPORTED,
    TOP_LOGPROBS_MAX,
    InputTokensBody,
    ResponseBody,
    check_response,
    check_turn,
    response_echo,
    response_grammar,
    response_options,
)

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CALL = {"type": "function_call", "call_id": "c1", "name": "look_up", "arguments": '{"q": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "found"}
CALLED = {"id": "c1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": 1}'}}
FUNCTION = {"type": "function", "name": "look_up", "description": "finds", "parameters": SCHEMA, "strict": True}
CUSTOM = {"type": "custom", "name": "patch", "description": "a patch"}
GROUP = {"type": "namespace", "name": "files", "description": "files", "tools": [{"type": "function", "name": "read"}]}
HOSTED = {"type": "web_search"}


def text_part(text: str, kind: str = "input_text") -> dict[str, Any]:
    """A part of a message."""
    return {"type": kind, "text": text}


def body_of(**fields: Any) -> ResponseBody:
    """A body as the server reads it."""
    return convert(json.dumps(fields).encode(), ResponseBody)


def refused(call: Any, *args: Any, **kwargs: Any) -> tuple[int, str]:
    """Status and parameter of a refusal."""
    with pytest.raises(RequestError) as caught:
        call(*args, **kwargs)
    return caught.value.status, caught.value.param


# --- messages ---


def test_a_text_is_a_message_of_the_user_and_nothing_is_no_message() -> None:
    assert input_messages("hello") == [{"role": "user", "content": "hello"}]
    assert input_messages(None) == [] == input_messages([])


def test_messages_may_be_short_or_in_parts_and_the_developer_is_the_system() -> None:
    given = [
        {"role": "developer", "content": "be brief"},
        {"type": "message", "role": "user", "content": [text_part("a"), text_part("b")]},
        {"role": "assistant", "content": "yes", "phase": "final_answer"},
        {
            **{"type": "message", "id": "msg_1", "status": "completed", "role": "assistant"},
            "content": [
                {**text_part("I ", "output_text"), "annotations": [], "logprobs": []},
                {"type": "refusal", "refusal": "won't"},
            ],
        },
    ]
    assert input_messages(given) == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "ab"},
        {"role": "assistant", "content": "yes"},
        {"role": "assistant", "content": "I won't"},
    ]


def test_what_one_output_was_is_one_message_again() -> None:
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [text_part("hm", "reasoning_text")]}
    second = {**CALL, "call_id": "c2", "arguments": ""}
    given = [{"role": "user", "content": "go"}, thought, {"role": "assistant", "content": "Let me see."}, CALL, second]
    answered = {"type": "function_call_output", "call_id": "c2", "output": [text_part("o"), text_part("k")]}
    found = input_messages([*given, RESULT, answered, CALL])
    assert found == [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "hm",
            "tool_calls": [CALLED, {**CALLED, "id": "c2", "function": {"name": "look_up", "arguments": "{}"}}],
        },
        {"role": "tool", "content": "found", "tool_call_id": "c1"},
        {"role": "tool", "content": "ok", "tool_call_id": "c2"},
        {"role": "assistant", "content": "", "tool_calls": [CALLED]},
    ]


def test_reasoning_is_read_from_its_summary_if_that_is_all_there_is() -> None:
    summary = [text_part("one", "summary_text"), text_part("two", "summary_text")]
    item = {"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "gAAA"}
    empty = {"type": "reasoning", "summary": [], "encrypted_content": None}
    said = {"role": "assistant", "content": "so"}
    assert input_messages([item, empty, said]) == [{**said, "reasoning_content": "one\n\ntwo"}]
    assert input_messages([item]) == [{"role": "assistant", "content": "", "reasoning_content": "one\n\ntwo"}]
    assert input_messages([empty, said]) == [said]
    assert refused(input_messages, [{**empty, "encrypted_content": "gAAA"}]) == (400, "input[0].encrypted_content")


def test_custom_calls_are_calls_of_a_function_with_one_text() -> None:
    made = {"type": "custom_tool_call", "call_id": "c1", "name": "patch", "input": 'a "b"', "namespace": "files"}
    result = {"type": "custom_tool_call_output", "call_id": "c1", "output": "done"}
    answer, said = input_messages([made, result])
    assert answer["tool_calls"][0]["function"] == {"name": "files__patch", "arguments": '{"input": "a \\"b\\""}'}
    assert said == {"role": "tool", "content": "done", "tool_call_id": "c1"}


def test_a_call_that_was_cut_off_is_no_call() -> None:
    cut = {**CALL, "arguments": '{"q": ', "status": "incomplete"}
    assert input_messages([cut, {"role": "user", "content": "go on"}]) == [{"role": "user", "content": "go on"}]
    assert refused(input_messages, [{**cut, "status": "completed"}]) == (400, "input[0].arguments")


def test_a_result_is_of_an_earlier_call_where_these_are_known() -> None:
    assert input_messages([RESULT])[0]["tool_call_id"] == "c1"
    assert input_messages([RESULT], earlier_calls=["c1"]) == input_messages([RESULT])
    assert len(input_messages([CALL, RESULT], earlier_calls=())) == 2
    assert refused(input_messages, [RESULT], earlier_calls=()) == (400, "input[0].call_id")


def test_a_reference_to_an_item_is_refused_by_name() -> None:
    for given in ({"type": "item_reference", "id": "msg_1"}, {"id": "msg_1"}, {"id": "msg_1", "type": None}):
        assert refused(input_messages, [given]) == (400, "input[0].type")


@pytest.mark.parametrize(
    ("item", "param"),
    [
        ("text", "input[1]"),
        ({"role": "user"}, "input[1].content"),
        ({"role": "tool", "content": "x"}, "input[1].role"),
        ({"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_file", "file_id": "x"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "input[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_text"}]}, "input[1].content[0].text"),
        ({"role": "user", "content": [{**text_part("x"), "more": 1}]}, "input[1].content[0].more"),
        ({"role": "user", "content": "x", "name": "bob"}, "input[1].name"),
        ({"role": "user", "content": "x", "id": 3}, "input[1].id"),
        ({**CALL, "name": "no name"}, "input[1].name"),
        ({**CALL, "call_id": None}, "input[1].call_id"),
        ({**CALL, "arguments": {"q": 1}}, "input[1].arguments"),
        ({**CALL, "arguments": "[1]"}, "input[1].arguments"),
        ({**CALL, "arguments": '{"a":' + "[" * 70 + "]" * 70 + "}"}, "input[1].arguments"),
        ({**CALL, "async": True}, "input[1].async"),
        ({**RESULT, "output": [{"type": "input_image"}]}, "input[1].output[0].type"),
        ({**RESULT, "output": None}, "input[1].output"),
        ({"type": "computer_call", "call_id": "x"}, "input[1].type"),
        ({"type": "compaction", "encrypted_content": "x"}, "input[1].type"),
        ({"type": ["message"]}, "input[1].type"),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_path(item: Any, param: str) -> None:
    assert refused(input_messages, [{"role": "user", "content": "x"}, item]) == (400, param)


def test_fields_that_ask_for_nothing_are_taken() -> None:
    labels = {
        "id": "fc_1",
        "status": "completed",
        "caller": None,
        "async": False,
        "created_by": "me",
        "unheard_of": None,
    }
    assert input_messages([{**CALL, **labels}]) == [{"role": "assistant", "content": "", "tool_calls": [CALLED]}]


# --- items ---


def test_items_are_complete_and_such_as_the_client_reads_and_say_the_same() -> None:
    number = count()
    given: list[dict[str, Any]] = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [text_part("a")]},
        {"type": "reasoning", "summary": [], "content": [text_part("hm", "reasoning_text")]},
        {"role": "assistant", "content": "b"},
        {**CALL, "id": "fc_mine"},
        RESULT,
        {"type": "custom_tool_call", "call_id": "c2", "name": "patch", "input": "x"},
        {"type": "custom_tool_call_output", "call_id": "c2", "output": [text_part("y")]},
    ]
    items = input_items(given, lambda prefix: f"{prefix}_{next(number)}")
    assert [item["id"] for item in items] == ["msg_0", "msg_1", "rs_2", "msg_3", "fc_mine", "fco_4", "ctc_5", "ctco_6"]
    assert {item["status"] for item in items} == {"completed"}
    assert items[1]["content"] == [text_part("a")]
    assert items[3]["content"] == [{**text_part("b", "output_text"), "annotations": [], "logprobs": []}]
    page = {"object": "list", "data": items, "first_id": "msg_0", "last_id": "ctco_6", "has_more": False}
    read = ResponseItemList.model_validate(page)
    assert [item.type for item in read.data] == [item["type"] for item in items]
    assert input_messages(items) == input_messages(given)
    assert input_items(items, str) == items
    assert input_items("hi", str)[0]["content"] == [text_part("hi")]


# --- tools ---


def test_flat_tools_are_tools_of_a_chat_and_hosted_ones_are_left_out() -> None:
    grammar = {**CUSTOM, "name": "other", "format": {"type": "grammar", "syntax": "lark", "definition": "x"}}
    indirect = {**FUNCTION, "name": "other", "allowed_callers": ["programmatic"]}
    request, shown = read_response_tools([FUNCTION, HOSTED, CUSTOM, grammar, indirect, GROUP], "auto", False)
    assert request is not None and not request.is_parallel and not request.is_required
    assert [tool.name for tool in request.tools] == ["look_up", "patch", "files__read"]
    assert request.tools[0].parameters == SCHEMA and request.tools[0].strict
    assert request.tools[1].schema()["required"] == ["input"]
    assert [tool["name"] for tool in shown] == ["look_up", "patch", "files"]
    for tool in shown:
        TypeAdapter(ShownTool).validate_python(tool)
    known = called_as(shown)
    assert [(each.name, each.namespace, each.is_custom) for each in known.values()] == [
        ("look_up", None, False),
        ("patch", None, True),
        ("read", "files", False),
    ]
    assert read_response_tools([HOSTED]) == (None, []) == read_response_tools(None)


@pytest.mark.parametrize(
    ("choice", "names", "is_required"),
    [
        (None, ["look_up", "patch", "files__read"], False),
        ("none", [], False),
        ("required", ["look_up", "patch", "files__read"], True),
        ({"type": "function", "name": "look_up"}, ["look_up"], True),
        ({"type": "function", "name": "read"}, ["files__read"], True),
        ({"type": "function", "name": "read", "namespace": "files"}, ["files__read"], True),
        ({"type": "custom", "name": "patch"}, ["patch"], True),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [HOSTED, {"type": "custom", "name": "patch"}]},
            ["patch"],
            False,
        ),
        (
            {"type": "allowed_tools", "mode": "required", "tools": [{"type": "namespace", "name": "files"}]},
            ["files__read"],
            True,
        ),
        ({"type": "allowed_tools", "mode": "auto", "tools": [HOSTED]}, [], False),
    ],
)
def test_a_choice_says_which_tools_may_be_called(choice: Any, names: list[str], is_required: bool) -> None:
    request, _ = read_response_tools([HOSTED, FUNCTION, CUSTOM, GROUP], choice)
    assert request is not None
    assert ([tool.name for tool in request.callable], request.is_required) == (names, is_required)


@pytest.mark.parametrize(
    ("tools", "choice", "param"),
    [
        ([HOSTED], "required", "tool_choice"),
        ([HOSTED], {"type": "web_search_preview"}, "tool_choice.type"),
        ([FUNCTION], {"type": "mcp", "server_label": "x"}, "tool_choice.type"),
        ([FUNCTION], {"type": "function", "name": "else"}, "tool_choice.name"),
        ([FUNCTION], {"type": "custom", "name": "look_up"}, "tool_choice.name"),
        ([FUNCTION], {"type": "function", "function": {"name": "look_up"}}, "tool_choice.function"),
        ([FUNCTION], "any", "tool_choice"),
        ([FUNCTION], {"type": "allowed_tools", "mode": "x", "tools": [FUNCTION]}, "tool_choice.mode"),
        ([FUNCTION], {"type": "allowed_tools", "mode": "auto", "tools": []}, "tool_choice.tools"),
        ([FUNCTION], {"type": "allowed_tools", "mode": "required", "tools": [HOSTED]}, "tool_choice.tools"),
        (
            [FUNCTION],
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "x"}]},
            "tool_choice.tools[0].name",
        ),
        ([HOSTED, {**FUNCTION, "parameters": {"type": "array"}}], None, "tools[1].parameters.type"),
        ([HOSTED, {**FUNCTION, "name": "no name"}], None, "tools[1].name"),
        ([HOSTED, {**FUNCTION, "strict": "yes"}], None, "tools[1].strict"),
        ([HOSTED, {**FUNCTION, "more": 1}], None, "tools[1].more"),
        ([{"type": "function", "function": FUNCTION}], None, "tools[0].function"),
        ([FUNCTION, HOSTED, FUNCTION], None, "tools[2].name"),
        ([HOSTED, {**GROUP, "tools": [HOSTED, {"type": "function", "name": "?"}]}], None, "tools[1].tools[1].name"),
        ([HOSTED, {"name": "x"}], None, "tools[1].type"),
    ],
)
def test_a_wrong_tool_or_choice_is_refused_by_its_path(tools: Any, choice: Any, param: str) -> None:
    assert refused(read_response_tools, tools, choice) == (400, param)


def test_a_later_error_about_a_tool_gets_the_path_of_that_tool() -> None:
    error = RequestError(400, "tools[1].function.parameters", "cannot be enforced")
    assert renamed_tool_error(error, [HOSTED, FUNCTION, HOSTED, GROUP]).param == "tools[3].tools[0].parameters"
    assert renamed_tool_error(RequestError(400, "tools", "too many"), [FUNCTION]).param == "tools"


# --- bodies ---


def test_a_body_has_every_field_of_the_client() -> None:
    assert set(ResponseCreateParamsStreaming.__annotations__) <= set(ResponseBody.__struct_fields__)


@pytest.mark.parametrize("kind", RESPONSE_UNSUPPORTED, ids=lambda kind: kind.__name__)
def test_an_unsupported_field_is_taken_only_where_it_asks_for_nothing(kind: Any) -> None:
    within = {"TextControls": "text", "ResponseStreamOptions": "stream_options"}.get(kind.__name__)

    def check(name: str, value: Any) -> None:
        fields = {name: value} if within is None else {within: {name: value}, "stream": True}
        if kind is InputTokensBody:
            check_turn(convert(json.dumps(fields).encode(), InputTokensBody))
        else:
            check_response(body_of(**fields))

    for name in RESPONSE_UNSUPPORTED[kind]:
        for value in (None, *NO_OP_VALUES.get(name, ())):
            check(name, value)
        assert refused(check, name, "anything") == (400, name if within is None else f"{within}.{name}")


def test_what_agents_always_send_is_taken() -> None:
    body = body_of(
        model="m",
        instructions="be brief",
        input=[{"type": "message", "role": "user", "content": [text_part("hi")]}],
        tools=[FUNCTION, HOSTED],
        tool_choice="auto",
        parallel_tool_calls=False,
        reasoning={"effort": "xhigh", "summary": "auto"},
        store=False,
        stream=True,
        include=["reasoning.encrypted_content"],
        prompt_cache_key="thread",
        client_metadata={"a": "b"},
        text={"verbosity": "medium"},
        prompt_cache_retention="24h",
        truncation="disabled",
        service_tier="auto",
    )
    check_response(body)
    assert response_options(body).logprobs is None
    echo = response_echo(body, [])
    assert echo["reasoning"] == {"effort": None, "summary": None} and echo["store"] is False


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"truncation": "auto"}, "truncation"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"reasoning": {"context": "current_turn"}}, "reasoning.context"),
        ({"stream_options": {}}, "stream_options"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"previous_response_id": "a", "conversation": "b"}, "previous_response_id"),
        ({"background": True, "store": False}, "background"),
        ({"generate": False, "max_output_tokens": 3}, "max_output_tokens"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text.format.name"),
        ({"text": {"format": {"type": "text", "strict": True}}}, "text.format.strict"),
        ({"messages": []}, "messages"),
    ],
)
def test_what_a_response_cannot_do_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    assert refused(lambda: check_response(body_of(**fields))) == (400, param)


def test_options_keep_openais_meaning() -> None:
    body = body_of(max_output_tokens=5, temperature=0, seed=-1, stop="x", priority=2, timeout=3, cache_salt="s")
    options = response_options(body)
    assert (options.max_new_tokens, options.temperature, options.stop) == (5, 0, ("x",))
    assert (options.priority, options.timeout_s, options.cache_salt) == (2, 3, "s")
    assert response_echo(body_of(top_p=0), [])["top_p"] == 0  # as it was given
    for fields in ({"generate": False}, {"prompt_cache_options": {"prewarm": True}}):
        assert response_options(body_of(**fields)).max_new_tokens == 0
    assert response_options(body_of(generate=True)).max_new_tokens is None


def test_logprobs_are_asked_for_by_include_with_at_most_20_alternatives() -> None:
    asked = {"include": ["message.output_text.logprobs"]}
    assert response_options(body_of(**asked)).logprobs == 0
    most = body_of(**asked, top_logprobs=TOP_LOGPROBS_MAX)
    check_response(most)
    assert response_options(most).logprobs == 20
    assert refused(check_response, body_of(**asked, top_logprobs=21)) == (400, "top_logprobs")


def test_the_format_of_the_text_is_a_grammar() -> None:
    assert response_grammar(body_of()).value == response_grammar(body_of(text={"format": {"type": "text"}})).value == ""
    anything = response_grammar(body_of(text={"format": {"type": "json_object"}}))
    assert anything.param == "text.format" and anything.form(anything.value).startswith("start")
    format = {"type": "json_schema", "name": "n", "schema": SCHEMA}
    body = body_of(text={"format": format})
    check_response(body)
    grammar = response_grammar(body)
    assert (grammar.param, grammar.value) == ("text.format.schema", SCHEMA)
    assert response_echo(body, [])["text"]["format"] == {**format, "description": None, "strict": False}
