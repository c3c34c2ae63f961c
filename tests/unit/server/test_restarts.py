"""Restarts of an engine: a budget that comes back with time."""

from dataclasses import replace

from roost.config.options import EngineConfig, ModelConfig
from roost.server.config import RESTARTS_DEFAULT, ServerConfig
from roost.server.restarts import WINDOW_S, Restarts
from roost.server.serve import restarts_max


def test_so_many_within_an_hour_and_one_more_is_refused() -> None:
    now = [0.0]
    restarts = Restarts(2, lambda: now[0])
    assert restarts.take()
    now[0] = 100.0
    assert restarts.take()
    assert not restarts.take()
    now[0] = WINDOW_S
    assert not restarts.take()
    now[0] = WINDOW_S + 1.0
    assert restarts.take()
    assert (restarts.num_taken, restarts.limit) == (2, 2)


def test_an_engine_of_several_ranks_is_started_again_unless_told_and_one_of_one_is_not() -> None:
    one, two = EngineConfig(), EngineConfig(model=ModelConfig(tp=2))
    assert restarts_max(ServerConfig(), one) == 0
    assert restarts_max(ServerConfig(), two) == RESTARTS_DEFAULT
    journaled = replace(one, session=replace(one.session, journal="there"))
    assert restarts_max(ServerConfig(), journaled) == RESTARTS_DEFAULT
    assert restarts_max(ServerConfig(engine_restarts=1), one) == 1
    assert restarts_max(ServerConfig(engine_restarts=0), two) == 0
