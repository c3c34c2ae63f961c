"""Metrics: what limits steps is there to be watched, also while nothing does."""

from dataclasses import replace

import pytest

from roost.messages import Begun, GetStats, Stats
from roost.server.metrics import LatencyTimer, Metrics
from tests.support.engine_client import engine_client


@pytest.mark.parametrize(("most", "shown"), [(None, "+Inf"), (12, "12.0")])
def test_the_size_that_steps_may_have_is_a_gauge(most: int | None, shown: str) -> None:
    (stats,) = engine_client().send(GetStats())
    assert isinstance(stats, Stats)
    lines = Metrics().exposition(replace(stats, step_rows_max=most, step_tokens_max=most), 4).decode().splitlines()
    assert f"roost_step_rows_limit {shown}" in lines and f"roost_step_tokens_limit {shown}" in lines


def test_the_time_in_the_queue_ends_when_a_request_begins() -> None:
    (stats,) = engine_client().send(GetStats())
    assert isinstance(stats, Stats)
    metrics = Metrics()
    LatencyTimer(metrics).observe(Begun(request_id="r", prompt_tokens=3, cached_tokens=0))
    lines = metrics.exposition(stats, 4).decode().splitlines()
    assert "roost_queue_seconds_count 1.0" in lines and "roost_time_to_first_token_seconds_count 0.0" in lines


def test_refusals_are_counted_by_status_from_zero_on() -> None:
    (stats,) = engine_client().send(GetStats())
    assert isinstance(stats, Stats)
    metrics = Metrics()
    for status in (429, 429, 418):
        metrics.refuse(status)
    lines = metrics.exposition(stats, 4).decode().splitlines()
    assert {line for line in lines if line.startswith("roost_refusals_total")} == {
        *(f'roost_refusals_total{{status="{status}"}} 0.0' for status in (400, 404, 409, 500, 503)),
        'roost_refusals_total{status="429"} 2.0',
        'roost_refusals_total{status="418"} 1.0',
    }
    assert "roost_queued_requests_limit 4.0" in lines, "how long the queue may be, beside how long it is"
