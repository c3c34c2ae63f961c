"""Failure modes of shared, pinned and in-flight pages, one scripted situation each; a test's number is the mode's.

Every script ends in `wind_up`: audited page by page, then everything closed and evicted, and every page free.
"""

import pytest

from roost.kv.ledger import cached, retiring
from roost.kv.pages import ceil_div
from roost.spec_shape import PLAIN, SpecShape
from tests.sim.script import CHAIN, Script, Setting, accounts, depths, prompt_of, shapes


def _pins(script: Script) -> int:
    return sum(node.pins for node in script.state.store.tree.nodes.values())


# --- 10: shared pages and pages held ----------------------------------------------------------------------------------


@depths
@pytest.mark.parametrize("ending", ["abort", "finish"])
def test_10_only_pages_past_the_shared_ones_are_given_back(overlap: bool, ending: str) -> None:
    script = Script(Setting(spec=PLAIN, overlap=overlap))
    script.submit(prompt_of(8), 0)
    script.run()
    (node,) = script.state.store.tree.nodes.values()
    shared = list(node.pages[0])
    other = script.submit([*prompt_of(8), *prompt_of(3, 1)], 30)  # 8 of 11 tokens are shared, 3 are its own
    turn = script.submit([*prompt_of(8), *prompt_of(2, 2)], 30)
    script.until(lambda: len(turn.tokens) > 2)
    assert [each.lease.shared_len for each in script.state.running] == [8, 8]
    assert [each.lease.pages[0][:2] for each in script.state.running] == [shared, shared]
    assert node.pins == 2
    if ending == "abort":
        script.abort(turn)
    script.until(lambda: turn.end is not None)
    assert script.state.store.ledger.accounts_of(0, shared) == [cached(node.id)] * 2
    assert other.end is None or ending == "finish"
    script.run()
    assert (other.cached, turn.cached, node.pins) == (8, 8, 0)
    script.wind_up()


@depths
@shapes("plain", "chain")
def test_10_pages_of_a_running_turn_are_held_once(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    script.turn("s", 10, 4)
    turn = script.submit(prompt_of(6, 1), 20, "s")
    script.until(lambda: len(turn.tokens) > 4)
    lease = script.request(turn).lease
    assert script.state.sessions.table["s"].lease is None and script.state.sessions.idle() == []
    assert list(script.state.store.leases.values()) == [lease]
    held = accounts(script.state)
    assert held["leased"] + held["cached"] == len(lease.pages[0])
    script.wind_up()


@shapes("plain", "chain")
def test_10_next_turn_of_a_session_that_fills_the_pool_is_not_charged_twice(spec: SpecShape) -> None:
    setting = Setting(spec=spec, num_pages=16, context=64 - spec.accept_max - spec.alloc_len_per_decode)
    script = Script(setting)
    script.open("s")
    room = setting.context - 2
    script.turn("s", room - 12, 2)
    assert accounts(script.state)["free"] < ceil_div(room, 4)  # the turn does not fit beside what its session holds
    turn = script.turn("s", 10, 2, salt=1)
    assert (turn.cached, len(turn.tokens)) == (room - 10, 2)
    assert [note for note in script.state.trace.last() if note[0] == "reclaim"] == []
    script.wind_up()


# --- 12: an abort meets a step in flight ------------------------------------------------------------------------------


@depths
@shapes("plain", "chain")
@pytest.mark.parametrize("session", [None, "s"], ids=["plain", "turn"])
def test_12_abort_that_meets_the_last_result_ends_the_request_once(
    spec: SpecShape, overlap: bool, session: str | None
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    handle = script.submit(prompt_of(10), 5, session)
    script.until(lambda: len(handle.tokens) == 5 - spec.accept_max)  # the next result is the last
    assert handle.end is None
    script.abort(handle)
    script.tick()
    assert (handle.finished.reason, len(handle.tokens)) == ("abort", 5 - spec.accept_max)  # read before the result
    script.abort(handle)  # nothing is left to abort: told so, nothing else
    script.run()
    assert accounts(script.state)["retiring"] == 0
    script.wind_up()


@depths
@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("ticks", range(1, 7))
def test_12_abort_in_any_tick_frees_once(spec: SpecShape, overlap: bool, ticks: int) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, chunk=6))
    other = script.submit(prompt_of(9, 1), 20)
    handle = script.submit(prompt_of(10), 40)
    script.tick(ticks)
    assert bool(script.state.in_flight)
    script.abort(handle)
    script.abort(handle)
    script.tick()
    assert handle.finished.reason == "abort"
    script.run()
    assert len(other.tokens) == 20
    script.wind_up()


# --- 13: what a launched step names -----------------------------------------------------------------------------------


@shapes("plain", "chain", "tree")
def test_13_pages_and_row_of_an_aborted_request_rest_until_its_step_is_collected(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec, max_running=1))
    first = script.submit(prompt_of(10), 40)
    script.until(lambda: len(first.tokens) > 1)
    request = script.request(first)
    pages, row, last_step = list(request.lease.pages[0]), request.row, request.lease.last_step
    script.abort(first)
    second = script.submit(prompt_of(9, 1), 8)
    script.tick()
    ledger = script.state.store.ledger
    heirs = {node.id: node for node in script.state.store.tree.nodes.values()}
    shared = [page for node in heirs.values() for page in node.pages[0]]
    assert script.request(second).row not in (row, None)
    assert not set(script.request(second).lease.pages[0]) & set(pages)
    own = [page for page in pages if page not in shared]
    assert own and set(ledger.accounts_of(0, own)) == {retiring(last_step)}
    assert accounts(script.state)["retiring"] == ledger.num_retiring(0) == len(own)
    assert script.state.rows.num_free == 0  # of two: one is used, one rests
    script.tick()
    assert ledger.collected == last_step
    assert retiring(last_step) not in ledger.accounts_of(0, own)
    assert script.state.rows.num_free == 1
    script.wind_up()
    assert len(second.tokens) == 8


def test_13_evicted_page_rests_until_the_last_step_of_its_reader_is_collected() -> None:
    script = Script(Setting(spec=CHAIN))
    handle = script.submit(prompt_of(10), 40, stops=script.model.greedy(prompt_of(10), 6)[5:])
    script.until(lambda: handle.end is not None)
    (launched,) = script.state.in_flight  # named the pages that are in the tree now
    store = script.state.store
    pages = [page for node in store.tree.nodes.values() for page in node.pages[0]]
    assert len(pages) == 3 and accounts(script.state)["cached"] == store.tree.num_evictable(0) == 3
    store.tree.evict(0, 3)
    assert store.ledger.accounts_of(0, pages) == [retiring(launched.plan.step)] * 3
    other = script.submit(prompt_of(9, 1), 6)
    script.tick()  # the step is collected before the other's first one is planned
    assert store.ledger.collected == launched.plan.step and accounts(script.state)["retiring"] == 0
    script.run()
    assert len(other.tokens) == 6
    script.wind_up()


def test_13_evicted_window_page_rests_until_the_last_step_of_its_reader_is_collected() -> None:
    script = Script(Setting(spec=PLAIN, window=6))
    script.submit(prompt_of(12), 0)
    script.run()
    reader = script.submit(prompt_of(13), 40)  # shares 12 tokens with it, and reads their window for a while
    script.tick()
    nodes = [node for node in script.state.store.tree.nodes.values() if node.window_pins]
    pages = [page for node in nodes for page in node.held(1)]
    assert script.request(reader).lease.shared_len == 12 and len(pages) == 2  # the window before 12 begins at 6
    script.until(lambda: not any(node.window_pins for node in nodes))
    store, still_reads = script.state.store, script.state.in_flight[0].plan
    assert still_reads.firsts[1, 0] < 12  # launched before the window had moved on
    store.tree.evict(1, 3)
    assert store.ledger.accounts_of(1, pages) == [retiring(still_reads.step)] * 2
    script.run()
    assert len(reader.tokens) == 40
    script.wind_up()


@shapes("plain", "chain")
def test_13_row_of_a_deduplicated_prompt_points_at_the_page_it_shares(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec))
    twins = [script.submit(prompt_of(13), 30) for _ in range(2)]
    script.tick(2)
    own = [list(script.request(twin).lease.pages[0][:3]) for twin in twins]
    assert not set(own[0]) & set(own[1])
    script.tick()  # the prefill of both is settled: the second gives its pages up for the first's
    leases = [script.request(twin).lease for twin in twins]
    assert [lease.shared_len for lease in leases] == [12, 12]
    assert [lease.pages[0][:3] for lease in leases] == [own[0], own[0]]
    assert set(script.state.store.ledger.accounts_of(0, own[1])) == {retiring(script.state.in_flight[0].plan.step)}
    third = script.submit(prompt_of(40, 1), 4)  # writes over the pages given up
    script.run()
    assert [len(each.tokens) for each in (*twins, third)] == [30, 30, 4]
    script.wind_up()


# --- 14: draft rewind across a page edge ------------------------------------------------------------------------------


@depths
@shapes("chain", "tree")
@pytest.mark.parametrize("prompt_len", range(9, 14))
def test_14_next_turn_drafts_right_after_a_rewind_at_any_offset_in_a_page(
    spec: SpecShape, overlap: bool, prompt_len: int
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, num_pages=120, context=128))
    script.open("s")
    for max_new in range(1, 2 + spec.accept_max):  # cut at every length of the last round
        turn = script.submit(prompt_of(prompt_len, max_new), max_new, "s")
        script.run()
        rounds = turn.finished.spec.rounds
        assert rounds == ceil_div(max_new - 1, spec.accept_max)
        assert turn.finished.spec.histogram[-1] == rounds  # every draft of every round was right
    script.wind_up()


@shapes("chain", "tree")
@pytest.mark.parametrize("ticks", range(1, 6))
def test_14_next_turn_drafts_right_after_an_abort(spec: SpecShape, ticks: int) -> None:
    script = Script(Setting(spec=spec, num_pages=120))
    script.open("s")
    script.turn("s", 10, 3)
    turn = script.submit(prompt_of(6, 1), 30, "s")
    script.tick(ticks)
    script.abort(turn)
    after = script.turn("s", 2, 1 + 2 * spec.accept_max, salt=2)
    assert after.finished.spec.histogram[-1] == after.finished.spec.rounds == 2
    script.wind_up()


# --- 24: pins --------------------------------------------------------------------------------------------------------


@depths
@shapes("plain", "chain")
@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("ticks", range(6))
def test_24_first_turn_abort_leaves_no_pin_in_the_tree(
    spec: SpecShape, overlap: bool, window: int | None, ticks: int
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, window=window, chunk=4))
    script.submit(prompt_of(16), 3)
    script.run()
    num_cached = accounts(script.state)["cached"]
    assert num_cached == 4 and _pins(script) == 0
    script.open("s")
    turn = script.submit([*prompt_of(13), *prompt_of(5, 1)], 30, "s")
    script.tick(ticks)
    assert bool(_pins(script)) == (ticks > 0)
    script.abort(turn)
    script.run()
    assert (turn.finished.reason, len(script.state.sessions.table["s"].record)) == ("abort", 0)
    assert _pins(script) == 0 and script.state.sessions.table["s"].lease is None
    assert accounts(script.state)["leased"] == 0
    assert script.state.store.tree.num_evictable(0) == accounts(script.state)["cached"] == num_cached
    after = script.submit([*prompt_of(13), *prompt_of(2, 2)], 4, "s")
    script.run()
    assert after.cached == 12
    script.wind_up()


@depths
def test_24_request_that_waits_for_pages_pins_nothing_in_the_queue(overlap: bool) -> None:
    script = Script(Setting(spec=PLAIN, overlap=overlap, num_pages=24, context=90))
    script.submit(prompt_of(16), 0)
    script.run()
    (node,) = script.state.store.tree.nodes.values()
    blocker = script.submit(prompt_of(50, 7), 12)
    waiting = script.submit([*prompt_of(16), *prompt_of(40, 1)], 4)
    for _ in range(4):
        script.tick()
        assert script.request(waiting).row is None and "pages needed" in script.engine.waiting_for
        assert node.pins == 0 and len(script.state.store.leases) == 1  # the blocker's
    script.abort(waiting)
    script.run()
    assert (waiting.finished.reason, len(blocker.tokens)) == ("abort", 12)
    script.wind_up()
