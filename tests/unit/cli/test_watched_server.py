"""What frames say of a server is merged as it is meant: a whole one replaces, the others change."""

from typing import Any

import pytest

from roost.cli import watched_server
from roost.cli.watched_server import FrameError, LiveState
from tests.support.watched_frames import change, pool, row, session, step, whole


def server_of(*frames: Any) -> LiveState:
    server = LiveState()
    for frame in frames:
        server.merge(frame)
    return server


def kinds(server: LiveState) -> str:
    return "".join(server.kinds[kind][0] for kind in server.pools["full"].kinds)


def test_a_whole_frame_says_everything_and_replaces_what_was_known() -> None:
    server = server_of(whole(), whole(sessions=[], steps=[], pools=[], owners={}, model="another"))
    assert server.model == "another" and server.is_known
    assert not server.sessions and not server.steps and not server.pools and not server.labels


def test_of_changes_before_a_whole_frame_only_the_health_counts() -> None:
    server = server_of({"whole": False, "health": "loading"})
    assert not server.is_known and server.health == "loading"
    server.merge(change(sessions=[session("walk")], health="stalled"))
    assert not server.sessions and server.health == "stalled"


def test_what_a_frame_does_not_mention_stays() -> None:
    server = server_of(whole(), {"whole": False, "health": "stalled"})
    assert server.health == "stalled" and server.now_ms == 10_000
    assert len(server.rows) == len(server.queue) == 1 and server.tree and server.spec


def test_pages_change_owner_and_kind_in_runs() -> None:
    server = server_of(whole(), change(pools=[pool(runs=[[7, 3, 3, "S4"]], free=1)], owners={"S4": "step 4"}))
    assert kinds(server) == "p" + "l" * 6 + "r" * 3 + "c" * 4 + "f" * 50
    assert server.pools["full"].sums["free"] == 1
    held = server.holders(server.pools["full"], 3)
    assert held == [("session walk (idle)", 6), ("cached prefix, 64 tokens", 4), ("step 4", 3)]


def test_rows_and_the_queue_are_as_the_last_frame_says() -> None:
    server = server_of(whole(), change(rows=[], queue=[]))
    assert server.rows == server.queue == []
    server.merge(change(rows=[row("a"), row("b")]))
    assert [each["id"] for each in server.rows] == ["a", "b"]


def test_a_tree_may_be_taken_away() -> None:
    assert server_of(whole(), change(tree=None)).tree is None


def test_totals_are_merged_by_name() -> None:
    server = server_of(whole(), change(totals={"steps": 3}))
    assert server.totals["steps"] == 3 and server.totals["prompt_tokens"] == 1100


def test_sessions_come_change_and_go() -> None:
    changed = session("walk", length=130, state="running")
    server = server_of(whole(), change(sessions=[changed, session("new")], sessions_gone=["other", "unknown"]))
    assert set(server.sessions) == {"walk", "copy", "new"} and server.sessions["walk"].length == 130
    assert server.sessions["copy"].parent == "walk"


def test_idle_time_goes_on_between_frames() -> None:
    server = server_of(whole())
    assert server.now_ms - server.sessions["other"].since_ms == 60_000
    server.merge(change(now_ms=15_000.0))
    assert server.now_ms - server.sessions["other"].since_ms == 65_000


def test_forks_stand_below_their_parents_and_active_ones_first() -> None:
    names = [session("idle-long", idle_ms=9e3), session("idle"), session("busy", state="running", idle_ms=5e3)]
    forks = [session("fork", parent="idle"), session("of-fork", parent="fork"), session("lost", parent="gone")]
    family = server_of(whole(sessions=names + forks)).family()
    shown = [(depth, each.id) for depth, each in family]
    assert shown == [(0, "busy"), (0, "idle"), (1, "fork"), (2, "of-fork"), (0, "lost"), (0, "idle-long")]


def test_sessions_that_name_each_other_as_parents_are_shown_once() -> None:
    """`a` was closed and opened again as a fork of its own fork."""
    sessions = [session("a", parent="b"), session("b", parent="a"), session("self", parent="self")]
    family = server_of(whole(sessions=sessions)).family()
    assert [(depth, each.id) for depth, each in family] == [(0, "a"), (1, "b"), (0, "self")]


def test_a_long_line_of_forks_is_no_deep_recursion() -> None:
    names = [session(str(number), parent=str(number - 1) if number else None) for number in range(3000)]
    assert [depth for depth, _ in server_of(whole(sessions=names)).family()] == list(range(3000))


def test_rates_are_those_of_the_last_five_seconds() -> None:
    long_ago, just_now = step(1, 4_999.0, chunk=999, new=999), step(2, 5_001.0, chunk=50, new=10)
    server = server_of(whole(steps=[long_ago, just_now, step(3, 9_000.0, new=5)]))
    assert server.rates(10_000) == (0.4, 3.0, 10.0)
    assert server.rates(20_000) == (0, 0, 0)


def test_rates_of_a_server_with_many_steps_are_those_of_the_steps_that_are_kept() -> None:
    steps = [step(number, 9_000 + number, new=1) for number in range(watched_server.STEPS_KEPT)]
    server = server_of(whole(steps=steps))
    steps_s, output_s, _ = server.rates(10_024)
    assert steps_s == output_s == pytest.approx(watched_server.STEPS_KEPT / 1.024)
    server.merge(change(steps=[step(1000, 9_900, new=1)]))
    assert len(server.steps) == watched_server.STEPS_KEPT and server.steps[0].number == 1


def test_labels_of_owners_that_own_nothing_are_forgotten_when_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watched_server, "LABELS_MAX", 3)
    server = server_of(whole(), change(owners={"N8": "nothing"}))
    assert len(server.labels) == 3
    server.merge(change(owners={"N9": "nothing"}))
    assert set(server.labels) == {"L12", "N7"}


def test_no_text_controls_a_terminal() -> None:
    bad = "\x1b[2J\u202e"
    server = server_of(whole(model=bad, owners={"L12": bad}, sessions=[session(bad)], rows=[row(bad)]))
    (name,) = server.sessions
    assert all(text.isprintable() for text in (server.model, server.labels["L12"], name, server.rows[0]["id"]))
    server.merge(change(sessions_gone=[bad]))
    assert not server.sessions


@pytest.mark.parametrize(
    "frame",
    [
        [],
        {},
        {"whole": True, "health": "ok"},
        whole(pools=[pool(runs=[[70, 1, 0, ""]])]),
        whole(pools=[pool(runs=[[1, 1, 300, ""]])]),
        whole(steps=[[1, 2]]),
        whole(sessions=[{}]),
        whole(sessions=3),
    ],
)
def test_a_frame_that_cannot_be_read_is_an_error_that_says_so(frame: Any) -> None:
    with pytest.raises(FrameError, match="not as this version reads them"):
        server_of(frame)
