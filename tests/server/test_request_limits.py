"""Limits of a request over HTTP: what is just allowed is taken, one more is refused by name."""

import pytest

from roost.server.openai import _TOP_LOGPROBS_MAX
from roost.server.schema import REQUEST_ID_LEN_MAX
from roost.server.state import PROMPTS_MAX
from tests.support.server_process import Server

ONE = {"temperature": 0, "max_new_tokens": 1}


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_request_has_as_many_prompts_as_it_may(server: Server, num_more: int) -> None:
    answer = server.post("/generate", {"text": ["a"] * (PROMPTS_MAX + num_more), "sampling_params": ONE})
    allowed = (200, 429)  # the queue may be shorter
    assert (answer.status_code in allowed) if num_more == 0 else answer.json()["error"]["param"] == "text"


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_name_is_as_long_as_it_may_be(server: Server, num_more: int) -> None:
    answer = server.post(
        "/generate", {"text": "a", "rid": "x" * (REQUEST_ID_LEN_MAX + num_more), "sampling_params": ONE}
    )
    assert answer.status_code == (400 if num_more else 200)
    assert not num_more or answer.json()["error"]["param"] == "rid"


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_token_has_as_many_alternatives_as_it_may(server: Server, num_more: int) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    body = {"messages": messages, "max_tokens": 1, "logprobs": True, "top_logprobs": _TOP_LOGPROBS_MAX + num_more}
    answer = server.post("/v1/chat/completions", body)
    if num_more:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "top_logprobs")
    else:
        (scored,) = answer.json()["choices"][0]["logprobs"]["content"]
        assert len(scored["top_logprobs"]) == _TOP_LOGPROBS_MAX
