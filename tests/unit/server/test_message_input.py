"""Bodies of Anthropic's Messages API are read as an unchanged client sends them, and refused by name where needed."""

import json
from typing import Any

import pytest
from anthropic.types import message_count_tokens_params, message_create_params
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params

from roost.errors import RequestError
from roost.front.options import Options
from roost.server.body_reader import convert
from roost.server.message_input import input_messages, read_message_tools, renamed_tool_error
from roost.server.message_schema import (
    THINKING_TOKENS_MIN,
    CountTokensBody,
    MessagesBody,
    check_messages,
    message_grammar,
    message_options,
    shows_thinking,
)
from roost.tools.definitions import ToolRequest, enforceable

HELLO: list[dict[str, Any]] = [{"role": "user", "content": "Hello"}]
EPHEMERAL = {"type": "ephemeral", "ttl": "1h"}
FIND = {"name": "find", "description": "Finds.", "input_schema": {"type": "object", "properties": {"a": {}}}}
NOW = {"name": "now", "input_schema": {"type": "object", "properties": None, "required": None}}
WEB_SEARCH = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "find", "input": {"a": "ü"}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "found"}


def body_of(**given: Any) -> MessagesBody:
    """A checked body."""
    fields = {"model": "default", "max_tokens": 64, "messages": HELLO, **given}
    body = convert(json.dumps(fields).encode(), MessagesBody)
    check_messages(body)
    return body


def messages_of(*messages: dict[str, Any], **given: Any) -> list[dict[str, Any]]:
    body = body_of(messages=list(messages), **given)
    return input_messages(body.messages, body.system)


def refused(**given: Any) -> tuple[str, str]:
    """Path and reason of what is refused."""
    with pytest.raises(RequestError) as caught:
        body = body_of(**given)
        message_options(body)
        message_grammar(body)
        input_messages(body.messages, body.system)
        read_message_tools(body.tools, body.tool_choice)
    assert caught.value.status == 400
    return caught.value.param, caught.value.reason


def coding_agent_body() -> dict[str, Any]:
    """A body as Claude Code sends it, in its second turn."""
    return {
        "model": "default",
        "max_tokens": 32000,
        "stream": True,
        "temperature": 1,
        "metadata": {"user_id": "user_0f_account__session_5b1e"},
        "thinking": {"type": "enabled", "budget_tokens": 31999},
        "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        "output_config": {"effort": "high"},
        "betas": [],
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.42.f6a; cc_entrypoint=cli; cch=9c1;"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "# Rules", "cache_control": {**EPHEMERAL, "scope": "global"}},
        ],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "<system-reminder>\nBe brief.\n</system-reminder>"},
                    {"type": "text", "text": "What is in a.txt?", "cache_control": EPHEMERAL},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "I read it.", "signature": "cm9vc3Q="},
                    {"type": "text", "text": "Let me see."},
                    {**CALL, "caller": {"type": "direct"}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {**RESULT, "is_error": False, "cache_control": EPHEMERAL},
                    {"type": "text", "text": "Go on."},
                ],
            },
        ],
        "tools": [
            {
                **FIND,
                "input_schema": {
                    "$schema": "https://json-schema.org/draft/2020-12/schema",
                    "type": "object",
                    "properties": {"a": {"type": "string", "description": "what"}},
                    "required": ["a"],
                    "additionalProperties": False,
                },
                "eager_input_streaming": True,
                "strict": False,
                "defer_loading": True,
                "input_examples": [{"a": "b"}],
                "allowed_callers": ["direct"],
                "cache_control": EPHEMERAL,
            },
            {"type": "custom", **NOW},
            WEB_SEARCH,
        ],
    }


def test_what_a_coding_agent_sends_is_a_conversation_with_tools() -> None:
    body = convert(json.dumps(coding_agent_body()).encode(), MessagesBody)
    check_messages(body)
    assert message_options(body) == Options(max_new_tokens=32000, temperature=1)
    assert message_grammar(body).value == "" and shows_thinking(body)
    assert input_messages(body.messages, body.system) == [
        {"role": "system", "content": "You are a coding agent.\n# Rules"},
        {"role": "user", "content": "<system-reminder>\nBe brief.\n</system-reminder>\nWhat is in a.txt?"},
        {
            "role": "assistant",
            "content": "Let me see.",
            "reasoning_content": "I read it.",
            "tool_calls": [
                {"id": "toolu_1", "type": "function", "function": {"name": "find", "arguments": '{"a":"ü"}'}}
            ],
        },
        {"role": "tool", "content": "found", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "Go on."},
    ]
    tools = read_message_tools(body.tools, body.tool_choice)
    assert tools is not None and [tool.name for tool in tools.tools] == ["find", "now"]
    assert tools.tools[0].parameters == coding_agent_body()["tools"][0]["input_schema"]
    assert tools.tools[1].parameters == {"type": "object"} and tools.is_parallel and not tools.is_required


def test_the_same_body_is_counted() -> None:
    only_generated = ("max_tokens", "stream", "temperature", "metadata")
    counted = {name: value for name, value in coding_agent_body().items() if name not in only_generated}
    body = convert(json.dumps(counted).encode(), CountTokensBody)
    check_messages(body)
    assert len(input_messages(body.messages, body.system)) == 5


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (MessagesBody, message_create_params.MessageCreateParamsStreaming),
        (MessagesBody, beta_create_params.MessageCreateParamsStreaming),
        (CountTokensBody, message_count_tokens_params.MessageCountTokensParams),
        (CountTokensBody, beta_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_field_that_the_client_knows_has_its_own_answer(kind: type, params: Any) -> None:
    assert set(params.__annotations__) - set(kind.__struct_fields__) == set()  # type: ignore[attr-defined]


# --- options ---


def test_options_are_those_of_the_body() -> None:
    body = body_of(stop_sequences=["END"], top_p=0.9, top_k=0, min_p=0.1, seed=3, priority=2, timeout=5, cache_salt="s")
    expected = Options(
        max_new_tokens=64, stop=("END",), top_p=0.9, min_p=0.1, seed=3, priority=2, timeout_s=5, cache_salt="s"
    )
    assert message_options(body) == expected


def test_a_format_is_a_grammar_by_either_of_its_names() -> None:
    format = {"type": "json_schema", "schema": {"type": "object"}}
    within = message_grammar(body_of(output_config={"format": format}))
    older = message_grammar(body_of(output_format=format))
    assert within.param == "output_config.format.schema" and older.param == "output_format.schema"
    assert within.form(within.value) == older.form(older.value) != ""
    assert refused(output_config={"format": format}, output_format=format)[0] == "output_format"
    assert refused(output_config={"format": {**format, "type": "text"}})[0] == "output_config.format.type"


@pytest.mark.parametrize(
    "given",
    [
        {"context_management": None},
        {"context_management": {"edits": []}},
        {"context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": {"type": "all"}}]}},
        {"service_tier": "standard_only", "speed": "standard", "mcp_servers": [], "betas": [], "container": None},
        {"diagnostics": {"previous_message_id": None}, "user_profile_id": "uprof_1", "cache_control": EPHEMERAL},
        {"thinking": {"type": "adaptive", "display": "summarized"}, "stop_sequences": []},
        {"thinking": {"type": "disabled"}, "metadata": {"user_id": None}, "max_tokens": 0},
    ],
)
def test_what_asks_for_nothing_is_accepted(given: dict[str, Any]) -> None:
    body_of(**given)


@pytest.mark.parametrize(
    ("given", "path"),
    [
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits[0].type"),
        ({"context_management": {"edits": [{"type": "clear_thinking_20251015"}]}}, "context_management.edits[0].keep"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"speed": "fast"}, "speed"),
        ({"container": "c"}, "container"),
        ({"inference_geo": "eu"}, "inference_geo"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers"),
        ({"diagnostics": {"previous_message_id": "msg_1"}}, "diagnostics"),
        ({"output_config": {"effort": "huge"}}, "output_config.effort"),
        ({"output_config": {"task_budget": {"type": "tokens", "total": 9}}}, "output_config.task_budget"),
        ({"thinking": {"type": "often"}}, "thinking.type"),
        ({"thinking": {"type": "enabled"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "budget_tokens": 2048}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "adaptive", "display": "loud"}}, "thinking.display"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"n": 2}, "n"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(given: dict[str, Any], path: str) -> None:
    assert refused(**given)[0] == path


def test_a_budget_of_thoughts_is_less_than_the_answer_and_no_less_than_documented() -> None:
    body_of(thinking={"type": "enabled", "budget_tokens": THINKING_TOKENS_MIN}, max_tokens=THINKING_TOKENS_MIN + 1)
    few = {"type": "enabled", "budget_tokens": THINKING_TOKENS_MIN - 1}
    assert refused(thinking=few, max_tokens=4096)[1] == "must be at least 1024, got 1023"
    many = {"type": "enabled", "budget_tokens": 4096}
    assert refused(thinking=many, max_tokens=4096)[1] == "must be less than max_tokens (4096), got 4096"


def test_thoughts_are_shown_unless_the_client_wants_none() -> None:
    assert shows_thinking(body_of()) and shows_thinking(body_of(thinking={"type": "adaptive"}))
    assert not shows_thinking(body_of(thinking={"type": "adaptive", "display": "omitted"}))


# --- messages ---


def test_only_the_line_that_changes_with_every_request_leaves_the_system_text() -> None:
    header = "X-Anthropic-Billing-Header: cch=1;"

    def system(*texts: str) -> str:
        found = messages_of(*HELLO, system=[{"type": "text", "text": text} for text in texts])
        return str(found[0]["content"]) if found[0]["role"] == "system" else ""

    assert system(header, "Be brief.") == "Be brief." and system(header) == ""
    assert system(f"{header}\nBe brief.") == "Be brief."
    assert system("Be brief.", header) == f"Be brief.\n{header}"
    assert messages_of(*HELLO, system="Be brief.")[0] == {"role": "system", "content": "Be brief."}
    assert messages_of(*HELLO, system="") == HELLO


def test_messages_of_one_side_are_one_turn() -> None:
    said = messages_of(
        {"role": "user", "content": "One"},
        {"role": "user", "content": "two"},
        {"role": "assistant", "content": "Th"},
        {"role": "assistant", "content": [{"type": "text", "text": "ree"}, CALL]},
        {"role": "user", "content": [{"type": "text", "text": "four"}, RESULT]},
        {"role": "user", "content": "five"},
        {"role": "system", "content": "Be brief.", "output_config": {"effort": "low"}},
    )
    assert [(each["role"], each["content"]) for each in said] == [
        ("user", "One\ntwo"),
        ("assistant", "Three"),
        ("tool", "found"),
        ("user", "four\nfive"),
        ("system", "Be brief."),
    ]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"content": None}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}, "a\nb"),
        ({"content": [{"type": "tool_reference", "tool_name": "find"}]}, "find"),
        ({"is_error": True}, "Error: found"),
        ({"is_error": True, "content": "Error: no file"}, "Error: no file"),
    ],
)
def test_what_a_tool_returned_is_its_text(given: dict[str, Any], text: str) -> None:
    said = messages_of(
        *HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [{**RESULT, **given}]}
    )
    assert said[-1] == {"role": "tool", "content": text, "tool_call_id": "toolu_1"}


def test_thoughts_that_were_not_shown_are_none() -> None:
    hidden = [
        {"type": "thinking", "thinking": "", "signature": "x"},
        {"type": "redacted_thinking", "data": ""},
        {"type": "text", "text": "Hi", "citations": None},
    ]
    assert messages_of(*HELLO, {"role": "assistant", "content": hidden}, *HELLO)[1] == {
        "role": "assistant",
        "content": "Hi",
    }


@pytest.mark.parametrize(
    ("message", "path"),
    [
        ({"role": "tool", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": []}, "messages[1].content"),
        ({"role": "assistant", "content": "The answer is ("}, "messages[1]"),
        ({"role": "user", "content": "x", "output_config": {}}, "messages[1].output_config"),
        ({"role": "system", "content": "x", "clear_at": "next_user_message"}, "messages[1].clear_at"),
        ({"role": "user", "content": [{"type": "image", "source": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "document", "source": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [CALL]}, "messages[1].content[0].type"),
        ({"role": "assistant", "content": [RESULT]}, "messages[1].content[0].type"),
        ({"role": "assistant", "content": [{"type": "server_tool_use"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "text", "text": "a", "b": 1}]}, "messages[1].content[0].b"),
        ({"role": "user", "content": [RESULT]}, "messages[1].content[0].tool_use_id"),
        ({"role": "assistant", "content": [{**CALL, "input": "{}"}]}, "messages[1].content[0].input"),
        ({"role": "assistant", "content": [{**CALL, "name": "a b"}]}, "messages[1].content[0].name"),
        (
            {"role": "assistant", "content": [{**CALL, "caller": {"type": "code_execution_20250825"}}]},
            "messages[1].content[0].caller",
        ),
        ({"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}, "messages[1].content[0].data"),
        (
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": "x"}]},
            "messages[1].content[0].cache_control",
        ),
    ],
)
def test_a_message_that_cannot_be_read_is_refused_by_its_path(message: dict[str, Any], path: str) -> None:
    assert refused(messages=[*HELLO, message])[0] == path


def test_what_is_in_a_tools_result_is_refused_by_its_path() -> None:
    image = {**RESULT, "content": [{"type": "text", "text": "a"}, {"type": "image", "source": {}}]}
    messages = [*HELLO, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [image]}]
    assert refused(messages=messages)[0] == "messages[2].content[0].content[1].type"
    assert refused(system=[{"type": "image"}])[0] == "system[0].type"


def test_a_conversation_that_is_only_counted_may_end_with_an_answer() -> None:
    body = body_of(messages=[*HELLO, {"role": "assistant", "content": "Hi"}])
    assert input_messages(body.messages, may_end_with_answer=True)[-1] == {"role": "assistant", "content": "Hi"}


# --- tools ---


def tools_of(tools: list[dict[str, Any]], choice: dict[str, Any] | None = None) -> ToolRequest:
    found = read_message_tools(tools, choice)
    assert found is not None
    return found


def test_a_choice_says_what_may_be_called() -> None:
    assert not tools_of([FIND, NOW], {"type": "auto"}).is_required
    assert tools_of([FIND, NOW], {"type": "any"}).is_required
    assert tools_of([FIND, NOW], {"type": "none"}).callable == ()
    named = tools_of([FIND, NOW], {"type": "tool", "name": "now"})
    assert named.is_required and [tool.name for tool in named.callable] == ["now"] and len(named.tools) == 2
    assert not tools_of([FIND], {"type": "auto", "disable_parallel_tool_use": True}).is_parallel
    assert tools_of([FIND], {"type": "auto", "disable_parallel_tool_use": False}).is_parallel


def test_tools_that_only_a_hosted_service_runs_are_left_out_unless_they_are_asked_for() -> None:
    only_from_code = {**NOW, "allowed_callers": ["code_execution_20260120"]}
    assert [tool.name for tool in tools_of([WEB_SEARCH, FIND, only_from_code]).tools] == ["find"]
    assert read_message_tools([WEB_SEARCH], {"type": "auto"}) is None
    assert tools_of([WEB_SEARCH, FIND], {"type": "tool", "name": "find"}).is_required
    for choice in ({"type": "any"}, {"type": "tool", "name": "web_search"}):
        assert refused(tools=[FIND, WEB_SEARCH], tool_choice=choice)[0] == "tools[1].type"


@pytest.mark.parametrize(
    ("tools", "choice", "path"),
    [
        ([WEB_SEARCH, {**FIND, "name": "a b"}], None, "tools[1].name"),
        ([WEB_SEARCH, FIND, FIND], None, "tools[2].name"),
        ([WEB_SEARCH, FIND, {**NOW, "input_schema": {"type": "array"}}], None, "tools[2].input_schema.type"),
        ([{**FIND, "input_schema": "{}"}], None, "tools[0].input_schema"),
        ([{"name": "find"}], None, "tools[0].input_schema"),
        ([{**FIND, "strict": "yes"}], None, "tools[0].strict"),
        ([{**FIND, "parameters": {}}], None, "tools[0].parameters"),
        ([{"type": "function", "function": FIND}], None, "tools[0].type"),
        ([FIND], {"type": "required"}, "tool_choice.type"),
        ([FIND], {"type": "auto", "name": "find"}, "tool_choice.name"),
        ([FIND], {"type": "tool", "name": "other"}, "tool_choice.name"),
        ([FIND], {"type": "auto", "disable_parallel_tool_use": 1}, "tool_choice.disable_parallel_tool_use"),
        (None, {"type": "any"}, "tool_choice"),
    ],
)
def test_a_tool_that_cannot_be_read_is_refused_by_its_path(tools: Any, choice: Any, path: str) -> None:
    assert refused(tools=tools, tool_choice=choice)[0] == path


def test_a_schema_that_cannot_be_enforced_has_the_path_that_the_client_knows() -> None:
    tools = [WEB_SEARCH, {**FIND, "strict": True}]
    with pytest.raises(RequestError) as caught:
        enforceable(tools_of(tools), ["no"])
    assert renamed_tool_error(caught.value, tools).param == "tools[1].input_schema"
    other = RequestError(400, "messages", "no")
    assert renamed_tool_error(other, tools) is other
