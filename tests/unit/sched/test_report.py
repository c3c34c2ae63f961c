"""Report: the answers of the engine about itself add up, and a flush takes only what nobody uses."""

from roost.messages import (
    Abort,
    CloseSession,
    FlushCache,
    Flushed,
    GetStats,
    OpenSession,
    Refused,
    SpecStats,
    Stats,
    Submit,
)
from roost.sched.request import Mark
from tests.support.engine_client import EngineClientDouble, Recorder, engine_client, resolved


def _submit(name: str = "a", **more: object) -> Submit:
    base = {"tokens": (1, 2, 3, 4, 5, 6), "max_new_tokens": 4, **more}
    return Submit(request_id=name, **base)  # type: ignore[arg-type]


def _stats(at: EngineClientDouble) -> Stats:
    (stats,) = at.send(GetStats())
    assert isinstance(stats, Stats)
    return stats


def test_a_new_engine_has_nothing_to_report() -> None:
    stats = _stats(engine_client())
    assert (stats.queued, stats.running, stats.sessions, stats.steps, stats.endings) == (0, 0, 0, 0, ())
    assert (stats.waiting_for, stats.step_age_ms) == ("", 0)
    assert stats.spec == SpecStats(histogram=(0,))
    (pool,) = stats.pools
    assert (pool.total, pool.free, pool.book) == (40, 40, "full")


def test_the_accounts_of_a_pool_make_the_pool_at_every_tick() -> None:
    at = engine_client()
    at.send(OpenSession(session_id="s"))
    at.send(_submit("turn", session_id="s"))
    at.send(_submit("a"))
    at.send(_submit("b", max_new_tokens=9))
    seen = set()
    while len(at.engine.state.requests) > 0:
        (pool,) = _stats(at).pools
        assert pool.free + pool.leased + pool.cached + pool.retiring == pool.total == 40
        seen |= {kind for kind in ("leased", "cached", "retiring") if getattr(pool, kind)}
    assert seen == {"leased", "cached", "retiring"}


def test_the_sums_are_those_of_what_requests_were_told() -> None:
    at = engine_client(Recorder(resolved(), frozenset([7])))
    at.send(_submit("a"))
    at.run()
    at.send(_submit("b", max_new_tokens=6))
    at.tick(3)
    at.engine.state.mark(at.engine.state.requests["b"], Mark.PREEMPT)
    at.run()
    at.send(_submit("c", max_new_tokens=30))
    at.tick(4)
    at.send(Abort(request_id="c"))
    at.run()
    ends = [at.finished(name) for name in "abc"]
    stats = _stats(at)
    assert stats.prompt_tokens == sum(end.usage.prompt_tokens for end in ends) == 18
    assert stats.cached_tokens == sum(end.usage.cached_tokens for end in ends) > 0
    assert stats.completion_tokens == sum(end.usage.completion_tokens for end in ends)
    assert stats.endings == (("abort", 1), ("length", 2))
    assert stats.retractions >= 1 and stats.failed_steps >= 1
    assert stats.steps + stats.failed_steps == at.engine._next_step


def test_those_who_wait_anywhere_are_queued() -> None:
    at = engine_client(max_running=1, max_queued=9, chunk=1)
    at.send(OpenSession(session_id="s"))
    at.send(_submit("turn", session_id="s"))
    at.send(_submit("waits", session_id="s", queue=True))
    at.send(_submit("queued"))
    at.send(_submit("follows", shares_with="queued"))
    stats = _stats(at)
    assert (stats.running, stats.queued, stats.sessions) == (1, 3, 1)
    assert "--max-running" in stats.waiting_for


def test_the_age_of_the_last_step_grows_only_while_there_is_work() -> None:
    at = engine_client()
    at.send(_submit(max_new_tokens=9))
    at.tick(2)
    at.clock.advance(7_000_000)
    assert _stats(at).step_age_ms == 7
    at.run()
    at.clock.advance(7_000_000)
    assert _stats(at).step_age_ms == 0
    at.send(_submit("b"))
    assert _stats(at).step_age_ms == 0


def test_a_flush_is_refused_while_anything_has_not_ended() -> None:
    at = engine_client()
    at.send(_submit())
    (refused,) = at.send(FlushCache())
    assert isinstance(refused, Refused) and (refused.status, refused.param) == (409, "flush_cache")
    while at.engine.state.requests:
        at.tick()
    if at.engine.state.in_flight:
        (refused,) = at.send(FlushCache())
        assert isinstance(refused, Refused) and "step" in refused.message
    at.run()
    assert at.finished("a").reason == "length"


def test_a_flush_frees_every_page_and_costs_an_idle_session_only_time() -> None:
    at, alone = engine_client(), engine_client()
    for each in (at, alone):
        each.send(OpenSession(session_id="s"))
        each.send(_submit("first", session_id="s"))
        each.send(_submit("plain", tokens=(9, 8, 7, 6, 5)))
        each.run()
    (flushed,) = at.send(FlushCache())
    (pool,) = _stats(at).pools
    assert isinstance(flushed, Flushed) and flushed.num_pages > 0 and pool.free == pool.total
    for each in (at, alone):
        each.send(_submit("second", session_id="s", tokens=(7,)))
        each.run()
    assert at.output("second") == alone.output("second")
    assert (at.finished("second").usage.cached_tokens, at.finished("second").usage.prompt_tokens) == (0, 11)
    assert at.send(CloseSession(session_id="s")) and not at.engine.state.sessions.table


def test_a_flush_of_an_empty_cache_frees_nothing() -> None:
    assert engine_client().send(FlushCache()) == [Flushed(num_pages=0)]
