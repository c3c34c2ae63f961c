"""Failure modes of lengths and pages, one scripted situation each; a test's number is the mode's.

Every script ends in `wind_up`: audited page by page, then everything closed and evicted, and every page free.
"""

from collections.abc import Callable

import pytest

from roost.errors import InvariantError
from roost.kv.ledger import retiring
from roost.kv.pages import NULL_PAGE, ceil_div
from roost.spec_shape import PLAIN, SpecShape
from tests.sim.script import CHAIN, WIDE_TREE, Script, Setting, accounts, depths, early, late, narrow, prompt_of, shapes

# --- 1, 2, 3: bonus, stale result, overshoot -------------------------------------------------------------------------


@shapes("chain", "ngram", "tree")
@pytest.mark.parametrize(
    ("overlap", "max_new", "inherited"), [(True, 4, 14), (False, 4, 13), (True, 3, 13), (False, 3, 13)]
)
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("decide", [late, early])
def test_01_bonus_token_of_a_round_in_flight_is_inherited(
    spec: SpecShape, overlap: bool, max_new: int, inherited: int, page_size: int, decide: Callable[[str], bool]
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, page_size=page_size, num_pages=96), decide=decide)
    script.model.arrange(prompt_of(10), [3], spec.accept_max)
    script.open("s")
    first = script.turn("s", 10, max_new)
    assert first.finished.spec.histogram[2] == first.finished.spec.rounds == 1  # one round, a = 3
    assert script.lease("s").settled_len == inherited
    assert script.turn("s", 5, 6, salt=1).cached == inherited
    script.wind_up()


@depths
@pytest.mark.parametrize("max_new", [1, 2, 3, 7])
def test_01_last_token_of_a_plain_turn_is_inherited_at_depth_1(overlap: bool, max_new: int) -> None:
    script = Script(Setting(spec=PLAIN, overlap=overlap))
    script.open("s")
    script.turn("s", 10, max_new)
    assert script.turn("s", 5, 2, salt=1).cached == 10 + max_new - (0 if overlap else 1)
    script.wind_up()


@depths
@shapes("plain", "chain")
def test_01_turn_ended_by_a_stop_token_inherits_like_one_ended_by_length(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.model.arrange(prompt_of(10), [3], spec.accept_max)
    script.open("s")
    turn = script.submit(prompt_of(10), 40, "s", stops=script.model.greedy(prompt_of(10), 4)[3:])
    script.run()
    assert (turn.finished.reason, len(turn.tokens)) == ("stop", 4)
    assert script.turn("s", 5, 2, salt=1).cached == (14 if overlap else 13)
    script.wind_up()


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("ticks", range(1, 6))
def test_01_turn_lacks_its_last_token_only_if_no_later_step_of_it_was_launched(mixed: bool, ticks: int) -> None:
    # Without `mixed`, a step that only prefills another request can come between the last two rounds of a turn: then
    # nothing of the turn is in flight when it ends, although the depth is 1.
    script = Script(Setting(spec=PLAIN, mixed=mixed))
    script.open("s")
    turn = script.submit(prompt_of(10), 4, "s")
    script.tick(ticks)
    script.submit(prompt_of(9, 1), 4)
    script.until(lambda: turn.end is not None)
    in_flight = any(
        turn.submit.request_id == each.id for launched in script.state.in_flight for each in launched.requests
    )
    assert in_flight == (mixed or ticks != 4)
    script.run()
    assert script.turn("s", 5, 2, salt=2).cached == (14 if in_flight else 13)
    script.wind_up()


@shapes("plain", "chain", "tree")
def test_02_stale_result_of_a_finished_turn_changes_nothing(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec))
    script.model.arrange(prompt_of(10), [3], spec.accept_max)
    script.open("s")
    turn = script.submit(prompt_of(10), 4, "s")
    script.until(lambda: turn.end is not None)
    assert [launched.requests[0].id for launched in script.state.in_flight] == [turn.submit.request_id]  # still to come
    lease, counted = script.lease("s"), script.state.spec_counters.snapshot()
    assert counted == turn.finished.spec
    before = (lease.settled_len, lease.device_len_max, lease.epoch, len(lease.pages[0]))
    assert before[:2] == (14, 14)
    script.run()
    assert (lease.settled_len, lease.device_len_max, lease.epoch, len(lease.pages[0])) == before
    assert script.state.spec_counters.snapshot() == counted
    assert len(script.state.sessions.table["s"].record) == 14
    script.wind_up()


@shapes("chain", "tree")
def test_02_stale_result_of_a_finished_plain_request_changes_nothing(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec))
    script.model.arrange(prompt_of(10), [3], spec.accept_max)
    request = script.submit(prompt_of(10), 4)
    script.until(lambda: request.end is not None)
    assert script.state.in_flight  # a round that was launched before the accept count was known
    counted, held = script.state.spec_counters.snapshot(), accounts(script.state)
    assert counted == request.finished.spec and (held["leased"], held["cached"]) == (0, 3)
    script.run()
    assert script.state.spec_counters.snapshot() == counted
    assert accounts(script.state) == {"free": 61, "leased": 0, "cached": 3, "retiring": 0}
    again = script.submit([*prompt_of(10), *request.tokens], 2)
    script.run()
    assert again.cached == 12
    script.wind_up()


@shapes("plain", "chain", "tree")
def test_02_stale_result_of_an_aborted_turn_changes_nothing(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec))
    script.open("s")
    script.turn("s", 10, 4)
    turn = script.submit(prompt_of(5, 1), 40, "s")
    script.until(lambda: len(turn.tokens) > 1)
    script.abort(turn)
    script.tick()
    assert turn.finished.reason == "abort" and script.state.in_flight
    lease, counted, got = script.lease("s"), script.state.spec_counters.snapshot(), list(turn.tokens)
    script.run()
    assert (lease.settled_len, lease.device_len_max, len(script.state.sessions.table["s"].record)) == (14, 14, 14)
    assert (script.state.spec_counters.snapshot(), turn.tokens) == (counted, got)
    assert script.turn("s", 5, 6, salt=2).cached == 14
    script.wind_up()


@shapes("plain", "chain", "tree")
def test_02_stale_result_of_a_preempted_turn_changes_nothing(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec))
    script.open("s")
    turn = script.submit(prompt_of(10), 30, "s")
    script.until(lambda: len(turn.tokens) > 1)
    request = script.request(turn)
    old = request.lease
    script.preempt(turn)
    script.tick()
    assert request.row is not None and request.lease is not old  # already on again, with a result of the old epoch out
    assert old.epoch != script.state.in_flight[0].plan.epochs[0]
    new, got = request.lease, list(turn.tokens)
    counted = (request.spec_counters.snapshot(), script.state.spec_counters.snapshot())
    lengths = (new.settled_len, len(request.turn.record))
    script.until(lambda: script.state.in_flight[0].leases[0] is new)
    assert turn.tokens == got
    assert (request.spec_counters.snapshot(), script.state.spec_counters.snapshot()) == counted
    assert (new.settled_len, len(request.turn.record)) == lengths
    script.run()
    assert len(turn.tokens) == 30
    script.wind_up()


@depths
@pytest.mark.parametrize("how", ["length", "stop"])
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_03_overshoot_is_neither_inherited_nor_kept_in_the_record(overlap: bool, how: str, kept: int) -> None:
    script = Script(Setting(spec=CHAIN, overlap=overlap))
    script.open("s")
    output = script.model.greedy(prompt_of(10), 1 + kept)
    stops = output[-1:] if how == "stop" else []
    turn = script.submit(prompt_of(10), 1 + kept if how == "length" else 40, "s", stops=stops)
    script.run()
    spec, lease = turn.finished.spec, script.lease("s")
    assert (turn.finished.reason, turn.tokens) == (how, output)
    assert (spec.rounds, spec.drafts_accepted, spec.overshoot) == (1, 3, 4 - kept)  # one round accepted S + 1 = 4
    length = 11 + kept - (1 if kept == 4 and not overlap else 0)  # uncut, at depth 0, its bonus has no KV
    assert (lease.settled_len, len(lease.pages[0])) == (length, ceil_div(length, 4))
    assert len(script.state.sessions.table["s"].record) == 11 + kept
    after = script.turn("s", 3, 8, salt=1)
    assert (after.cached, after.finished.usage.prompt_tokens) == (length, 14 + kept)
    script.wind_up()


# --- 4, 5, 6: window frontier, preempted tail, branch reserve ---------------------------------------------------------


@depths
@shapes("plain", "chain")
@pytest.mark.parametrize(("page_size", "window", "frontier"), [(1, 5, 28), (4, 5, 24), (4, 9, 20), (16, 9, 16)])
def test_04_abort_lowers_the_window_frontier_and_keeps_the_window_behind_it(
    spec: SpecShape, overlap: bool, page_size: int, window: int, frontier: int
) -> None:
    setting = Setting(spec=spec, overlap=overlap, page_size=page_size, window=window, num_pages=160, context=128)
    script = Script(setting)
    script.open("s")
    script.turn("s", 30, 4)
    turn = script.submit(prompt_of(3, 1), 80, "s")
    script.until(lambda: len(turn.tokens) >= 50)
    assert script.request(turn).lease.evicted_len > 34  # the window is far past the commit point
    script.abort(turn)
    script.tick()
    lease = script.lease("s")
    assert (lease.settled_len, lease.evicted_len) == (34, frontier)
    window_pages = lease.pages[1]
    assert set(window_pages[: frontier // page_size]) <= {NULL_PAGE}
    assert NULL_PAGE not in window_pages[frontier // page_size :] and len(window_pages) == ceil_div(34, page_size)
    assert script.turn("s", 4, 6, salt=2).cached == 34
    script.wind_up()


@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("prompt_len", [9, 10, 11, 12])
def test_05_preemption_gives_back_the_whole_tail_from_the_page_edge_on(spec: SpecShape, prompt_len: int) -> None:
    script = Script(Setting(spec=spec, num_pages=120))
    script.open("s")
    older = script.submit(prompt_of(7, 1), 40)
    turn = script.submit(prompt_of(prompt_len), 40, "s")
    script.until(lambda: len(turn.tokens) > 2)
    script.preempt(turn)
    pages, last_step = list(script.request(turn).lease.pages[0]), script.request(turn).lease.last_step
    script.tick()
    kept = (prompt_len + len(turn.tokens) - 1) // 4  # whole pages with settled KV; the last token has none yet
    ledger, request = script.state.store.ledger, script.request(turn)
    assert set(ledger.accounts_of(0, pages[kept:])) == {retiring(last_step)}
    assert {account & 3 for account in ledger.accounts_of(0, pages[:kept])} == {2}  # cached
    assert (request.lease.shared_len, request.lease.pages[0][:kept]) == (4 * kept, pages[:kept])
    script.run()
    assert len(turn.tokens) == len(older.tokens) == 40
    assert accounts(script.state)["retiring"] == 0
    script.wind_up()


def test_06_page_512_with_many_turns_and_eight_branches_leaks_nothing() -> None:
    script = Script(Setting(page_size=512, num_pages=40, spec=WIDE_TREE, context=1100, chunk=256, max_running=1))
    script.open("s")
    length = 0
    for turn in range(15):
        handle = script.turn("s", 67, 4, salt=turn)
        assert handle.cached == length
        length += 71
        held = accounts(script.state)
        assert held["leased"] + held["cached"] == ceil_div(length, 512) and held["retiring"] == 0
    script.wind_up()


def test_06_page_256_with_long_prompts_and_eight_branches_leaks_nothing() -> None:
    script = Script(Setting(page_size=256, num_pages=64, spec=WIDE_TREE, context=2300, chunk=512))
    script.open("s", "t")
    long_turns = [script.submit(prompt_of(length, length), 6, name) for name, length in (("s", 1790), ("t", 2040))]
    script.run()
    assert [len(turn.tokens) for turn in long_turns] == [6, 6]
    held = accounts(script.state)
    assert held["leased"] + held["cached"] == ceil_div(1796, 256) + ceil_div(2046, 256)
    assert [script.turn("s", 500, 3, 1).cached, script.turn("t", 200, 3, 2).cached] == [1796, 2046]
    script.wind_up()


@pytest.mark.parametrize(
    ("page_size", "prompt_len", "context", "reserve"), [(512, 1520, 1536, 32), (256, 2290, 2304, 32)]
)
def test_06_step_past_a_row_that_is_not_widened_is_refused_with_the_numbers(
    page_size: int, prompt_len: int, context: int, reserve: int
) -> None:
    setting = Setting(page_size=page_size, num_pages=64, spec=WIDE_TREE, context=context, chunk=4096)
    script = Script(setting, resolved=narrow(setting.resolved()))
    script.submit(prompt_of(prompt_len), 6)
    numbers = (
        rf"needs {prompt_len + reserve} positions \(length up to {prompt_len}, reserve {reserve}\), "
        rf"the row has {ceil_div(context, page_size) * page_size}$"
    )
    with pytest.raises(InvariantError, match=numbers):
        script.run()


# --- 8, 10: whole pages, shared pages ---------------------------------------------------------------------------------


@depths
@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("page_size", [4, 16, 64])
def test_08_rest_of_the_last_page_is_used_by_the_next_turn(spec: SpecShape, overlap: bool, page_size: int) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, page_size=page_size, num_pages=64))
    script.open("s")
    length, pages = 0, []
    for salt in range(4):
        script.turn("s", 11, 4, salt)
        length += 15
        lease, held = script.lease("s"), accounts(script.state)
        assert len(lease.pages[0]) == ceil_div(lease.settled_len, page_size)
        assert held == {
            "free": 64 - len(lease.pages[0]),
            "leased": len(lease.pages[0]) - lease.shared_len // page_size,
            "cached": lease.shared_len // page_size,
            "retiring": 0,
        }
        assert lease.settled_len == length - (1 if spec is PLAIN and not overlap else 0)  # the others overshoot
        kept = ceil_div(max(0, length - 16), page_size)  # the last token's slot may be written again
        assert lease.pages[0][:kept] == pages[:kept]
        pages = list(lease.pages[0])
    script.wind_up()
