"""Numbers that make no sense: all are refused, and none breaks anything."""

import json
from typing import Any

import pytest

from tests.server.process import Server

HUGE = (2**63, 2**64, -(2**63) - 1, 10**30, 10**400, 1e308)


@pytest.mark.parametrize("key", ["9" * 19, "9" * 20, "9" * 5000, "-" + "9" * 30, "", " 5", "1_0", "٣", "5.0", "0x5"])
def test_a_bias_for_what_is_no_token_is_refused_by_name(rested: Server, key: str) -> None:
    for path, body, param in (
        ("/v1/completions", {"prompt": "a", "logit_bias": {key: 1}}, "logit_bias"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "logit_bias": {key: 1}},
            "logit_bias",
        ),
        ("/generate", {"text": "a", "sampling_params": {"logit_bias": {key: 1}}}, "sampling_params.logit_bias"),
    ):
        answer = rested.post(path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text
        assert len(answer.text) < 500


NUMBERS: tuple[tuple[str, dict[str, Any], tuple[str, ...]], ...] = (
    (
        "/v1/completions",
        {"prompt": "a"},
        ("max_tokens", "min_tokens", "n", "seed", "top_k", "priority", "timeout", "turn", "logprobs", "temperature"),
    ),
    ("/generate", {"text": "a"}, ("priority", "logprob_start_len", "top_logprobs_num")),
    ("/v1/sessions", {}, ("ttl_s", "max_tokens")),
    ("/v1/sessions/none/rewind", {}, ("turn", "length")),
    ("/open_session", {"capacity_of_str_len": 1}, ("capacity_of_str_len", "timeout")),
)


def test_no_number_is_too_large_to_be_refused(rested: Server) -> None:
    for path, body, names in NUMBERS:
        for name in names:
            for value in HUGE:
                data = json.dumps({**body, name: value})
                answer = rested.http.post(path, content=data, headers={"content-type": "application/json"})
                assert 400 <= answer.status_code < 500, (path, name, value, answer.text)
    for ids in ([2**63], [2**70], [1e300], [[10**400]]):
        headers = {"content-type": "application/json"}
        answer = rested.http.post("/generate", content=json.dumps({"input_ids": ids}), headers=headers)
        assert answer.status_code == 400, answer.text
