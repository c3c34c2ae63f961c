"""Fields that other servers know: what asks for nothing is accepted, all else refused, and errors are in form."""

from typing import Any

import msgspec
import pytest

from roost.errors import RequestError
from roost.server.compat import NO_OP_VALUES
from roost.server.refusals import error_for_path
from roost.server.schema import UNSUPPORTED, ChatBody, GenerateBody, Message, Part, SamplingBody, refuse_unsupported

NEEDED = {"messages": [], "prompt": "", "role": "user", "type": "text"}


def body_of(kind: type[msgspec.Struct], **more: Any) -> msgspec.Struct:
    """A body with nothing in it but what must be, and this."""
    return kind(**{name: NEEDED[name] for name in kind.__struct_fields__ if name in NEEDED}, **more)


@pytest.mark.parametrize("kind", UNSUPPORTED, ids=lambda kind: kind.__name__)
def test_a_foreign_field_that_asks_for_nothing_is_accepted_and_any_other_refused(kind: type[msgspec.Struct]) -> None:
    for name in UNSUPPORTED[kind]:
        for value in (None, *NO_OP_VALUES.get(name, ())):
            refuse_unsupported(body_of(kind, **{name: value}))
        for value in ("anything", {"z": 1}, 7, -7.5, [1]):
            with pytest.raises(RequestError, match="is not supported by this server") as caught:
                refuse_unsupported(body_of(kind, **{name: value}), "here.")
            assert (caught.value.status, caught.value.param) == (400, f"here.{name}")


def test_a_refusal_says_which_values_are_not_refused_and_why() -> None:
    for kind, name, value, told in (
        (ChatBody, "store", True, "except as false: nothing is stored here"),
        (ChatBody, "function_call", "x", 'except as "none" or "auto": its newer name is `tool_choice`'),
        (ChatBody, "reasoning_effort", "low", "leave it out: how much a model thinks is its own choice"),
        (SamplingBody, "stop_regex", "a", "leave it out"),
        (Message, "annotations", [{}], "except as []"),
        (Part, "image_url", "x", "leave it out"),
    ):
        with pytest.raises(RequestError) as caught:
            refuse_unsupported(body_of(kind, **{name: value}))
        assert caught.value.reason.endswith(told)


def fault(status: int, param: str | None = None, message: str = "said") -> dict[str, Any]:
    """The body of an error."""
    return {"error": {"message": message, "type": "invalid_request_error", "param": param, "code": status}}


@pytest.mark.parametrize(
    ("path", "status", "param", "told"),
    [
        ("/v1/chat/completions", 413, "messages", (400, "context_length_exceeded")),
        ("/v1/completions", 413, "prompt", (400, "context_length_exceeded")),
        ("/v1/completions", 413, "body", (413, None)),
        ("/v1/completions", 400, "top_p", (400, None)),
        ("/v1/completions", 401, "authorization", (401, "invalid_api_key")),
        ("/v1/models/x", 404, "model", (404, "model_not_found")),
        ("/v1/completions", 404, "session_id", (404, None)),
        ("/v1/completions", 429, None, (429, "rate_limit_exceeded")),
        ("/v1/embeddings", 404, None, (404, None)),
        ("/v1/sessions", 429, None, (429, 429)),
        ("/v1/sessions/a/generate", 413, "text", (413, 413)),
        ("/generate", 413, "text", (413, 413)),
    ],
)
def test_the_code_of_an_error_is_a_word_on_openais_endpoints_and_the_status_elsewhere(
    path: str, status: int, param: str | None, told: tuple[int, Any]
) -> None:
    shown, body = error_for_path(path, status, fault(status, param, f"{param}: too long: 9 of 8"), 8)
    assert (shown, body["error"]["code"]) == told
    assert ("maximum context length is 8 tokens" in body["error"]["message"]) == (told[0] != status)
    assert body["error"]["message"].startswith(f"{param}: ") and body["error"]["message"].endswith("too long: 9 of 8")


@pytest.mark.parametrize(
    ("paths", "is_refused"), [(None, False), ([None, None], False), ([None, "a"], True), (["a"], True)]
)
def test_nothing_for_each_of_several_prompts_is_nothing(paths: Any, is_refused: bool) -> None:
    body = GenerateBody(text=["a", "b"], lora_path=paths)
    if not is_refused:
        refuse_unsupported(body)
        return
    with pytest.raises(RequestError) as refused:
        refuse_unsupported(body)
    assert refused.value.param == "lora_path"
