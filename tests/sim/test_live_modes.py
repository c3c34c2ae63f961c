"""The live view: frames add up to what there is, and nothing is kept while nobody watches."""

from itertools import pairwise
from typing import Any

import pytest

from roost.messages import CloseSession, Frame, GetFrame, GetPages, GetStats, OpenSession, Stats
from roost.sched.live import QUEUE_SHOWN, SESSIONS_SHOWN, TURNS_SHOWN, short
from roost.sched.step_log import STEPS_KEPT
from roost.spec_shape import PLAIN
from tests.sim.script import Script, Setting, depths, prompt_of
from tests.sim.watcher import Watcher


def _watched(script: Script, *, whole: bool = False) -> Watcher:
    watcher = Watcher(script.engine)
    script.engine.post(GetFrame(whole=whole), watcher.hear)
    script.tick()
    return watcher


def _look(script: Script, watcher: Watcher) -> None:
    script.engine.post(GetFrame(), watcher.hear)
    script.tick()


@depths
@pytest.mark.parametrize("recurrent", [False, True])
def test_changes_add_up_to_what_there_is(overlap: bool, recurrent: bool) -> None:
    script = Script(Setting(page_size=4, num_pages=60, context=96, recurrent=recurrent, overlap=overlap))
    watcher = _watched(script)
    script.open("a", "b")
    for turn in range(3):
        first, second = (script.submit(prompt_of(9, turn), 5, name) for name in ("a", "b"))
        while script.engine.has_work:
            _look(script, watcher)
        assert first.finished and second.finished
    script.fork("a", "c")
    script.turn("c", 5, 4, salt=9)
    _look(script, watcher)
    assert watcher.sessions["c"]["parent"] == "a" and watcher.sessions["a"]["parent"] is None
    script.close("b")
    script.run()
    _look(script, watcher)
    assert set(watcher.sessions) == {"a", "c"}
    script.wind_up()


def test_rows_and_the_queue_say_what_they_do_and_what_they_wait_for() -> None:
    script = Script(Setting(page_size=4, num_pages=200, context=96, max_running=2))
    watcher = _watched(script)
    script.open("talk")
    for number in range(4):
        script.submit(prompt_of(9, number), 30, "talk" if number == 0 else None)
    for _ in range(4):
        _look(script, watcher)
    row = watcher.told["rows"][0]
    assert (row["session"], row["phase"], row["prompt"], row["done"], row["max"]) == ("talk", "decode", 9, 9, 30)
    assert row["output"] > 0
    waits = [each["waits"] for each in watcher.told["queue"]]
    assert waits == ["2 requests run: --max-running", "1 before it"]
    script.run()
    _look(script, watcher)
    assert watcher.told["rows"] == watcher.told["queue"] == []
    assert watcher.told["totals"]["endings"] == {"length": 4}


def test_steps_are_told_once_and_the_last_ones_are_kept() -> None:
    script = Script(Setting(page_size=4, num_pages=600, context=1024, spec=PLAIN))
    script.submit(prompt_of(9), 700)
    script.run()
    watcher = _watched(script)
    numbers = [step[0] for step in watcher.steps]
    assert len(numbers) == STEPS_KEPT and all(after == before + 1 for before, after in pairwise(numbers))
    assert all(min(step[2:5]) >= 0 for step in watcher.steps)
    _look(script, watcher)
    assert watcher.told["steps"] == []


def test_a_newcomer_is_told_everything_again() -> None:
    script = Script(Setting(page_size=4, num_pages=60, context=96))
    watcher = _watched(script)
    script.submit(prompt_of(9), 5)
    script.run()
    _look(script, watcher)
    cells = watcher.cells
    again = _watched(script, whole=True)
    assert again.cells == cells and again.told["kinds"] and again.told["page_size"] == 4


def test_nothing_is_noted_while_nobody_watches() -> None:
    script = Script(Setting(page_size=4, num_pages=60, context=96))
    _watched(script)
    script.engine.post(GetFrame(watching=False), lambda event: None)
    script.tick()
    assert script.state.watched is None and script.state.store.ledger._touched is None


def test_who_owns_each_page_and_the_sums_are_of_one_moment() -> None:
    script = Script(Setting(page_size=4, num_pages=60, context=96))
    script.open("a")
    script.turn("a", 9, 5)
    found: list[Frame | Stats] = []
    script.engine.post(GetPages(), found.append)  # type: ignore[arg-type]
    script.engine.post(GetStats(), found.append)  # type: ignore[arg-type]
    script.tick()
    pages, now = found
    assert isinstance(pages, Frame) and isinstance(now, Stats)
    (pool,), (own,) = pages.told["pools"], now.pools
    assert {name: pool[name] for name in ("total", "free", "leased", "cached")} == {
        "total": own.total,
        "free": own.free,
        "leased": own.leased,
        "cached": own.cached,
    }
    assert sum(count for _, count, *_ in pool["runs"]) == own.total + 1
    assert "session a, idle" in pages.told["owners"].values()


def test_of_many_sessions_and_waiting_requests_some_are_shown() -> None:
    script = Script(Setting(page_size=4, num_pages=200, context=96, max_running=1))
    names = [f"session number {number} of many more" for number in range(SESSIONS_SHOWN + 40)]
    script.open(*names)
    for number in range(QUEUE_SHOWN + 30):
        script.submit(prompt_of(3, number), 2)
    found: list[Frame] = []
    script.engine.post(GetFrame(), found.append)  # type: ignore[arg-type]
    script.tick()
    (first,) = found
    assert len(first.told["sessions"]) == SESSIONS_SHOWN and len(first.told["queue"]) == QUEUE_SHOWN
    assert all(len(each["id"]) < 24 for each in first.told["sessions"])
    script.run()


def test_of_a_long_session_the_last_turns_are_shown_and_all_are_counted() -> None:
    script = Script(Setting(page_size=16, num_pages=120, context=1000))
    watcher = _watched(script)
    script.open("a")
    for _ in range(TURNS_SHOWN):
        script.turn("a", 2, 1)
    _look(script, watcher)
    ends = watcher.sessions["a"]["turns"]
    assert len(ends) == TURNS_SHOWN
    script.turn("a", 2, 1)
    _look(script, watcher)
    told = watcher.sessions["a"]
    assert told["num_turns"] == TURNS_SHOWN + 1 and told["turns"] == [*ends[1:], told["length"]]


def test_a_node_that_is_split_is_named_anew() -> None:
    script = Script(Setting(page_size=4, num_pages=60, context=96))
    watcher, owners, prompt = _watched(script), dict[str, str](), prompt_of(24)
    for tokens in (prompt, (*prompt[:12], *(token + 1 for token in prompt[12:]))):
        script.submit(tokens, 1)
        script.run()
        _look(script, watcher)
        owners |= watcher.told["owners"]
    nodes = script.state.store.tree.nodes.values()
    named = {f"N{node.id}": f"prefix cache, tokens {node.start} to {node.end}" for node in nodes if any(node.pages)}
    assert any(node.start for node in nodes), "the first one was split"
    assert {key: owners[key] for key in named} == named


def test_long_ids_are_shortened() -> None:
    assert short("walk") == "walk" and short("0123456789abcdef0123456789abcdef") == "01234567…abcdef"


def test_sessions_of_one_name_are_told_apart() -> None:
    script = Script(Setting(page_size=4, num_pages=200, context=96))
    found: list[Frame] = []

    def look() -> dict[str, Any]:
        script.engine.post(GetFrame(), found.append)  # type: ignore[arg-type]
        script.tick()
        return found[-1].told

    for client in ("a", "b"):
        script.engine.post(OpenSession(session_id="walk", client=client), lambda event: None)
    assert [each["id"] for each in look()["sessions"]] == ["walk", "walk #2"]
    script.engine.post(CloseSession(session_id="walk", client="a"), lambda event: None)
    told = look()
    assert [each["id"] for each in told["sessions"]] == ["walk"] and told["sessions_gone"] == ["walk #2"]


def test_a_tree_is_asked_for_of_a_round_and_not_of_a_chunk_before_it() -> None:
    script = Script(Setting(page_size=4, num_pages=300, context=192, chunk=8, overlap=False))
    long, short = script.submit(prompt_of(150), 4), script.submit(prompt_of(5, 1), 30)
    script.until(lambda: len(short.tokens) > 2)
    script.engine.post(GetFrame(), lambda event: None)
    script.tick()
    row, plan = script.request(short).row, script.watch.plans[-1]
    assert plan.is_prefill.tolist() == [True, False] and plan.shown_row == row
    assert script.request(long).in_prefill
    script.run()
