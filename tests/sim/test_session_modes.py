"""Failure modes of sessions, one scripted situation each; a test's number is the mode's.

Every script ends in `wind_up`: audited page by page, then everything closed and evicted, and every page free.
"""

import pytest

from roost.kv.ledger import retiring
from roost.kv.pages import floor_to
from roost.spec_shape import PLAIN, SpecShape
from tests.sim.script import Handle, Script, Setting, accounts, depths, prompt_of, shapes


def _notes(script: Script, kind: str) -> list[str]:
    return [note[1] for note in script.state.trace.last() if note[0] == kind]


# --- 15, 16: whose turn it is -----------------------------------------------------------------------------------------


@depths
@shapes("plain", "chain")
def test_15_refused_second_turn_leaves_the_session_busy_for_the_third(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    running = script.submit(prompt_of(10), 20, "s")
    script.until(lambda: len(running.tokens) > 1)
    holder = script.state.sessions.table["s"].turn
    second = script.submit(prompt_of(3, 1), 4, "s")
    script.tick()
    third = script.submit(prompt_of(3, 2), 4, "s")
    script.tick()
    assert (second.refused.status, third.refused.status) == (409, 409)
    assert script.state.sessions.table["s"].turn == holder == script.request(running).turn.id
    assert len(script.state.running) == 1 and len(script.state.store.leases) == 1
    script.run()
    assert len(running.tokens) == 20
    after = script.turn("s", 3, 4, salt=3)
    assert after.finished.usage.prompt_tokens == 33
    script.wind_up()


@depths
def test_15_turn_that_only_waited_does_not_clear_the_running_turns_mark(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap))
    script.open("s")
    running = script.submit(prompt_of(10), 20, "s")
    waiting = script.submit(prompt_of(3, 1), 4, "s", queue=True)
    script.tick(2)
    script.abort(waiting)
    script.tick()
    assert (waiting.finished.reason, waiting.finished.usage.completion_tokens) == ("abort", 0)
    assert script.state.sessions.table["s"].turn == script.request(running).turn.id
    third = script.submit(prompt_of(3, 2), 4, "s")
    script.tick()
    assert third.refused.status == 409
    fourth = script.submit(prompt_of(3, 3), 4, "s", queue=True)
    script.run()
    assert (len(running.tokens), fourth.finished.usage.prompt_tokens, len(fourth.tokens)) == (20, 33, 4)
    script.wind_up()


def _busy_engine(overlap: bool) -> tuple[Script, Handle]:
    """One place, taken by a long request; a session with one finished turn."""
    script = Script(Setting(overlap=overlap, max_running=1))
    script.open("s")
    script.turn("s", 10, 3)
    blocker = script.submit(prompt_of(9, 7), 60)
    script.tick()
    return script, blocker


@depths
def test_16_turn_aborted_in_the_queue_frees_its_session_at_once(overlap: bool) -> None:
    script, blocker = _busy_engine(overlap)
    queued = script.submit(prompt_of(5, 1), 9, "s")
    script.tick()
    assert script.request(queued).row is None
    script.abort(queued)
    script.tick()
    assert (queued.finished.reason, queued.tokens) == ("abort", [])
    assert script.state.sessions.table["s"].turn is None
    after = script.submit(prompt_of(4, 2), 5, "s")  # accepted, not 409
    script.run()
    assert (after.cached, after.finished.usage.prompt_tokens, len(blocker.tokens)) == (13, 17, 60)
    script.wind_up()


def test_16_turn_aborted_in_the_queue_is_told_its_prompt_with_the_history() -> None:
    script, _ = _busy_engine(overlap=True)
    queued = script.submit(prompt_of(5, 1), 9, "s")
    script.tick()
    script.abort(queued)
    script.tick()
    assert queued.finished.usage.prompt_tokens == 18


@depths
@pytest.mark.parametrize("same_drain", [False, True])
def test_16_close_completes_after_an_abort_in_the_queue(overlap: bool, same_drain: bool) -> None:
    script, blocker = _busy_engine(overlap)
    queued = script.submit(prompt_of(5, 1), 9, "s")
    waiting = script.submit(prompt_of(5, 2), 9, "s", queue=True)
    script.tick()
    script.abort(queued)
    if not same_drain:
        script.tick()  # the turn that waited for the session is the queued one now
    script.close("s")
    script.tick()
    assert script.closed == ["s"] and "s" not in script.state.sessions.table
    assert queued.finished.reason == "abort" and blocker.end is None
    assert waiting.refused.status == 410 if same_drain else waiting.finished.reason == "abort"
    assert len(script.state.store.leases) == 1  # the blocker's
    script.wind_up()


# --- 17, 18: preemption and disconnect --------------------------------------------------------------------------------


def _preempted_twice(spec: SpecShape) -> tuple[Script, Handle]:
    """A session of 14 tokens whose second turn (6 new, up to 70 more) runs again after two preemptions."""
    script = Script(Setting(spec=spec, num_pages=160, context=128))
    script.open("s")
    script.turn("s", 10, 4)
    turn = script.submit(prompt_of(6, 1), 70, "s")
    for _ in range(2):
        seen = len(turn.tokens)
        script.until(lambda seen=seen: len(turn.tokens) > seen + 1)
        script.preempt(turn)
        script.tick()
        session = script.state.sessions.table["s"]
        assert session.turn == script.request(turn).turn.id and turn.end is None
        assert (len(session.turns), len(session.record)) == (1, 20 + len(turn.tokens))  # no half turn became history
    assert _notes(script, "suspend") == [turn.submit.request_id] * 2
    return script, turn


@shapes("plain", "chain", "tree")
def test_17_turn_preempted_twice_finishes_as_one_turn(spec: SpecShape) -> None:
    script, turn = _preempted_twice(spec)
    script.run()
    assert (turn.finished.reason, len(turn.tokens), turn.cached) == ("length", 70, 14)
    session = script.state.sessions.table["s"]
    assert (session.turn, len(session.turns), len(session.record)) == (None, 2, 90)
    after = script.turn("s", 3, 6, salt=2)
    assert (after.finished.usage.prompt_tokens, after.cached) == (93, 90)
    script.wind_up()


@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("ticks", [0, 1, 2, 4])
def test_17_turn_preempted_twice_then_aborted_rolls_back_to_its_commit_point(spec: SpecShape, ticks: int) -> None:
    script, turn = _preempted_twice(spec)
    script.tick(ticks)
    assert turn.end is None
    script.abort(turn)
    script.tick()
    session = script.state.sessions.table["s"]
    assert (turn.finished.reason, session.turn, len(session.turns), len(session.record)) == ("abort", None, 1, 14)
    after = script.turn("s", 3, 6, salt=2)
    assert after.finished.usage.prompt_tokens == 17
    assert after.cached == floor_to(14, 4)  # the commit point's page is shared by now, and a shared page is not written
    script.wind_up()


def test_17_turn_preempted_for_pages_goes_on_by_itself() -> None:
    script = Script(Setting(spec=PLAIN, num_pages=20, context=64))
    script.open("s")
    older = script.submit(prompt_of(10, 1), 50)
    script.tick()
    turn = script.submit(prompt_of(10), 40, "s")
    script.run()
    assert turn.submit.request_id in _notes(script, "suspend")
    assert older.submit.request_id not in _notes(script, "suspend")  # the oldest is never preempted
    assert (len(older.tokens), len(turn.tokens)) == (50, 40)
    assert script.turn("s", 3, 4, salt=2).finished.usage.prompt_tokens == 53
    script.wind_up()


@depths
@shapes("plain", "chain")
@pytest.mark.parametrize("ticks", range(7))
def test_18_abort_and_next_turn_in_one_drain_go_on_from_the_commit_point(
    spec: SpecShape, overlap: bool, ticks: int
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, chunk=4))  # two chunks of prefill, then decode
    script.open("s")
    script.turn("s", 10, 4)
    gone = script.submit(prompt_of(7, 1), 40, "s")
    script.tick(ticks)
    seen = len(gone.tokens)
    script.abort(gone)
    after = script.submit(prompt_of(5, 2), 6, "s")
    script.tick()
    assert gone.finished.reason == "abort"
    assert len(gone.tokens) <= seen + spec.accept_max  # at most the result that was due
    assert after.end is None and script.state.sessions.table["s"].turn == script.request(after).turn.id
    script.run()
    assert (after.finished.usage.prompt_tokens, len(after.tokens)) == (19, 6)
    lacks = (
        spec is PLAIN and not overlap and ticks == 0
    )  # else its last token ran: in its own turn, or with the gone one
    assert after.cached == (13 if lacks else 14)
    script.wind_up()


@depths
def test_18_an_abort_that_was_read_comes_before_the_last_result(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap))
    script.open("s")
    turn = script.submit(prompt_of(10), 5, "s")
    script.until(lambda: len(turn.tokens) == 1)  # the next result brings the other four
    script.abort(turn)
    after = script.submit(prompt_of(5, 2), 6, "s")
    script.run()
    assert (turn.finished.reason, after.finished.usage.prompt_tokens) == ("abort", 5)
    assert after.cached == 0
    script.wind_up()


@depths
def test_18_abort_of_all_turns_of_a_session_and_its_next_turn_fit_into_one_drain(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap))
    script.open("s")
    script.turn("s", 10, 4)
    gone = [script.submit(prompt_of(7, 1 + number), 40, "s", queue=True) for number in range(3)]
    script.tick(3)
    for each in gone:
        script.abort(each)
    after = script.submit(prompt_of(5, 5), 6, "s")
    busy = script.submit(prompt_of(5, 6), 6, "s")
    script.run()
    assert [each.finished.reason for each in gone] == ["abort"] * 3
    assert (after.finished.usage.prompt_tokens, after.cached, busy.refused.status) == (19, 14, 409)
    script.wind_up()


# --- 19: idle sessions ------------------------------------------------------------------------------------------------


@depths
@shapes("plain", "chain")
@pytest.mark.parametrize("window", [None, 9])
def test_19_idle_sessions_beyond_rows_and_pages_let_new_work_in_and_resume(
    spec: SpecShape, overlap: bool, window: int | None
) -> None:
    setting = Setting(spec=spec, overlap=overlap, window=window, num_pages=40, context=100, max_running=2)
    script = Script(setting)
    names = [f"s{i}" for i in range(12)]
    script.open(*names)
    for salt, name in enumerate(names):  # 12 × 6 pages, of 40; 4 rows at most
        script.turn(name, 18, 5, salt)
    assert len(script.state.sessions.table) == 12
    assert script.state.rows.num_free == script.state.resolved.num_rows  # an idle session holds no row
    lost = _notes(script, "reclaim")
    assert lost[:3] == names[:3]  # the least recently used go first
    large = script.submit(prompt_of(80, 50), 8)
    script.run()
    assert len(large.tokens) == 8
    for salt, name in enumerate(names):
        turn = script.turn(name, 3, 5, 20 + salt)
        assert (turn.finished.usage.prompt_tokens, len(turn.tokens)) == (26, 5)
    script.wind_up()


@depths
def test_19_running_request_grows_into_the_pages_of_idle_sessions(overlap: bool) -> None:
    script = Script(Setting(spec=PLAIN, overlap=overlap, num_pages=24, context=90, max_running=2))
    script.open("a", "b")
    long = script.submit(prompt_of(8, 9), 80)
    script.tick()
    turns = [script.submit(prompt_of(20, salt), 3, name) for salt, name in enumerate(("a", "b"))]
    script.run()
    assert [len(each.tokens) for each in (long, *turns)] == [80, 3, 3]
    assert _notes(script, "reclaim") == ["a", "b"] and _notes(script, "suspend") == []
    assert [script.turn(name, 2, 4, 5).finished.usage.prompt_tokens for name in ("a", "b")] == [25, 25]
    script.wind_up()


@depths
def test_19_sessions_whose_next_turns_wait_in_the_queue_are_idle_too(overlap: bool) -> None:
    script = Script(Setting(spec=PLAIN, overlap=overlap, num_pages=24, context=90, max_running=4))
    names = ("a", "b", "c")
    script.open(*names)
    for salt, name in enumerate(names):
        script.turn(name, 20, 8, salt)
    assert accounts(script.state)["free"] == 24 - 3 * 7
    turns = [script.submit(prompt_of(30, 10 + salt), 20, name) for salt, name in enumerate(names)]
    script.run()
    assert [(len(turn.tokens), turn.finished.usage.prompt_tokens) for turn in turns] == [(20, 58)] * 3
    script.wind_up()


# --- 22, 23: close and abort ------------------------------------------------------------------------------------------


@shapes("plain", "chain", "tree")
def test_22_close_during_decode_ends_the_turn_and_frees_nothing_under_it(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec))
    script.open("s")
    script.turn("s", 10, 4)
    other = script.submit(prompt_of(9, 5), 30)
    turn = script.submit(prompt_of(5, 1), 40, "s")
    script.until(lambda: len(turn.tokens) > 1)
    lease = script.request(turn).lease
    own, last_step = list(lease.pages[0][lease.shared_len // 4 :]), lease.last_step
    script.close("s")
    script.tick()
    assert (turn.finished.reason, script.closed) == ("abort", ["s"])
    assert set(script.state.store.ledger.accounts_of(0, own)) == {retiring(last_step)}
    late = script.submit(prompt_of(2, 2), 4, "s")
    script.tick()
    assert late.refused.status == 404 and script.state.store.ledger.collected == last_step
    assert retiring(last_step) not in script.state.store.ledger.accounts_of(0, own)
    script.run()
    assert len(other.tokens) == 30
    script.wind_up()


@depths
@pytest.mark.parametrize("ticks", range(6))
def test_22_close_in_any_tick_of_a_turn_completes(overlap: bool, ticks: int) -> None:
    script = Script(Setting(overlap=overlap, chunk=4))
    script.open("s")
    turn = script.submit(prompt_of(11), 40, "s")
    script.tick(ticks)
    script.close("s")
    script.tick()
    assert (turn.finished.reason, script.closed) == ("abort", ["s"])
    script.run()
    assert accounts(script.state)["leased"] == accounts(script.state)["retiring"] == 0
    script.wind_up()


@depths
def test_22_turn_that_admission_turns_away_keeps_what_its_session_has(overlap: bool) -> None:
    script = Script(Setting(spec=PLAIN, overlap=overlap, num_pages=24, context=90))
    script.open("s")
    script.turn("s", 22, 4)
    blocker = script.submit(prompt_of(50, 7), 12)
    script.tick()
    before = script.lease("s")
    kept = (before.settled_len, list(before.pages[0]))
    turn = script.submit(prompt_of(30, 1), 4, "s")
    script.tick(3)
    assert script.request(turn).row is None and "pages needed" in script.engine.waiting_for
    assert script.lease("s") is before and (before.settled_len, before.pages[0]) == kept
    script.run()
    assert (len(blocker.tokens), turn.cached) == (12, kept[0])
    script.wind_up()


@depths
@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("ticks", range(1, 7))
def test_23_abort_keeps_neither_partial_text_nor_loses_the_sessions_kv(
    spec: SpecShape, overlap: bool, ticks: int
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, chunk=4))
    script.open("s")
    script.turn("s", 10, 3)
    turn = script.submit(prompt_of(7, 1), 40, "s")
    script.tick(ticks)
    script.abort(turn)
    script.run()
    session = script.state.sessions.table["s"]
    assert (turn.finished.reason, len(session.record), len(session.turns)) == ("abort", 13, 1)
    assert script.lease("s").settled_len == 13
    after = script.turn("s", 4, 6, salt=2)
    assert (after.finished.usage.prompt_tokens, after.cached) == (17, 13)
    script.wind_up()
