"""Ends of outputs in the log: slow and failed ones at info, the others at debug, and never what they say."""

import logging
from typing import Any

import pytest

from roost.errors import CapacityError, RequestError
from roost.messages import Begun, Finished, Refused, SpecStats, Submit, Tokens, Usage
from roost.server.output_log import OutputLog, log_refusal

SLOW_S = 5
USAGE = Usage(prompt_tokens=7, cached_tokens=4, completion_tokens=2)


def ended(caplog: pytest.LogCaptureFixture, reason: str, took_s: float) -> tuple[int, str, dict[str, Any]]:
    """The level, the message and the fields of the line for an output that ended so after a time."""
    now = 100.0
    log = OutputLog(SLOW_S, lambda: now)
    with caplog.at_level("DEBUG", "roost.outputs"):
        log.begin(Submit(request_id="r1", tokens=(4711,), client="alice"))
        now += 0.25
        log.observe(Begun(request_id="r1", prompt_tokens=7, cached_tokens=4))
        now += 0.25
        log.observe(Tokens(request_id="r1", tokens=(4712,)))
        now = 100.0 + took_s
        log.observe(Tokens(request_id="r1", tokens=(4713,)))
        finished = Finished(request_id="r1", reason=reason, usage=USAGE, max_new_tokens=9, spec=SpecStats())
        log.observe(finished)
        log.observe(finished)  # of no output that is open: no second line
    (record,) = caplog.records
    return record.levelno, record.getMessage(), record.__dict__["fields"]


@pytest.mark.parametrize(
    ("reason", "took_s", "level", "said"),
    [
        ("stop", 1.0, logging.DEBUG, "an output ended"),
        ("abort", SLOW_S - 0.5, logging.DEBUG, "an output ended"),
        ("length", float(SLOW_S), logging.INFO, "a slow output ended"),
        ("error", 1.0, logging.INFO, "an output failed"),
        ("timeout", 9.0, logging.INFO, "an output failed"),
    ],
)
def test_slow_and_failed_outputs_end_at_info(
    caplog: pytest.LogCaptureFixture, reason: str, took_s: float, level: int, said: str
) -> None:
    assert ended(caplog, reason, took_s)[:2] == (level, said)


def test_the_end_of_an_output_is_told_in_numbers(caplog: pytest.LogCaptureFixture) -> None:
    found = ended(caplog, "stop", 2.0)[2]
    assert found == {
        "id": "r1",
        "reason": "stop",
        "key": "alice",
        "prompt_tokens": 7,
        "cached_tokens": 4,
        "completion_tokens": 2,
        "ms": 2000.0,
        "queued_ms": 250.0,
        "first_token_ms": 500.0,
    }
    assert "471" not in str(found), "its tokens"


def test_a_refused_output_has_no_end(caplog: pytest.LogCaptureFixture) -> None:
    log = OutputLog(SLOW_S)
    with caplog.at_level("DEBUG", "roost.outputs"):
        log.begin(Submit(request_id="r1", tokens=(1,)))
        log.observe(Refused(request_id="r1", status=429, message="the queue is full"))
    assert caplog.records == [] and log._open == {}


def test_a_refusal_says_why_but_not_what_was_sent(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "roost.refusals"):
        log_refusal(RequestError(400, "temperature", "must be a number, got 'my secret'"))
        log_refusal(RequestError(400, "tools[0].my secret", "unknown"))
        log_refusal(CapacityError(429, "the queue is full: --max-queued 4"))
    assert [record.__dict__["fields"] for record in caplog.records] == [
        {"status": 400, "reason": "parameter temperature"},
        {"status": 400, "reason": "a parameter that there is not"},
        {"status": 429, "reason": "the queue is full: --max-queued 4"},
    ]
