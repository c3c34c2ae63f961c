"""Requests as coding agents send them, replayed: every field they send, resent histories, tools nobody here knows.

The texts are short and our own; names and shapes of fields are those of Codex CLI and of Claude Code.
"""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from websockets.sync.client import connect

from tests.support.server_process import Server

CODEX_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "name": "exec_command",
        "description": "Runs a command in a shell.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "cmd": {"type": "string", "description": "What to run."},
                "workdir": {"type": "string"},
                "yield_time_ms": {"type": "number"},
            },
            "required": ["cmd"],
            "additionalProperties": False,
        },
    },
    {
        "type": "function",
        "name": "update_plan",
        "description": "Updates the plan.",
        "strict": False,
        "parameters": {
            "type": "object",
            "properties": {
                "plan": {
                    "type": "array",
                    "items": {
                        "type": "object",
                        "properties": {"step": {"type": "string"}, "status": {"type": "string"}},
                        "required": ["step", "status"],
                        "additionalProperties": False,
                    },
                }
            },
            "required": ["plan"],
            "additionalProperties": False,
        },
    },
    {
        "type": "custom",
        "name": "apply_patch",
        "description": "Edits files.",
        "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch" /(.|\\n)*/'},
    },
    {"type": "web_search", "external_web_access": True},
    {"type": "tool_search", "execution": "client", "description": "Finds tools.", "parameters": {"type": "object"}},
    {"type": "image_generation", "output_format": "png"},
]
CODEX: dict[str, Any] = {
    "model": "default",
    "instructions": "You are a coding agent. Be brief.",
    "tools": CODEX_TOOLS,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"effort": "medium", "summary": "auto"},
    "store": False,
    "stream": True,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "0199aaaa-0000-7000-8000-000000000001",
    "client_metadata": {"x-codex-installation-id": "0199aaaa"},
}
CLAUDE_TOOLS: list[dict[str, Any]] = [
    {
        "name": "Bash",
        "description": "Runs a command in a shell.",
        "input_schema": {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "properties": {
                "command": {"description": "What to run.", "type": "string"},
                "timeout": {"type": "number"},
                "run_in_background": {"type": "boolean"},
            },
            "required": ["command"],
            "additionalProperties": False,
        },
    },
    {
        "name": "Read",
        "description": "Reads a file.",
        "input_schema": {
            "type": "object",
            "properties": {"file_path": {"type": "string"}, "limit": {"type": "integer", "exclusiveMinimum": 0}},
            "required": ["file_path"],
            "additionalProperties": False,
        },
        "cache_control": {"type": "ephemeral"},
    },
    {"type": "web_search_20250305", "name": "web_search", "max_uses": 8},
]
CLAUDE: dict[str, Any] = {
    "model": "default",
    "max_tokens": 32000,
    "tools": CLAUDE_TOOLS,
    "metadata": {"user_id": "user_0000_account__session_1111"},
    "thinking": {"type": "adaptive"},
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"effort": "high"},
    "stream": True,
}


@pytest.fixture
def server_of_agents(rested: Server) -> Iterator[Server]:
    """A server whose sessions are closed at the end: those of labels live on for an hour."""
    yield rested
    rested.close_sessions()


def message(role: str, text: str) -> dict[str, Any]:
    """An item of Codex's."""
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def events(server: Server, path: str, body: dict[str, Any], headers: dict[str, str]) -> list[dict[str, Any]]:
    """The events of a stream, each under its name."""
    found = []
    with server.http.stream("POST", path, json=body, headers=headers) as stream:
        assert stream.status_code == 200, stream.read()
        name = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                found.append(json.loads(line.removeprefix("data: ")))
                assert found[-1]["type"] == name
    return found


def test_codex_resends_its_history_over_http(server_of_agents: Server) -> None:
    """Each request has everything so far; the answer's items come back as they were given."""
    headers = {"session_id": "0199aaaa-0000-7000-8000-000000000001", "originator": "codex_cli_rs"}
    items = [message("developer", "<permissions>none</permissions>"), message("user", "<environment_context/>")]
    held = 0
    for number in range(3):
        items.append(message("user", f"Say number {number}."))
        body = {**CODEX, "input": items, "temperature": 0, "max_output_tokens": 16}
        last = events(server_of_agents, "/v1/responses", body, headers)[-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        response = last["response"]
        assert response["usage"]["input_tokens_details"]["cached_tokens"] == held
        held = response["usage"]["total_tokens"]
        assert {tool["type"] for tool in response["tools"]} == {"function"}  # what only a service can run is left out
        items += response["output"]
    call = {"type": "function_call", "name": "exec_command", "arguments": '{"cmd": "ls"}', "call_id": "call_1"}
    output = {"type": "function_call_output", "call_id": "call_1", "output": "a.txt"}
    last = events(server_of_agents, "/v1/responses", {**body, "input": [*items, call, output]}, headers)[-1]
    assert last["response"]["usage"]["input_tokens_details"]["cached_tokens"] == held


def test_codex_sends_what_is_new_over_a_socket(server_of_agents: Server) -> None:
    """It warms the connection up without generating, then each message follows the last response."""
    url = server_of_agents.url.replace("http", "ws") + "/v1/responses"
    headers = {"authorization": "Bearer none", "OpenAI-Beta": "responses_websockets=2026-02-06"}
    with connect(url, additional_headers=headers) as socket:

        def ask(**fields: Any) -> dict[str, Any]:
            body = {**CODEX, "temperature": 0, **fields}
            del body["stream"]
            socket.send(json.dumps({"type": "response.create", **body}))
            while (event := json.loads(socket.recv()))["type"] not in ("response.completed", "response.incomplete"):
                assert event["type"] != "error", event
            found: dict[str, Any] = event["response"]
            return found

        made = ask(input=[message("developer", "Rules."), message("user", "Hello.")], generate=False)
        assert made["output"] == []
        for number in range(3):
            held = made["usage"]["total_tokens"]
            new = [message("user", f"Say number {number}.")]
            made = ask(input=new, previous_response_id=made["id"], max_output_tokens=12)
            assert made["usage"]["input_tokens_details"]["cached_tokens"] == held


def test_claude_code_resends_its_history_with_another_first_block_each_time(server_of_agents: Server) -> None:
    headers = {
        "anthropic-version": "2023-06-01",
        "anthropic-beta": "claude-code-20250219,interleaved-thinking-2025-05-14",
        "x-claude-code-session-id": "1111",
        "x-api-key": "none",
    }
    messages: list[dict[str, Any]] = []
    held = 0
    for number in range(3):
        system = [
            {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{number}; cch={number:05x};"},
            {"type": "text", "text": "You are a coding agent.", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral", "ttl": "1h"}},
        ]
        text = {"type": "text", "text": f"Say number {number}.", "cache_control": {"type": "ephemeral"}}
        for earlier in messages:
            for block in earlier["content"]:
                block.pop("cache_control", None)
        messages.append({"role": "user", "content": [text]})
        body = {**CLAUDE, "system": system, "messages": messages, "temperature": 0, "max_tokens": 48}
        counted = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking")}
        tokens = server_of_agents.http.post("/v1/messages/count_tokens?beta=true", json=counted).json()["input_tokens"]
        found = events(server_of_agents, "/v1/messages?beta=true", body, headers)
        usage = found[0]["message"]["usage"]
        assert usage["cache_read_input_tokens"] == held
        assert usage["input_tokens"] + held == tokens
        assert found[-1] == {"type": "message_stop"} and found[-2]["type"] == "message_delta"
        said = "".join(event["delta"]["text"] for event in found if event["type"] == "content_block_delta")
        messages.append({"role": "assistant", "content": [{"type": "text", "text": said}]})
        held = tokens + found[-2]["usage"]["output_tokens"]
