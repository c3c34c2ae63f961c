"""The scheduler's events in the log: each has its line, and a failure those that led to it."""

import ast
import logging
from typing import Any

import pytest

from roost.messages import Submit
from roost.obs.log_events import _LAST_EVENTS, _LINES, last_events, logged_trace
from tests.support.engine_client import engine_client, resolved, witness
from tests.tidy.source import product
from tests.unit.sched.test_engine import Breaking


def fields(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = record.__dict__["fields"]
    return found


def test_every_event_of_the_scheduler_has_a_line_with_names_for_its_numbers() -> None:
    calls = [
        node
        for module in product()
        if module.name.startswith("roost.sched")
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("trace.note")
    ]
    seen = set()
    for call in calls:
        kind = call.args[0]
        name = kind.value if isinstance(kind, ast.Constant) else "end_stop"
        seen.add(name)
        assert len(_LINES[str(name)].numbers) == len(call.args) - 2, name
    assert {name for name in _LINES if not name.startswith("end_")} == seen - {"end_stop"}
    assert {f"end_{reason}" for reason in ("stop", "length", "abort", "timeout", "error")} <= set(_LINES)


def test_an_event_is_a_line_with_its_numbers_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "roost.engine"):
        logged_trace().note("preempt", "r7", 0, 3)
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert fields(record) == {"event": "preempt", "id": "r7", "book": 0, "pages_needed": 3}


def test_a_failed_step_comes_with_the_last_events(caplog: pytest.LogCaptureFixture) -> None:
    trace = logged_trace()
    with caplog.at_level("WARNING", "roost.engine"):
        for number in range(_LAST_EVENTS):
            trace.note("admit", f"r{number}", 0, 4)
        trace.note("fail", "out of memory", 8, 9)
    (record,) = caplog.records
    found = fields(record)
    assert (record.levelno, found["reason"], found["first_step"], found["last_step"]) == (40, "out of memory", 8, 9)
    assert found["last_events"] == last_events(trace)
    assert len(found["last_events"]) == _LAST_EVENTS
    assert found["last_events"][0] == "admit r1 0 4" and found["last_events"][-1] == "fail out of memory 8 9"


def test_an_engine_tells_of_a_step_that_broke_and_of_whom_it_sent_back(caplog: pytest.LogCaptureFixture) -> None:
    at = engine_client(Breaking(witness(resolved()), lambda plan: plan.step == 2, at_launch=False))
    at.engine.state.trace = logged_trace()
    with caplog.at_level("DEBUG", "roost.engine"):
        at.send(Submit(request_id="r1", tokens=(41, 42, 43), max_new_tokens=6))
        at.run()
    told = [fields(record) for record in caplog.records]
    assert [each["event"] for each in told] == ["admit", "fail", "suspend", "admit", "end_length"]
    assert told[1]["reason"] == "broken" and told[1]["first_step"] == 2
    assert told[1]["last_events"][0].startswith("admit r1 ")
    assert told[4] == {"event": "end_length", "id": "r1", "completion_tokens": 6}


def test_an_event_that_nobody_has_described_is_no_reason_to_fail(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "roost.engine"):
        logged_trace().note("new_kind", "x", 1, 2, 3)
    assert caplog.records[0].getMessage() == "new kind"
