"""Metrics: what limits steps is there to be watched, also while nothing does."""

from dataclasses import replace

import pytest

from roost.messages import GetStats, Stats
from roost.server.metrics import Metrics
from tests.support.engine_client import engine_client


@pytest.mark.parametrize(("most", "shown"), [(None, "+Inf"), (12, "12.0")])
def test_the_size_that_steps_may_have_is_a_gauge(most: int | None, shown: str) -> None:
    (stats,) = engine_client().send(GetStats())
    assert isinstance(stats, Stats)
    lines = Metrics().exposition(replace(stats, step_rows_max=most, step_tokens_max=most)).decode().splitlines()
    assert f"roost_step_rows_limit {shown}" in lines and f"roost_step_tokens_limit {shown}" in lines
