"""Failure modes of sessions that are rewound, forked, limited or timed; a test's number is the mode's, if it has one.

Every script ends in `wind_up`: audited page by page, then everything closed and evicted, and every page free.
"""

import pytest

from roost.config.options import SessionConfig
from roost.kv.pages import floor_to
from roost.messages import Refused, SessionState
from roost.spec_shape import PLAIN, SpecShape
from tests.sim.script import Script, Setting, accounts, depths, prompt_of, shapes

windows = pytest.mark.parametrize("window", [None, 9], ids=["full", "window"])


def _talked(setting: Setting) -> Script:
    """A session of three turns: 10 + 4, 5 + 6 and 3 + 2 tokens."""
    script = Script(setting)
    script.open("s")
    script.turn("s", 10, 4)
    script.turn("s", 5, 6, salt=1)
    script.turn("s", 3, 2, salt=2)
    return script


def _status(answer: SessionState | Refused) -> int:
    return answer.status if isinstance(answer, Refused) else 200


# --- rewind -----------------------------------------------------------------------------------------------------------


@depths
@shapes("plain", "chain", "tree", "ngram")
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_rewind_anywhere_goes_on_exactly_from_there(spec: SpecShape, overlap: bool, page_size: int) -> None:
    for length in range(31):
        script = _talked(Setting(spec=spec, overlap=overlap, page_size=page_size, num_pages=160 // page_size + 32))
        held, shared = script.lease("s").settled_len, script.lease("s").shared_len
        answer = script.rewind("s", length)
        assert isinstance(answer, SessionState) and answer.turns == sum(end <= length for end in (14, 25, 30))
        after = script.turn("s", 6, 5, salt=3)
        is_own = (
            length > shared or page_size == 1
        )  # a shared page is not written; with pairs its last slot is another's
        assert after.cached == min(held, length if is_own else floor_to(max(0, length - spec.pair), page_size))
        script.wind_up()


@depths
@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("page_size", [1, 4])
def test_rewind_with_a_window_goes_on_exactly_from_there(spec: SpecShape, overlap: bool, page_size: int) -> None:
    for length in range(31):
        script = _talked(Setting(spec=spec, overlap=overlap, page_size=page_size, num_pages=160, window=9))
        script.rewind("s", length)
        after = script.turn("s", 6, 5, salt=3)
        assert after.cached <= length and after.finished.usage.prompt_tokens == length + 6
        script.wind_up()


def test_rewind_behind_the_window_goes_on_from_what_the_tree_holds() -> None:
    script = Script(Setting(spec=PLAIN, window=9, num_pages=160))
    script.open("s")
    script.turn("s", 18, 4)  # its prompt is in the tree, with the window behind 16
    script.turn("s", 20, 4, salt=1)
    answer = script.rewind("s", 20)
    assert isinstance(answer, SessionState) and answer.resident == 16
    assert script.turn("s", 3, 4, salt=2).cached == 16
    script.wind_up()


def test_rewind_to_where_no_window_is_held_starts_anew() -> None:
    script = Script(Setting(spec=PLAIN, window=5, num_pages=160))
    script.open("s")
    script.turn("s", 3, 20)
    script.turn("s", 20, 20, salt=1)
    answer = script.rewind("s", 40)
    assert isinstance(answer, SessionState) and (answer.length, answer.resident) == (40, 0)
    assert script.turn("s", 3, 4, salt=2).cached == 0
    script.wind_up()


@shapes("plain", "chain", "tree")
@windows
@pytest.mark.parametrize("length", [0, 5, 12, 14, 17])
def test_rewind_while_the_last_round_is_out_disturbs_nobody(spec: SpecShape, window: int | None, length: int) -> None:
    script = Script(Setting(spec=spec, window=window, num_pages=160))
    script.open("s")
    script.turn("s", 10, 4)
    turn = script.submit(prompt_of(6, 1), 8, "s")
    script.until(lambda: turn.end is not None)
    assert script.state.in_flight  # it writes what the turn has handed over
    assert _status(script.rewind("s", length)) == 200
    other = script.submit(prompt_of(30, 5), 8)
    after = script.submit(prompt_of(4, 2), 6, "s")
    script.run()
    assert (len(other.tokens), after.finished.usage.prompt_tokens) == (8, length + 4)
    script.wind_up()


@depths
@shapes("plain", "chain")
@windows
def test_23_abort_after_a_rewind_rolls_back_to_the_cut(spec: SpecShape, overlap: bool, window: int | None) -> None:
    for ticks in range(6):
        script = _talked(Setting(spec=spec, overlap=overlap, window=window, chunk=4, num_pages=160))
        script.rewind("s", 27)
        gone = script.submit(prompt_of(7, 4), 30, "s")
        script.tick(ticks)
        script.abort(gone)
        script.run()
        session = script.state.sessions.table["s"]
        assert (gone.finished.reason, len(session.record), len(session.turns)) == ("abort", 27, 2)
        assert script.turn("s", 4, 5, salt=5).finished.usage.prompt_tokens == 31
        script.wind_up()


def test_26_turn_without_new_tokens_after_a_rewind_runs_the_last_token_again() -> None:
    for length in (1, 8, 13, 24, 29, 30):
        script = _talked(Setting(num_pages=160))
        script.rewind("s", length)
        turn = script.submit((), 5, "s")
        script.run()
        assert (turn.finished.usage.prompt_tokens, len(turn.tokens)) == (length, 5)
        script.wind_up()


@pytest.mark.parametrize(("page_size", "found"), [(1, 15), (4, 12)])
def test_26_turn_without_new_tokens_behind_the_window_goes_on_from_what_the_tree_holds(
    page_size: int, found: int
) -> None:
    script = Script(Setting(spec=PLAIN, page_size=page_size, window=9, num_pages=160))
    script.open("s")
    script.turn("s", 16, 0)  # its prompt is in the tree, with what is needed to go back by a token, or a page
    script.turn("s", 20, 4, salt=1)
    answer = script.rewind("s", 16)
    assert isinstance(answer, SessionState) and answer.resident == 16
    again = script.submit((), 5, "s")
    script.run()
    assert (again.finished.usage.prompt_tokens, again.cached) == (16, found)
    script.wind_up()


# --- whose turn it is -------------------------------------------------------------------------------------------------


@depths
def test_15_rewind_and_fork_leave_a_running_turn_alone(overlap: bool) -> None:
    script = _talked(Setting(overlap=overlap, num_pages=160))
    running = script.submit(prompt_of(6, 3), 30, "s")
    script.until(lambda: len(running.tokens) > 1)
    assert [_status(script.rewind("s", 14)), _status(script.fork("s", "t"))] == [409, 409]
    assert script.state.sessions.table["s"].turn == script.request(running).turn.id
    script.run()
    assert (len(running.tokens), running.finished.usage.prompt_tokens) == (30, 36)
    script.wind_up()


@depths
def test_16_rewind_and_fork_leave_a_queued_turn_alone(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap, max_running=1))
    script.open("s")
    script.turn("s", 10, 3)
    script.submit(prompt_of(9, 7), 60)
    queued = script.submit(prompt_of(5, 1), 9, "s")
    script.tick()
    assert [_status(script.rewind("s", 4)), _status(script.fork("s", "t"))] == [409, 409]
    script.run()
    assert queued.finished.usage.prompt_tokens == 18
    script.wind_up()


def test_17_preempted_turn_keeps_its_session_from_being_rewound() -> None:
    script = _talked(Setting(num_pages=160))
    turn = script.submit(prompt_of(6, 3), 30, "s")
    script.until(lambda: len(turn.tokens) > 1)
    script.preempt(turn)
    assert [_status(script.rewind("s", 14)), _status(script.fork("s", "t"))] == [409, 409]
    script.run()
    assert len(turn.tokens) == 30
    script.wind_up()


@depths
@windows
@pytest.mark.parametrize("same_drain", [False, True])
def test_18_client_that_left_can_be_followed_by_a_rewind_and_a_fork(
    overlap: bool, window: int | None, same_drain: bool
) -> None:
    for fork_first in (False, True):
        script = _talked(Setting(overlap=overlap, window=window, num_pages=160))
        gone = script.submit(prompt_of(6, 3), 30, "s")
        script.until(lambda gone=gone: len(gone.tokens) > 1)
        script.abort(gone)
        if not same_drain:
            script.tick()
        assert not fork_first or _status(script.fork("s", "t")) == 200
        assert _status(script.rewind("s", 25)) == 200
        assert fork_first or _status(script.fork("s", "t")) == 200
        assert gone.finished.reason == "abort"
        assert script.turn("s", 4, 5, salt=4).finished.usage.prompt_tokens == 29
        assert script.turn("t", 4, 5, salt=4).finished.usage.prompt_tokens == (34 if fork_first else 29)
        script.wind_up()


def test_18_turn_that_waits_behind_an_aborted_one_keeps_its_session_from_being_rewound() -> None:
    script = _talked(Setting(num_pages=160))
    gone, waiting = (script.submit(prompt_of(6, 3), 9, "s", queue=True) for _ in range(2))
    script.tick(2)
    script.abort(gone)
    assert _status(script.rewind("s", 25)) == 409
    script.run()
    assert (gone.finished.reason, waiting.finished.usage.prompt_tokens) == ("abort", 36)
    script.wind_up()


# --- fork -------------------------------------------------------------------------------------------------------------


@depths
@shapes("plain", "chain", "tree")
@windows
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_fork_and_source_go_on_side_by_side(spec: SpecShape, overlap: bool, window: int | None, page_size: int) -> None:
    setting = Setting(spec=spec, overlap=overlap, window=window, page_size=page_size, num_pages=240)
    script = _talked(setting)
    held = script.lease("s").settled_len
    script.fork("s", "t")
    script.fork("s", "u")
    turns = [script.submit(prompt_of(5, 3 + number), 9, name) for number, name in enumerate(("t", "s", "u"))]
    script.run()
    assert [turn.finished.usage.prompt_tokens for turn in turns] == [35] * 3
    whole = floor_to(min(held, 30 - spec.pair), page_size)  # the partial page is computed again
    assert [turn.cached for turn in turns] == [whole, held, whole]
    script.rewind("t", 12)
    script.turn("t", 3, 4, salt=6)
    assert script.turn("u", 3, 4, salt=7).finished.usage.prompt_tokens == 47
    assert script.turn("s", 3, 4, salt=8).finished.usage.prompt_tokens == 47
    script.wind_up()


@shapes("plain", "chain", "tree")
def test_fork_while_the_last_round_is_out_shares_only_what_is_proven(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec, page_size=1, num_pages=160))
    script.open("s")
    turn = script.submit(prompt_of(10), 8, "s")
    script.until(lambda: turn.end is not None)
    assert script.state.in_flight
    script.fork("s", "t")
    turns = [script.submit(prompt_of(5, 3), 9, name) for name in ("t", "s")]
    script.run()
    assert turns[0].tokens == turns[1].tokens
    script.wind_up()


@depths
def test_19_forks_beyond_the_pool_let_each_other_run(overlap: bool) -> None:
    script = Script(Setting(spec=PLAIN, overlap=overlap, num_pages=24, context=90, max_running=2))
    script.open("s")
    script.turn("s", 30, 6)
    names = [f"t{number}" for number in range(8)]
    for name in names:
        script.fork("s", name)
    turns = [script.submit(prompt_of(7, 2 + number), 12, name) for number, name in enumerate(names)]
    script.run()
    assert [(turn.finished.usage.prompt_tokens, len(turn.tokens)) for turn in turns] == [(43, 12)] * 8
    script.wind_up()


@depths
@windows
def test_24_aborted_first_turn_of_a_fork_leaves_no_pin(overlap: bool, window: int | None) -> None:
    for ticks in range(5):
        script = _talked(Setting(overlap=overlap, window=window, num_pages=160))
        script.fork("s", "t")
        gone = script.submit(prompt_of(7, 4), 30, "t")
        script.tick(ticks)
        script.abort(gone)
        script.close("s")
        script.run()
        assert script.turn("t", 4, 5, salt=5).finished.usage.prompt_tokens == 34
        script.wind_up()


@depths
@shapes("plain", "chain", "tree")
@windows
def test_first_prompt_of_one_session_is_found_by_another_and_by_a_rewind(
    spec: SpecShape, overlap: bool, window: int | None
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, window=window, num_pages=160))
    script.open("s", "t")
    script.turn("s", 30, 25)  # its window has moved on when the prompt is shared
    assert script.turn("t", 30, 4).cached == 28
    answer = script.rewind("s", 30)
    assert isinstance(answer, SessionState) and answer.resident >= 28
    assert script.turn("s", 3, 4, salt=1).cached >= 28
    script.wind_up()


# --- limits -----------------------------------------------------------------------------------------------------------


@depths
@windows
def test_19_idle_sessions_keep_to_their_limit_and_go_on(overlap: bool, window: int | None) -> None:
    limits = SessionConfig(max_resident_tokens=50)
    script = Script(Setting(overlap=overlap, window=window, num_pages=160, session=limits))
    names = [f"s{number}" for number in range(5)]
    script.open(*names)
    for salt, name in enumerate(names):
        script.turn(name, 16, 6, salt)
        kept = sum(each.lease.settled_len for each in script.state.sessions.idle() if each.lease is not None)
        assert kept <= 50
    assert [session.id for session in script.state.sessions.idle()] == ["s3", "s4"]
    assert accounts(script.state)["leased"] > 0
    for salt, name in enumerate(names):
        assert script.turn(name, 3, 4, 10 + salt).finished.usage.prompt_tokens == 25
    script.wind_up()


@depths
def test_21_turn_over_the_sessions_limit_costs_the_session_nothing(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap, num_pages=160, session=SessionConfig(max_session_tokens=40)))
    script.open("s")
    script.turn("s", 20, 10)
    before = script.lease("s").settled_len
    for _ in range(3):
        refused = script.submit(prompt_of(5, 1), 6, "s")
        script.run()
        assert refused.refused.status == 413 and "--max-session-tokens 40" in refused.refused.message
    assert script.lease("s").settled_len == before
    last = script.submit(prompt_of(5, 1), None, "s")
    script.run()
    assert (len(last.tokens), last.cached) == (5, before)
    script.wind_up()
