"""What requests say about the replica that they need, on every interface."""

import json
from typing import Any

import pytest

from roost.ray.wanted import LABEL, SESSION, STORED, named_by_message, wanted_of
from roost.router.placement import Key, Wanted, key_of
from roost.server.labels import short_label


def _wanted(path: str, body: Any = None, headers: dict[str, str] | None = None, client: str = "ada") -> Wanted:
    return wanted_of(path, headers or {}, b"" if body is None else json.dumps(body).encode(), client)


def _key(kind: str, name: str) -> Key:
    return key_of(kind, "ada", short_label(name) if kind == LABEL else name)


@pytest.mark.parametrize(
    ("path", "body", "kind", "name"),
    [
        ("/v1/sessions/walk", None, SESSION, "walk"),
        ("/v1/sessions/walk/fork", {"id": "other"}, SESSION, "walk"),
        ("/v1/sessions", {"id": "walk"}, SESSION, "walk"),
        ("/v1/chat/completions", {"session_id": "walk", "messages": []}, SESSION, "walk"),
        ("/generate", {"session_params": {"id": "walk"}, "text": "x"}, SESSION, "walk"),
        ("/close_session", {"session_id": "walk"}, SESSION, "walk"),
        ("/v1/responses/resp_1/input_items", None, STORED, "resp_1"),
        ("/v1/responses", {"previous_response_id": "resp_1"}, STORED, "resp_1"),
        ("/v1/responses/input_tokens", {"previous_response_id": "resp_1"}, STORED, "resp_1"),
        ("/v1/responses", {"conversation": {"id": "conv_1"}}, STORED, "conv_1"),
        ("/v1/conversations/conv_1", None, STORED, "conv_1"),
    ],
)
def test_what_a_request_names_is_its_key(path: str, body: Any, kind: str, name: str) -> None:
    wanted = _wanted(path, body)
    assert (wanted.keys, wanted.labels) == ((_key(kind, name),), ())
    assert _wanted(path, body, client="bob").keys != wanted.keys  # another client's is another


@pytest.mark.parametrize(
    ("body", "headers", "name"),
    [
        ({"prompt_cache_key": "agent"}, {"x-session-id": "other"}, "agent"),
        ({"metadata": {"user_id": "agent"}}, {}, "agent"),
        ({}, {"x-claude-code-session-id": "agent"}, "agent"),
    ],
)
def test_a_name_of_the_clients_own_is_a_label(body: Any, headers: dict[str, str], name: str) -> None:
    wanted = _wanted("/v1/messages", body, headers)
    assert (wanted.keys, wanted.labels) == ((), (_key(LABEL, name),))


def test_conversations_that_go_on_begin_alike() -> None:
    def chat(*texts: str, tools: Any = None) -> tuple[Key, ...]:
        messages = [{"role": "user", "content": text * 1000} for text in texts]
        return _wanted("/v1/chat/completions", {"messages": messages, "tools": tools}).blocks

    one, more, other = chat("a", "b"), chat("a", "b", "c"), chat("a", "x", "c")
    assert len(one) < len(more) == len(other)
    assert more[: len(one)] == one
    assert other[0] == one[0]
    assert other != more
    assert chat("a", "b", tools=[{"type": "function"}])[0] != one[0]


@pytest.mark.parametrize("body", [b"{", b"[1]", b'"text"', b"\xff", b'{"session_id": 5, "conversation": [1]}'])
def test_what_is_malformed_names_nothing(body: bytes) -> None:
    assert wanted_of("/v1/responses", {}, body, "") == Wanted()
    assert named_by_message(body, "") == Wanted()
