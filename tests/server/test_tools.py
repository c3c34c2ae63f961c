"""Tools over HTTP, with OpenAI's client: calls by their schemas, their results in the history, and in sessions."""

import json
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.server.conftest import StartTiny
from tests.support.server_process import Server
from tests.support.tiny_folder import write_model
from tests.support.tool_templates import HERMES, WITH_TOOLS
from tests.unit.tools.test_model_formats import formats_of, language

MODEL = "SmolLM2-135M-Instruct"
ASKED: Any = [{"role": "user", "content": "What is 17 plus 25? Use the add function."}]
NUMBERS = {"type": "object", "properties": {"a": {"type": "number"}, "b": {"type": "number"}}, "required": ["a", "b"]}
PARAMETERS = {**NUMBERS, "additionalProperties": False}
ADD = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now"}}
CALL_ADD = {"type": "function", "function": {"name": "add"}}
TOOLS: Any = [ADD, NOW]


def asked(**more: Any) -> dict[str, Any]:
    """A request with tools."""
    return {"model": MODEL, "messages": ASKED, "tools": TOOLS, "temperature": 0, "max_tokens": 120, **more}


def test_a_named_tool_is_called_once_by_its_schema(client: openai.OpenAI) -> None:
    (choice,) = client.chat.completions.create(**asked(tool_choice=CALL_ADD)).choices
    (call,) = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert call.type == "function" and call.function.name == "add" and call.id.startswith("call_")
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


@pytest.mark.parametrize("choice", ["required", "auto", "none"])
def test_a_stream_adds_up_to_the_whole_answer(client: openai.OpenAI, choice: str) -> None:
    whole = client.chat.completions.create(**asked(tool_choice=choice, parallel_tool_calls=True)).choices[0]
    with client.chat.completions.stream(**asked(tool_choice=choice, parallel_tool_calls=True)) as stream:
        streamed = stream.get_final_completion().choices[0]
    assert streamed.finish_reason == whole.finish_reason and streamed.message.content == whole.message.content
    pairs = [[(c.function.name, c.function.arguments) for c in m.message.tool_calls or []] for m in (streamed, whole)]
    assert pairs[0] == pairs[1] and bool(pairs[0]) == (choice == "required")


@pytest.mark.parametrize("seed", range(4))
def test_required_calls_are_valid_whatever_is_drawn(client: openai.OpenAI, seed: int) -> None:
    drawn = asked(tool_choice="required", temperature=1.2, seed=seed, parallel_tool_calls=seed % 2 == 0)
    (choice,) = client.chat.completions.create(**drawn).choices
    if choice.finish_reason == "length":
        return
    calls = choice.message.tool_calls or []
    assert choice.finish_reason == "tool_calls" and len(calls) >= 1 and (seed % 2 == 0 or len(calls) == 1)
    for call in calls:
        assert call.type == "function"
        empty: dict[str, Any] = {"type": "object", "maxProperties": 0}
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS if call.function.name == "add" else empty)


def test_an_agents_loop_goes_on_with_the_messages_that_came_back(client: openai.OpenAI) -> None:
    messages = [*ASKED]
    first = client.chat.completions.create(**asked(tool_choice=CALL_ADD)).choices[0].message
    (call,) = first.tool_calls or []
    messages += [first.model_dump(), {"role": "tool", "tool_call_id": call.id, "content": "42"}]
    answer = client.chat.completions.create(**asked(messages=messages)).choices[0]
    assert answer.finish_reason == "stop" and "42" in (answer.message.content or "")


def test_an_agents_loop_in_a_session_sends_only_what_is_new(rested: Server, client: openai.OpenAI) -> None:
    rested.post("/v1/sessions", {"id": "agent"})
    session: Any = {"extra_body": {"session_id": "agent"}}
    first = client.chat.completions.create(**asked(tool_choice=CALL_ADD), **session)
    (call,) = first.choices[0].message.tool_calls or []
    result: Any = [{"role": "tool", "tool_call_id": call.id, "content": "42"}]
    second = client.chat.completions.create(**asked(messages=result), **session)
    assert "42" in (second.choices[0].message.content or "")
    assert second.usage is not None and second.usage.prompt_tokens_details is not None and first.usage is not None
    assert second.usage.prompt_tokens_details.cached_tokens == first.usage.total_tokens
    other = {**asked(messages=ASKED), "tools": [NOW], "session_id": "agent"}
    refused = rested.post("/v1/chat/completions", other)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "tools"
    rested.http.delete("/v1/sessions/agent")


def test_tools_beside_a_response_format_are_called_or_the_answer_keeps_to_it(client: openai.OpenAI) -> None:
    format: Any = {"type": "json_schema", "json_schema": {"name": "sum", "schema": {"type": "integer"}}}
    for choice, reason in (("none", "stop"), ("required", "tool_calls")):
        (answer,) = client.chat.completions.create(**asked(tool_choice=choice, response_format=format)).choices
        assert answer.finish_reason == reason
        if reason == "stop":
            assert isinstance(json.loads(answer.message.content or ""), int)
        else:
            assert answer.message.tool_calls


def test_log_probabilities_come_with_calls_each_once(client: openai.OpenAI) -> None:
    scored = asked(tool_choice=CALL_ADD, logprobs=True, top_logprobs=1)
    whole = client.chat.completions.create(**scored)
    assert whole.choices[0].logprobs is not None and whole.usage is not None
    tokens = [entry.token for entry in whole.choices[0].logprobs.content or []]
    assert len(tokens) == whole.usage.completion_tokens
    chunks = list(client.chat.completions.create(**scored, stream=True))
    streamed = [e.token for c in chunks if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert streamed == tokens


def test_tools_are_counted_where_they_are_tokenised(server: Server) -> None:
    bare, listed = (
        server.post("/tokenize", {"messages": ASKED, **more}).json()["count"] for more in ({}, {"tools": TOOLS})
    )
    answer = server.post("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS, "max_tokens": 1}).json()
    assert bare < listed == answer["usage"]["prompt_tokens"]
    assert server.post("/tokenize", {"prompt": "a", "tools": TOOLS}).json()["error"]["param"] == "tools"


UNENFORCED = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type", "must be 'function'"),
    ({"tools": [ADD, ADD]}, "tools[1].function.name", "another tool's name"),
    ({"tool_choice": "any"}, "tool_choice", "must be none, auto, required"),
    ({"tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice.function.name", "one of tools"),
    ({"tools": None, "tool_choice": "required"}, "tool_choice", "needs tools"),
    ({"functions": [{"name": "add"}]}, "functions", "their newer name is `tools`"),
    ({"ignore_eos": True}, "ignore_eos", "tools"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": UNENFORCED}}]},
        "tools[0].function.parameters",
        "uniqueItems",
    ),
    ({"messages": [*ASKED, {"role": "tool", "content": "42"}]}, "messages[1].tool_call_id", "must be the id"),
    (
        {"messages": [*ASKED, {"role": "tool", "content": "42", "tool_call_id": "call_1"}]},
        "messages[1].tool_call_id",
        "earlier call",
    ),
    ({"messages": [*ASKED, {"role": "function", "content": "42"}]}, "messages[1].role", "assistant or tool"),
    ({"messages": [{"role": "assistant"}]}, "messages[0].content", "is required"),
]


@pytest.mark.parametrize(("field", "param", "told"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_cannot_be_honoured_is_refused_by_name(
    rested: Server, field: dict[str, Any], param: str, told: str
) -> None:
    refused = rested.post("/v1/chat/completions", {"messages": ASKED, "tools": TOOLS, **field})
    assert refused.status_code == 400, refused.text
    error = refused.json()["error"]
    assert error["param"] == param and told in error["message"], error


def test_a_tool_that_is_not_strict_may_be_called_with_any_object(client: openai.OpenAI) -> None:
    loose: Any = [{"type": "function", "function": {"name": "f", "parameters": UNENFORCED}}]
    (choice,) = client.chat.completions.create(**asked(tools=loose, tool_choice="required", max_tokens=60)).choices
    (call, *_) = choice.message.tool_calls or []
    assert call.type == "function" and call.function.arguments.startswith("{")


@pytest.mark.parametrize("name", WITH_TOOLS)
def test_every_format_is_told_from_the_template_and_read_back(name: str, start_tiny: StartTiny, tmp_path: Path) -> None:
    """A random model, held to a grammar that leaves it one tool and few arguments: whatever it draws is a call."""
    server = start_tiny("--weights", "fp32", model=write_model(tmp_path, WITH_TOOLS[name]))
    assert f"tool calls     {formats_of(language(WITH_TOOLS[name])).name}" in server.log
    digits = {"type": "object", "properties": {"n": {"enum": [1, 7, 42]}}, "additionalProperties": False}
    tool = {"type": "function", "function": {"name": "count", "parameters": {**digits, "required": ["n"]}}}
    body: dict[str, Any] = {"messages": ASKED, "tools": [tool], "tool_choice": "required", "seed": 3, "max_tokens": 200}
    (choice,) = server.post("/v1/chat/completions", {**body, "parallel_tool_calls": False}).json()["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls" and call["function"]["name"] == "count"
    assert json.loads(call["function"]["arguments"])["n"] in (1, 7, 42)
    history = [*ASKED, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
    assert server.post("/v1/chat/completions", {**body, "messages": history}).status_code == 200


def test_a_format_that_the_template_cannot_tell_of_is_refused_at_start(start_tiny: StartTiny) -> None:
    server = start_tiny("--tool-format", "hermes", wait=False)
    assert server.process.wait() == 2
    assert "roost: --tool-format hermes: the chat template lists no tools" in server.log


def test_a_named_format_is_used(start_tiny: StartTiny, tmp_path: Path) -> None:
    server = start_tiny("--tool-format", "described", model=write_model(tmp_path, HERMES))
    assert "tool calls     described" in server.log
