"""Anthropic's Messages API, spoken by its own client: blocks, tools, thoughts, errors, and what a history inherits."""

import asyncio
import json
from typing import Any

import anthropic
import pytest
from anthropic.types import Message

from tests.server.conftest import StartTiny
from tests.support.server_process import Server

# the newest client has no temperature of its own
GREEDY: dict[str, Any] = {"model": "default", "max_tokens": 12, "extra_body": {"temperature": 0}}
ADD = {
    "name": "add",
    "description": "The sum of two numbers",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
        "additionalProperties": False,
    },
}


@pytest.fixture
def claude(rested: Server) -> anthropic.Anthropic:
    """Anthropic's own client."""
    return anthropic.Anthropic(base_url=rested.url, api_key="none", max_retries=0)


@pytest.fixture(autouse=True)
def _closed(rested: Server) -> Any:
    """Sessions that labels have led to are closed at the end, so that the server can be as it was."""
    yield
    rested.close_sessions()


def ask(claude: anthropic.Anthropic, messages: list[Any], **changes: Any) -> Message:
    """An answer."""
    made: Message = claude.messages.create(**{**GREEDY, "messages": messages, **changes})
    return made


def user(text: str) -> dict[str, Any]:
    """What a user says."""
    return {"role": "user", "content": text}


def text_of(message: Message) -> str:
    """Its text."""
    return "".join(block.text for block in message.content if block.type == "text")


def total(message: Message) -> int:
    """Tokens that its session holds after it."""
    usage = message.usage
    return usage.input_tokens + (usage.cache_read_input_tokens or 0) + usage.output_tokens


def test_an_answer_has_what_the_client_reads(claude: anthropic.Anthropic) -> None:
    made = ask(claude, [user("What is the capital of France?")], max_tokens=64)
    assert "Paris" in text_of(made) and (made.type, made.role, made.stop_reason) == ("message", "assistant", "end_turn")
    short = ask(claude, [user("Count from one to ten.")], max_tokens=3)
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 3)
    stopped = ask(claude, [user("Count from one to ten.")], max_tokens=64, stop_sequences=["3"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "3")


def test_a_stream_adds_up_to_the_answer_and_begins_with_its_real_number_of_tokens(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [user("Name a colour.")]
    counted = claude.messages.count_tokens(model="default", messages=messages).input_tokens
    with claude.messages.stream(**{**GREEDY, "messages": messages}) as stream:
        events = list(stream)
        final = stream.get_final_message()
    (start,) = [event for event in events if event.type == "message_start"]
    usage = start.message.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted
    whole = ask(claude, messages)
    assert (text_of(final), final.stop_reason) == (text_of(whole), whole.stop_reason)


def test_a_tool_is_called_and_its_result_answered(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = [user("What is 2 + 3? Use the tool.")]
    tools: dict[str, Any] = {"tools": [ADD, {"type": "web_search_20250305", "name": "web_search"}]}
    one = {"type": "any", "disable_parallel_tool_use": True}
    call = ask(claude, messages, **{"tools": [ADD], "tool_choice": one, "max_tokens": 80})
    (block,) = call.content
    assert block.type == "tool_use" and call.stop_reason == "tool_use" and set(block.input) == {"a", "b"}  # type: ignore[arg-type]
    with claude.messages.stream(
        **{
            **GREEDY,
            "messages": messages,
            "tools": [ADD],
            "tool_choice": {"type": "tool", "name": "add"},
            "max_tokens": 80,
        }
    ) as stream:
        streamed = stream.get_final_message().content[0]
    assert streamed.type == "tool_use" and streamed.input == block.input
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "5"}]}
    messages += [{"role": "assistant", "content": call.content}, {"role": "user", "content": [result]}]
    answer = ask(claude, messages, **tools)
    assert answer.stop_reason in ("end_turn", "max_tokens") and text_of(answer)
    for bad, param in (
        ({"tools": [{"type": "web_search_20250305", "name": "w"}], "tool_choice": {"type": "any"}}, "tools[0].type"),
        ({"tools": [{"name": "x", "input_schema": {"type": "nonsense"}}]}, "tools[0].input_schema"),
        ({"tools": [ADD], "tool_choice": {"type": "tool", "name": "sub"}}, "tool_choice.name"),
    ):
        with pytest.raises(anthropic.BadRequestError) as refused:
            ask(claude, messages, **bad)
        assert param in str(refused.value)


def test_a_resent_history_inherits_whatever_its_first_system_block_says(claude: anthropic.Anthropic) -> None:
    messages: list[Any] = []
    held = 0
    for number, text in enumerate(("Name a colour.", "And an animal.", "And a city.")):
        messages.append({"role": "user", "content": [{"type": "text", "text": text}]})
        messages[-1]["content"][0]["cache_control"] = {"type": "ephemeral"}
        billed = {
            "type": "text",
            "text": f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number * 7919:x};",
        }
        system = [billed, {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        labelled = ask(claude, messages, system=system, metadata={"user_id": "user_a_session_b"})
        plain = ask(claude, messages, system="Be brief.")
        assert text_of(labelled) == text_of(plain)
        assert labelled.usage.cache_read_input_tokens == held
        held = total(labelled)
        messages.append({"role": "assistant", "content": labelled.content})


def test_an_answer_may_use_up_the_context_and_a_prompt_may_not(claude: anthropic.Anthropic) -> None:
    long = " ".join(["word"] * 1900)
    made = ask(claude, [user(long)], max_tokens=8000, extra_body={"temperature": 0, "logit_bias": {"2": -100}})
    assert made.stop_reason == "model_context_window_exceeded" and total(made) == 2048
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        ask(claude, [user(long * 2)])
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.count_tokens(model="default", messages=[user(long * 2)])  # type: ignore[list-item]


def test_errors_have_anthropics_envelope_and_name_the_field(claude: anthropic.Anthropic, rested: Server) -> None:
    for changes, status, param in (
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"messages": []}, 400, "messages"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, 400, "messages[0].content[0]"),
        ({"model": "other"}, 404, "model"),
        ({"extra_body": {"container": "c"}}, 400, "container"),
        ({"thinking": {"type": "enabled", "budget_tokens": 10}}, 400, "thinking.budget_tokens"),
        ({"messages": [user("x"), {"role": "assistant", "content": "And"}]}, 400, "messages[1]"),
    ):
        with pytest.raises(anthropic.APIStatusError) as refused:
            ask(claude, changes.pop("messages", [user("x")]), **changes)  # type: ignore[arg-type]
        body: Any = refused.value.body
        assert (refused.value.status_code, body["type"]) == (status, "error"), changes
        assert body["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert param in body["error"]["message"], body
    assert rested.http.get("/v1/messages/none").json()["type"] == "error"


def test_the_asynchronous_client_works_too(rested: Server) -> None:
    async def talk() -> tuple[str, str]:
        async with anthropic.AsyncAnthropic(base_url=rested.url, auth_token="none", max_retries=0) as claude:
            whole = await claude.messages.create(**{**GREEDY, "messages": [user("Say ok.")]})
            async with claude.messages.stream(**{**GREEDY, "messages": [user("Say ok.")]}) as stream:
                parts = [text async for text in stream.text_stream]
            beta = await claude.beta.messages.create(
                **{**GREEDY, "messages": [user("Say ok.")], "betas": ["x-2025-01-01"]}
            )
            assert beta.content[0].type == "text" and beta.content[0].text == text_of(whole)
            return text_of(whole), "".join(parts)

    whole, streamed = asyncio.run(talk())
    assert whole == streamed


def test_the_clients_own_tool_runner_works(claude: anthropic.Anthropic) -> None:
    """It asks for threads first, and goes on without where a server has none."""
    called: list[tuple[int, int]] = []

    @anthropic.beta_tool
    def add(a: int, b: int) -> str:
        """The sum of two numbers."""
        called.append((a, b))
        return str(a + b)

    runner = claude.beta.messages.tool_runner(
        **{**GREEDY, "max_tokens": 60},
        tools=[add],
        tool_choice={"type": "tool", "name": "add", "disable_parallel_tool_use": True},
        messages=[user("What is 2 + 3?")],  # type: ignore[list-item]
        max_iterations=2,
    )
    last = runner.until_done()
    assert called and last.stop_reason == "tool_use"


def test_a_schema_is_kept_to(claude: anthropic.Anthropic) -> None:
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    made = ask(
        claude,
        [user("Give a number as JSON.")],
        max_tokens=64,
        extra_body={"output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    assert made.stop_reason == "end_turn" and isinstance(json.loads(text_of(made))["n"], int)


def test_keys_come_as_x_api_key(start_tiny: StartTiny) -> None:
    server = start_tiny("--api-key", "secret-of-a-test")
    good = anthropic.Anthropic(base_url=server.url, api_key="secret-of-a-test", max_retries=0)
    assert good.messages.create(model="default", max_tokens=2, messages=[user("x")]).usage.output_tokens  # type: ignore[list-item]
    for wrong in (
        anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0),
        anthropic.Anthropic(base_url=server.url, auth_token="wrong", api_key=None, max_retries=0),
    ):
        with pytest.raises(anthropic.AuthenticationError) as refused:
            wrong.messages.create(model="default", max_tokens=2, messages=[user("x")])  # type: ignore[list-item]
        assert refused.value.body["error"]["type"] == "authentication_error"  # type: ignore[index]
