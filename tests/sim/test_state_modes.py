"""Failure modes of models with recurrent layers, whose states cannot be inverted: what is gone on from must be exact.

Every token is the oracle's, in which a layer folds all that came before into one number. Every script ends in
`wind_up`: audited page by page, then everything closed and evicted, and every page and state free.
"""

import pytest

from roost.kv.lease import StateKind
from roost.kv.pages import NULL_PAGE
from roost.messages import Refused, SessionState
from roost.spec_shape import PLAIN, SpecShape
from tests.sim.script import Script, Setting, accounts, depths, prompt_of, shapes

pages = pytest.mark.parametrize("page_size", [1, 4, 16, 64])


def _setting(page_size: int = 4, **options: object) -> Setting:
    num_pages = 400 // page_size + 40
    return Setting(recurrent=True, page_size=page_size, num_pages=num_pages, context=192, **options)  # type: ignore[arg-type]


def _talked(setting: Setting) -> Script:
    """A session of three turns, which end at 24, 49 and 72."""
    script = Script(setting)
    script.open("s")
    script.turn("s", 18, 6)
    script.turn("s", 20, 5, salt=1)
    script.turn("s", 19, 4, salt=2)
    return script


@depths
@shapes("plain", "chain", "tree", "ngram")
@pages
def test_turns_inherit_all_that_was_written(spec: SpecShape, overlap: bool, page_size: int) -> None:
    script = Script(_setting(page_size, spec=spec, overlap=overlap))
    script.open("s")
    for turn in range(4):
        before = len(script.histories["s"])
        handle = script.turn("s", 9, 7, salt=turn)
        assert before - 1 <= handle.cached <= before
    script.wind_up()


@depths
@shapes("plain", "chain", "tree", "ngram")
@pages
def test_rewind_to_the_end_of_a_turn_runs_nothing_again(spec: SpecShape, overlap: bool, page_size: int) -> None:
    for length in (24, 49):
        script = _talked(_setting(page_size, spec=spec, overlap=overlap))
        answer = script.rewind("s", length)
        # with pairs the slot of its last token stands for one with what followed
        assert isinstance(answer, SessionState) and answer.resident == length - spec.pair
        assert script.turn("s", 6, 5, salt=3).cached == answer.resident
        script.wind_up()


@depths
@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("page_size", [1, 16])
def test_rewind_anywhere_says_what_is_left_and_goes_on_exactly(spec: SpecShape, overlap: bool, page_size: int) -> None:
    for length in range(0, 73, 3):
        script = _talked(_setting(page_size, spec=spec, overlap=overlap))
        answer = script.rewind("s", length)
        assert isinstance(answer, SessionState) and answer.resident <= length
        assert script.turn("s", 6, 5, salt=3).cached == answer.resident
        script.wind_up()


@depths
@shapes("plain", "chain", "tree")
@pages
def test_an_abort_goes_back_to_the_commit_point(spec: SpecShape, overlap: bool, page_size: int) -> None:
    for ticks in range(0, 16, 3):
        script = _talked(_setting(page_size, spec=spec, overlap=overlap, chunk=8))
        gone = script.submit(prompt_of(20, 4), 90, "s")
        script.tick(ticks)
        held = len(script.histories["s"])
        script.abort(gone)
        script.run()
        assert gone.finished.reason == "abort"
        assert held - 1 <= script.turn("s", 4, 5, salt=5).cached <= held
        script.wind_up()


@depths
@shapes("plain", "chain", "tree")
def test_a_fork_shares_states_and_neither_disturbs_the_other(spec: SpecShape, overlap: bool) -> None:
    script = _talked(_setting(4, spec=spec, overlap=overlap))
    assert isinstance(script.fork("s", "other"), SessionState)
    assert isinstance(script.fork("s", "early", length=49), SessionState)
    handles = [script.submit(prompt_of(8, 7 + number), 20, name) for number, name in enumerate(("s", "other", "early"))]
    script.run()
    assert handles[0].cached >= 71 and handles[1].cached >= 64 and handles[2].cached >= 48 - 16
    assert [len(each.tokens) for each in handles] == [20, 20, 20]
    script.wind_up()


@depths
@shapes("plain", "chain", "ngram")
@pages
def test_a_prompt_that_was_said_before_is_found_up_to_its_last_state(
    spec: SpecShape, overlap: bool, page_size: int
) -> None:
    """A needle in the history: what is drafted after a prefix hit must see all of what was found."""
    script = Script(_setting(page_size, spec=spec, overlap=overlap))
    first = script.submit(prompt_of(70), 12)
    script.run()
    again = script.submit((*prompt_of(70), *prompt_of(3, 9)), 12)
    script.run()
    assert first.cached == 0 and again.cached == (70 - 1) // page_size * page_size
    script.wind_up()


@shapes("plain", "chain")
def test_a_preempted_request_goes_on_from_a_state_that_it_left(spec: SpecShape) -> None:
    script = Script(_setting(4, spec=spec))
    handle = script.submit(prompt_of(40), 40)
    script.until(lambda: len(handle.tokens) >= 20)
    script.preempt(handle)
    script.run()
    assert len(handle.tokens) == 40
    script.wind_up()


def test_a_row_that_is_used_again_starts_from_nothing() -> None:
    script = Script(_setting(4, spec=PLAIN, max_running=1))
    handles = [script.submit(prompt_of(5 + number, number), 9) for number in range(4)]
    script.run()
    assert [len(each.tokens) for each in handles] == [9] * 4
    script.wind_up()


@pytest.mark.parametrize("num_states", [6, 7, 8, 10])
def test_with_few_states_requests_wait_and_sessions_lose_no_more_than_time(num_states: int) -> None:
    script = Script(_setting(16, spec=PLAIN, overlap=False, num_states=num_states, max_running=4))
    script.open("a", "b")
    for turn in range(3):
        handles = [script.submit(prompt_of(17, turn + number), 18, name) for number, name in enumerate(("a", "b"))]
        handles.append(script.submit(prompt_of(20, 9 + turn), 20))
        script.run()
        assert all(len(each.tokens) in (18, 20) for each in handles)
    script.wind_up()


def test_no_state_of_an_ended_turn_is_kept_where_none_is_wanted() -> None:
    script = _talked(_setting(4, spec=PLAIN, state_turns=0))
    lease = script.lease("s")
    assert all(72 - at <= 2 * 16 for at in lease.states)
    answer = script.rewind("s", 24)
    assert not isinstance(answer, Refused) and answer.resident < 24
    assert script.turn("s", 4, 4).cached == answer.resident
    script.wind_up()


@depths
@shapes("plain", "chain", "ngram")
@pages
def test_an_idle_session_keeps_no_state_that_it_does_not_go_on_from(
    spec: SpecShape, overlap: bool, page_size: int
) -> None:
    """But for the one before its last turn, for a fork. More are kept only while the turn's last step may break."""
    script = Script(_setting(page_size, spec=spec, overlap=overlap, state_turns=0))
    script.open("s")
    for turn in range(3):
        script.turn("s", 20, 30, salt=turn)
        lease = script.lease("s")
        before = [at for at in (*lease.states, *lease.tree_states) if at < lease.settled_len]
        at_page = max((at for at in before if at % page_size == 0), default=0)
        running = [at for at, state in lease.states.items() if state.kind is StateKind.RUNNING and at < max(before)]
        assert set(running) <= {at_page, lease.rollback_state} and set(lease.tree_states) <= {max(before)}
    script.wind_up()


@depths
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_turn_without_new_tokens_after_an_abort_runs_its_last_token_alone(overlap: bool, page_size: int) -> None:
    """The aborted turn has left a state at the very end, which is of no use when the last token has to run again."""
    script = _talked(_setting(page_size, spec=PLAIN, overlap=overlap))
    gone = script.submit(prompt_of(20, 4), 90, "s")
    script.until(lambda: len(gone.tokens) >= 2)
    script.abort(gone)
    script.run()
    assert 72 in script.lease("s").states
    assert script.turn("s", 0, 5).cached == 71
    script.wind_up()


def test_nobody_waits_for_states_that_are_kept_for_later_alone() -> None:
    script = Script(_setting(4, spec=PLAIN, overlap=False, num_states=10, state_spacing=1, chunk=20))
    longest = script.submit(prompt_of(140), 40)
    script.until(lambda: bool(longest.tokens))
    assert len(script.request(longest).lease.states) + len(script.request(longest).lease.tree_states) >= 1
    other = script.submit(prompt_of(20, 1), 5)
    script.run()
    assert other.finished.reason == "length" and script.ended[0] is other.finished
    script.wind_up()


def test_no_turn_waits_for_states_of_another_turns_prompt() -> None:
    script = Script(_setting(4, spec=PLAIN, overlap=False, num_states=10, state_spacing=1, chunk=20))
    script.open("s")
    longest = script.submit(prompt_of(140), 40, "s")
    script.until(lambda: bool(longest.tokens))
    other = script.submit(prompt_of(20, 1), 5)
    script.run()
    assert script.ended[0] is other.finished
    script.wind_up()


def test_of_many_turns_the_ends_of_the_last_are_kept() -> None:
    for length, resident in ((49, 49), (24, 0)):
        script = _talked(_setting(16, spec=PLAIN, state_turns=1))
        answer = script.rewind("s", length)
        assert isinstance(answer, SessionState) and (answer.resident == length) == (resident == length)
        script.wind_up()


@depths
def test_where_states_are_short_a_turn_that_is_aborted_still_goes_back_to_its_commit_point(overlap: bool) -> None:
    script = _talked(_setting(4, spec=PLAIN, overlap=overlap, state_spacing=1))
    gone = script.submit(prompt_of(20, 4), 90, "s")
    script.until(lambda: len(gone.tokens) >= 20)
    states = script.state.store.states
    assert states is not None and states.drop_lasting(script.request(gone).lease)
    script.abort(gone)
    script.run()
    assert script.turn("s", 4, 5, salt=5).cached >= 71
    script.wind_up()


def test_a_history_that_is_prefilled_again_needs_no_inputs_in_front_of_its_last_state() -> None:
    """Also where that state is at the end of the turn before: else it might need more inputs than there are."""
    script = _talked(_setting(1, spec=PLAIN, overlap=False, chunk=128))
    script.state.sessions.reclaim(script.state.sessions.table["s"])
    script.state.store.tree.evict(0, 10**6)
    handle = script.submit(prompt_of(1, 9), 4, "s")
    script.tick()
    inputs = script.request(handle).lease.pages[1]
    assert len(inputs) == 73 and len(inputs) - inputs.count(NULL_PAGE) == 2  # the first, and that of the last token
    script.wind_up()


def test_states_show_in_the_accounts() -> None:
    script = _talked(_setting(4, spec=PLAIN))
    book = script.state.store.state_book
    assert book is not None
    found = accounts(script.state, book)
    assert (
        sum(found.values()) == script.state.store.pools[book].num_pages - 1
        and min(found["leased"], found["cached"]) > 0
    )
    script.wind_up()
