"""Failure modes of sessions, on the real device code; a test's number is the mode's.

Pools start as NaN, every tick is audited page by page, and `wind_up` holds text, usage, records and pages of all that
was said against what must be. The same situations over the simulated device are in tests/sim.
"""

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import roost
from roost.kv.ledger import retiring
from roost.kv.pages import floor_to
from roost.messages import Finished, Refused
from roost.sched.request import Mark, Request
from tests.support.session_clients import Asked, Talks
from tests.support.session_matrix import MAX_RUNNING, Cell
from tests.support.session_scenes import play

CELLS = {
    "plain": Cell(page_size=4),
    "chain 0": Cell(drafter="chain0", page_size=4),
    "chain 1": Cell(drafter="chain1", page_size=4),
    "tree": Cell(drafter="tree1", page_size=4),
    "window": Cell(layers="window", page_size=4),
}


def each(*names: str) -> pytest.MarkDecorator:
    """Under these cells."""
    return pytest.mark.parametrize("cell", [CELLS[name] for name in names], ids=names)


def _request(talks: Talks, asked: Asked) -> Request:
    return talks.engine.state.requests[asked.submit.request_id]


def _until_said(talks: Talks, asked: Asked, number: int) -> None:
    """Tick until a request has returned so many tokens."""
    for _ in range(100):
        if len(asked.tokens) >= number:
            return
        talks.tick()
    raise AssertionError(f"{len(asked.tokens)} of {number} tokens in 100 ticks")


# --- 15, 16: whose turn it is -----------------------------------------------------------------------------------------


@each("plain", "chain 1", "window")
def test_15_refused_and_waiting_turns_leave_the_session_with_the_turn_that_has_it(cell: Cell) -> None:
    talks = Talks(cell)
    talks.begin("s")
    talks.turn("s", 10, 3)
    running = talks.say("s", 6, 20)
    talks.tick(2)
    waiting = talks.say("s", 3, 4, queue=True)
    refused = talks.say("s", 3, 4)
    talks.tick()
    talks.abort(waiting)
    talks.tick()
    third = talks.say("s", 3, 4)
    talks.tick()
    assert (refused.refused.status, waiting.finished.reason, third.refused.status) == (409, "abort", 409)
    state = talks.engine.state
    assert state.sessions.table["s"].turn == _request(talks, running).turn.id
    assert len(state.running) == len(state.store.leases) == 1  # nobody shares its row
    talks.finish_all()
    assert len(running.tokens) == 20
    talks.turn("s", 3, 4)
    talks.wind_up()


@each("plain", "chain 0", "window")
def test_16_turn_aborted_in_the_queue_frees_its_session_and_a_close_completes(cell: Cell) -> None:
    talks = Talks(cell)
    talks.begin("s", "closed")
    talks.turn("s", 10, 3)
    blockers = [talks.say(None, 9, 30) for _ in range(MAX_RUNNING)]
    talks.tick()
    gone, other = talks.say("s", 5, 9), talks.say("closed", 5, 9)
    talks.tick()
    assert (_request(talks, gone).row, _request(talks, other).row) == (None, None)
    talks.abort(gone)
    talks.abort(other)
    talks.tick()
    after = talks.say("s", 4, 5)
    talks.tick()
    assert after.end is None  # taken, not 409
    talks.end("closed")
    assert [len(blocker.tokens) for blocker in blockers] == [30] * MAX_RUNNING
    talks.wind_up()


# --- 17, 18: preemption and disconnect --------------------------------------------------------------------------------


@each("plain", "chain 0", "chain 1", "tree", "window")
@pytest.mark.parametrize("is_aborted", [False, True], ids=["finished", "aborted"])
def test_17_turn_preempted_twice_stays_one_turn_of_its_session(cell: Cell, is_aborted: bool) -> None:
    talks = Talks(cell)
    talks.begin("s")
    talks.turn("s", 10, 4)
    turn = talks.say("s", 6, 40)
    for _ in range(2):
        _until_said(talks, turn, len(turn.tokens) + 3)
        talks.engine.state.mark(_request(talks, turn), Mark.PREEMPT)
        talks.tick()
        session = talks.engine.state.sessions.table["s"]
        assert session.turn == _request(talks, turn).turn.id and turn.end is None
        assert len(session.turns) == 1  # no half turn became history
    assert talks.engine.state.totals.preemptions == 2
    talks.tick(2)
    if is_aborted:
        talks.abort(turn)
    talks.finish_all()
    assert turn.finished.reason == ("abort" if is_aborted else "length")
    talks.assert_at_rest()
    talks.turn("s", 3, 5)
    talks.wind_up()


@each("plain", "chain 0", "chain 1", "window")
@pytest.mark.parametrize("num_ticks", [0, 1, 3, 6])
def test_18_next_turn_right_after_a_disconnect_goes_on_from_the_commit_point(cell: Cell, num_ticks: int) -> None:
    talks = Talks(cell)
    talks.begin("s")
    talks.turn("s", 10, 4)
    gone = talks.say("s", 7, 40)
    talks.tick(num_ticks)
    seen = gone.tokens
    talks.abort(gone)
    after = talks.say("s", 5, 6)
    talks.finish_all()
    assert (gone.finished.reason, gone.tokens) == ("abort", seen)
    assert (after.finished.usage.prompt_tokens, len(after.tokens)) == (19, 6)
    talks.wind_up()


def test_18_abort_that_was_read_comes_before_the_last_result() -> None:
    talks = Talks(CELLS["plain"])
    talks.begin("s")
    turn = talks.say("s", 10, 3)
    _until_said(talks, turn, 2)
    talks.abort(turn)
    after = talks.say("s", talks.prompt(5, first=True), 6)
    talks.finish_all()
    assert (turn.finished.reason, after.finished.usage.prompt_tokens) == ("abort", 5)
    talks.wind_up()


# --- 19: idle sessions ------------------------------------------------------------------------------------------------


@each("plain", "chain 1", "window")
def test_19_idle_sessions_beyond_rows_and_pages_let_others_in_and_resume(cell: Cell) -> None:
    talks = Talks(cell, max_running=2, context=96)
    pages_each = 3 if cell.layers == "window" else 6  # at least
    number = talks.engine.state.resolved.books[0].num_pages // pages_each + 2
    names = [f"s{index}" for index in range(number)]
    talks.begin(*names)
    for name in names:
        talks.turn(name, 18, 5)
    assert talks.engine.state.rows.num_free == talks.engine.state.resolved.num_rows  # an idle session holds no row
    reclaimed = [note[1] for note in talks.notes if note[0] == "reclaim"]
    assert reclaimed[:2] == names[:2]  # the least recently used go first
    large = talks.say(None, 80, 8)
    talks.finish_all()
    assert len(large.tokens) == 8
    for name in names:
        assert talks.turn(name, 3, 4).finished.usage.prompt_tokens == 26
    talks.wind_up()


# --- 20, 21: logprobs, over-length ------------------------------------------------------------------------------------


@each("plain", "chain 0", "chain 1", "tree", "window")
def test_20_logprobs_asked_from_the_start_are_raised_to_what_is_inherited(cell: Cell) -> None:
    talks = Talks(cell)
    talks.begin("s")
    for num_in in (11, 6, 5):
        asked = talks.turn("s", num_in, 4, num_top_logprobs=1, prompt_logprobs_from=0)
        first = min(event.start for event in asked.prompt_logprobs) - 1
        assert asked.finished.prompt_logprobs_from == first
    talks.wind_up()


@each("plain", "chain 1", "window")
def test_21_over_length_turn_is_refused_and_its_session_goes_on_as_if_it_had_not_been(cell: Cell) -> None:
    talks = Talks(cell)
    talks.begin("s")
    talks.turn("s", 200, 4)
    lease = talks.engine.state.sessions.table["s"].lease
    assert lease is not None
    before = (lease.settled_len, [list(pages) for pages in lease.pages], lease.epoch)
    for num_in, num_new in ((256, 1), (53, 0), (40, 13), (3000, 3000)):
        asked = talks.say("s", num_in, num_new)
        talks.tick()
        assert asked.refused.status == 413 and "maximum allowed length" in asked.refused.message
    assert talks.engine.state.sessions.table["s"].lease is lease
    assert (lease.settled_len, lease.pages, lease.epoch) == before
    assert len(talks.turn("s", 40, 12).tokens) == 12  # just fits
    talks.wind_up()


# --- 22, 23, 24: close and abort --------------------------------------------------------------------------------------


@each("plain", "chain 1", "tree", "window")
def test_22_close_during_decode_ends_the_turn_and_frees_nothing_under_it(cell: Cell) -> None:
    talks = Talks(cell)
    talks.begin("s")
    talks.turn("s", 10, 4)
    beside, turn = talks.say(None, 9, 30), talks.say("s", 5, 40)
    _until_said(talks, turn, 2)
    lease = _request(talks, turn).lease
    own, last_step = list(lease.pages[0][lease.shared_len // 4 :]), lease.last_step
    talks.end("s")
    assert turn.finished.reason == "abort" and len(beside.tokens) == 30
    assert retiring(last_step) not in talks.engine.state.store.ledger.accounts_of(0, own)  # they rested, and came back
    talks.wind_up()


@each("plain", "chain 0", "chain 1")
def test_22_turn_that_admission_turns_away_keeps_what_its_session_has(cell: Cell) -> None:
    talks = Talks(cell, max_running=2, num_fit=1, context=96)
    talks.begin("s")
    talks.turn("s", 26, 4)
    lease = talks.engine.state.sessions.table["s"].lease
    blocker = talks.say(None, 60, 20)
    talks.tick()
    turn = talks.say("s", 40, 4)
    talks.tick(3)
    assert _request(talks, turn).row is None and "pages needed" in talks.engine.waiting_for
    assert talks.engine.state.sessions.table["s"].lease is lease
    talks.finish_all()
    assert len(blocker.tokens) == 20
    talks.wind_up()


@each("plain", "chain 0", "chain 1", "tree", "window")
@pytest.mark.parametrize("num_ticks", [1, 2, 4, 6])
def test_23_abort_keeps_no_text_of_its_turn_and_all_kv_of_those_before(cell: Cell, num_ticks: int) -> None:
    talks = Talks(cell)
    talks.begin("s")
    talks.turn("s", 23, 3)
    turn = talks.say("s", 7, 60)
    talks.tick(num_ticks)
    talks.abort(turn)
    talks.finish_all()
    talks.assert_at_rest()
    lease = talks.engine.state.sessions.table["s"].lease
    assert lease is not None and lease.settled_len == 26
    assert talks.turn("s", 4, 6).finished.usage.cached_tokens == 26
    talks.wind_up()


@each("plain", "chain 1", "tree", "window")
@pytest.mark.parametrize("num_ticks", [0, 1, 2, 5])
def test_24_first_turn_aborted_unpins_what_it_found_in_the_tree(cell: Cell, num_ticks: int) -> None:
    talks = Talks(cell)
    shared = talks.prompt(21, first=True)
    talks.say(None, shared, 2)
    talks.finish_all()
    talks.begin("s")
    turn = talks.say("s", shared + talks.prompt(6), 40)
    talks.tick(num_ticks)
    talks.abort(turn)
    talks.finish_all()
    assert talks.engine.state.sessions.table["s"].lease is None  # nothing is worth less than a look into the tree
    assert all(node.pins == 0 for node in talks.engine.state.store.tree.nodes.values())
    again = talks.turn("s", shared + talks.prompt(5), 4)
    assert again.finished.usage.cached_tokens == floor_to(21 - cell.shape.pair, 4)
    talks.wind_up()


# --- 25: cost of a turn -----------------------------------------------------------------------------------------------


class Lines:
    """Counts source lines run by the control plane: what a turn costs the host, without a clock."""

    def __init__(self) -> None:
        self.number = 0
        base = Path(roost.__file__).parent
        self._folders = tuple(str(base / folder) for folder in ("sched", "session", "kv"))

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        """For sys.settrace."""
        name = frame.f_code.co_filename
        if event == "call":
            return self.trace if name.startswith(self._folders) else None
        self.number += event == "line"
        return self.trace


@pytest.mark.parametrize("name", ["plain", "chain 1", "window"])
def test_25_host_work_of_a_turn_does_not_grow_with_its_history(name: str) -> None:
    talks = Talks(CELLS[name], max_running=1, context=1024)
    talks.engine._audit = lambda: None  # type: ignore[method-assign]  # it walks everything
    talks.begin("s")
    counts = []
    for num_in in (40, *[4] * 4, 600, *[4] * 4):
        lines = Lines()
        sys.settrace(lines.trace)
        try:
            talks.turn("s", num_in, 4)
        finally:
            sys.settrace(None)
        counts.append(lines.number)
    early, late = sum(counts[1:5]), sum(counts[6:])
    assert late < 1.1 * early, counts
    talks.wind_up()


# --- 26, 27: limits, salts --------------------------------------------------------------------------------------------


@each("plain", "chain 0", "window")
def test_26_turns_of_no_token_of_one_and_of_a_stop_at_once_go_on_exactly(cell: Cell) -> None:
    play(cell, "turns")


@each("plain", "chain 1", "window")
def test_27_kv_of_one_salt_is_never_inherited_under_another(cell: Cell) -> None:
    talks = Talks(cell)
    prompt = talks.prompt(21, first=True)
    talks.begin("s", cache_salt="a")
    talks.turn("s", prompt, 3)
    talks.begin("other", cache_salt="b")
    assert talks.turn("other", prompt, 3).finished.usage.cached_tokens == 0
    plain = [talks.say(None, prompt, 3, cache_salt=salt) for salt in ("c", "a")]
    talks.finish_all()
    assert [each.finished.usage.cached_tokens > 0 for each in plain] == [False, True]
    refused = talks.say("s", 4, 3, cache_salt="b")
    talks.tick()
    assert isinstance(refused.end, Refused) and (refused.end.status, refused.end.param) == (400, "cache_salt")
    same = talks.say("s", 4, 3, cache_salt="a")
    talks.finish_all()
    assert isinstance(same.end, Finished) and same.finished.usage.prompt_tokens == 28
    talks.wind_up()
