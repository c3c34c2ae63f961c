"""Failure modes of lengths and pages under speculation, on the real device code; a test's number is the mode's.

Pools start as NaN and every tick is audited page by page, so a slot that is lost, stale or somebody else's shows.
"""

import pytest

from roost.forward.lengths import StepLengths
from roost.kv.ledger import describe
from roost.kv.pages import ceil_div
from roost.messages import Abort, Event, Submit, Tokens
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from tests.sim.script import accounts
from tests.support.forced_drafts import (
    CHAIN,
    NGRAM,
    TREE,
    assert_every_page_is_back,
    close,
    drafted,
    model_of,
    null_prompts,
    plainly,
    told,
    turn,
    until_output,
)
from tests.support.random_heads import make_head
from tests.support.tiny_models import WINDOW, Served, configure, prompts
from tests.support.workload import DEPTHS

PROMPT, LATER = prompts(10, 5, seed=1)


# --- 1, 2, 3: bonus, stale result, overshoot -------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "max_new", "inherited"), [(1, 4, 14), (0, 4, 13), (1, 3, 13), (0, 3, 13)])
def test_01_bonus_token_of_a_round_in_flight_is_inherited(depth: int, max_new: int, inherited: int) -> None:
    output = plainly("llama", PROMPT, 8)
    served = told("llama", configure(spec=NGRAM, depth=depth), [PROMPT + output], [3])
    served.open("s")
    turn(served, "first", PROMPT, max_new)
    spec = served.finish("first").spec
    assert spec.histogram[2] == spec.rounds == 1  # one round, a = 3
    assert turn(served, "second", LATER, 6) == inherited
    assert served.output("second") == plainly("llama", PROMPT + output[:max_new] + LATER, 6)
    close(served)
    assert_every_page_is_back(served)


def test_02_stale_result_of_a_finished_turn_changes_nothing() -> None:
    served = told("llama", configure(spec=NGRAM), [PROMPT + plainly("llama", PROMPT, 8)], [3])
    served.open("s")
    served.submit("first", PROMPT, 4, "s")
    while not any(note[0] == "end_length" for note in served.notes):
        served.engine.tick()
    state = served.engine.state
    lease, counted = state.sessions.table["s"].lease, state.spec_counters.snapshot()
    assert lease is not None and state.in_flight and counted == served.finish("first").spec
    before = (lease.settled_len, lease.device_len_max, lease.epoch, len(lease.pages[0]))
    served.run()
    assert (lease.settled_len, lease.device_len_max, lease.epoch, len(lease.pages[0])) == before
    assert state.spec_counters.snapshot() == counted
    assert turn(served, "second", LATER, 6) == 14


def test_02_stale_result_of_a_preempted_request_changes_nothing() -> None:
    served = told("llama", configure(spec=NGRAM), [PROMPT + plainly("llama", PROMPT, 30)], [2, 4, 1, 3] * 9)
    served.submit("r", PROMPT, 30)
    served.run(preempt_ticks=3)
    spec = served.finish("r").spec
    assert served.output("r") == plainly("llama", PROMPT, 30)
    assert served.engine.state.spec_counters.snapshot() == spec
    # what live rounds added: all but one token of each prefill, of which there was one more with every preemption
    assert spec.rounds + spec.drafts_accepted - spec.overshoot + 1 + served.count("suspend") == 30
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("kept", [1, 2, 3, 4])
def test_03_overshoot_is_neither_inherited_nor_kept_in_the_record(depth: int, kept: int) -> None:
    output = plainly("llama", PROMPT, 8)
    served = told("llama", configure(spec=NGRAM, depth=depth), [PROMPT + output])
    served.open("s")
    turn(served, "first", PROMPT, 1 + kept)
    lease = served.engine.state.sessions.table["s"].lease
    assert lease is not None and served.finish("first").spec.overshoot == 4 - kept
    length = 11 + kept - (1 if kept == 4 and depth == 0 else 0)  # uncut, at depth 0, its bonus has no KV
    assert (lease.settled_len, len(lease.pages[0])) == (length, ceil_div(length, 4))
    assert turn(served, "second", LATER, 6) == length
    assert served.output("second") == plainly("llama", PROMPT + output[: 1 + kept] + LATER, 6)
    assert served.finish("second").usage.prompt_tokens == 16 + kept


# --- 4, 5, 6: window frontier, preempted tail, branch reserve ---------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 4])
def test_04_abort_keeps_the_window_behind_the_commit_point(depth: int, page_size: int) -> None:
    first, second, third = prompts(30, 3, 4, seed=2)
    begun = first + plainly("qwen2-window", first, 4)
    text = begun + second + plainly("qwen2-window", begun + second, 60)
    served = told("qwen2-window", configure(spec=NGRAM, depth=depth, page_size=page_size), [text], [2, 4, 3] * 30)
    served.open("s")
    turn(served, "first", first, 4)
    served.submit("second", second, 60, "s")
    committed = served.finish("first").usage.prompt_tokens + 4
    request = until_output(served, "second", 45)
    assert request.lease.evicted_len > committed  # the window is far past the commit point
    served.post(Abort(request_id="second"))
    served.run()
    lease = served.engine.state.sessions.table["s"].lease
    assert lease is not None and lease.evicted_len <= max(0, lease.settled_len - WINDOW)
    assert lease.settled_len == committed
    assert turn(served, "third", third, 8) == committed
    assert served.output("third") == plainly("qwen2-window", begun + third, 8)
    close(served)
    assert_every_page_is_back(served)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_05_preemptions_at_any_offset_in_a_page_lose_no_page_and_no_token(spec: SpecShape) -> None:
    served = drafted(configure(spec=spec, pool_tokens=4096), range(0, 90, 5))
    work = null_prompts(9, 10, 11, 12, seed=3)
    for number, prompt in enumerate(work):
        served.submit(f"r{number}", prompt, 24)
    served.run(preempt_ticks=4)
    assert served.count("suspend") > 4
    for number, prompt in enumerate(work):
        assert served.output(f"r{number}") == plainly("forgetful", prompt, 24), number
    assert_every_page_is_back(served)


def test_06_page_512_with_many_turns_and_eight_branches_leaks_nothing() -> None:
    wide = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)
    served = drafted(configure(page_size=512, spec=wide, context=1100, pool_tokens=40960, max_running=1))
    served.open("s")
    text: tuple[int, ...] = ()
    for number, prompt in enumerate(null_prompts(170, 171, 172, 173, seed=4)):  # over the edge in the third
        cached = turn(served, f"t{number}", prompt, 4)
        assert cached == len(text)
        text += prompt
        assert served.output(f"t{number}") == plainly("forgetful", text, 4), number
        text += served.output(f"t{number}")
        held = accounts(served.engine.state)
        assert held["leased"] + held["cached"] == ceil_div(len(text), 512) and held["retiring"] == 0
    close(served)
    assert_every_page_is_back(served)


# --- 7, 8: widths, whole pages ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("steps", "topk", "tokens"), [(4, 3, 9), (2, 5, 7), (5, 2, 4), (3, 7, 26)])
def test_07_widths_that_all_differ_are_never_confused(steps: int, topk: int, tokens: int) -> None:
    spec = SpecShape(steps=steps, topk=topk, tokens=tokens, draft_kv=DraftKv.PAIR)
    assert len({steps + 1, topk, tokens, steps * topk}) == 4
    served = drafted(configure(spec=spec, page_size=4, chunk=16, pool_tokens=8192))
    work = null_prompts(5, 23, 12, 9, seed=5)
    for number, prompt in enumerate(work):
        served.submit(f"r{number}", prompt, 20)
    served.run()
    for number, prompt in enumerate(work):
        assert served.output(f"r{number}") == plainly("forgetful", prompt, 20), number
        found = served.finish(f"r{number}").spec
        assert found.histogram == (*[0] * (spec.accept_max - 1), found.rounds), found  # the deepest path every time
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("page_size", [4, 64])
def test_08_rest_of_the_last_page_is_used_by_the_next_turn(depth: int, page_size: int) -> None:
    served = drafted(configure(spec=TREE, depth=depth, page_size=page_size, pool_tokens=8192))
    served.open("s")
    own: list[int] = []
    for number, prompt in enumerate(null_prompts(11, 11, 11, seed=6)):
        turn(served, f"t{number}", prompt, 4)
        lease, held = served.engine.state.sessions.table["s"].lease, accounts(served.engine.state)
        assert lease is not None and len(lease.pages[0]) == ceil_div(lease.settled_len, page_size)
        assert held["leased"] + held["cached"] == len(lease.pages[0]) and held["retiring"] == 0
        kept = (15 * number - 2) // page_size if number else 0  # the last two slots may be written again
        assert lease.pages[0][:kept] == own[:kept]
        own = list(lease.pages[0])
    close(served)
    assert_every_page_is_back(served)


# --- 9: the mirror of the lengths -------------------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [PLAIN, NGRAM], ids=["plain", "speculating"])
def test_09_lengths_are_taken_from_the_device_exactly_when_a_step_speculates(
    spec: SpecShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresh, synced = StepLengths.refresh, []

    def noted(self: StepLengths, *, sync: bool) -> None:
        synced.append(sync)
        refresh(self, sync=sync)

    monkeypatch.setattr(StepLengths, "refresh", noted)
    output = plainly("llama", PROMPT, 24)
    synced.clear()
    if spec is NGRAM:
        served = told("llama", configure(spec=spec), [PROMPT + output], [1, 3, 2, 4, 1, 2])
    else:
        served = Served(model_of("llama"), configure(spec=spec))
    served.submit("r", PROMPT, 20)
    served.run()
    assert served.output("r") == output[:20]
    assert set(synced) == {spec is NGRAM}
    if spec is NGRAM:
        assert served.finish("r").spec.histogram == (2, 2, 1, 3)  # every count moved the next round


# --- 10, 11: shared pages, window pool --------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("shared_len", [8, 9, 11])
def test_10_only_pages_past_the_shared_ones_are_given_back(depth: int, shared_len: int) -> None:
    served = drafted(configure(spec=CHAIN, depth=depth))
    (first,), (one, other) = null_prompts(shared_len, seed=7), prompts(4, 6, seed=8)
    served.submit("first", first, 1)
    served.run()
    whole = (shared_len - 1) // 4 * 4  # a slot stands for the token after it
    served.submit("one", first + one, 30)
    until_output(served, "one", 9)
    served.post(Abort(request_id="one"))
    served.run()
    served.submit("other", first + other, 9)
    served.run()
    assert served.finish("other").usage.cached_tokens == whole
    assert served.output("other") == plainly("forgetful", first + other, 9)
    found = served.finish("other").spec
    assert found.histogram[-1] == found.rounds > 0  # draft KV of the shared pages, too, is as it was
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("first_len", [8, 9, 11])
def test_10_aborted_turn_leaves_the_partial_page_of_the_commit_point(depth: int, first_len: int) -> None:
    served = drafted(configure(spec=CHAIN, depth=depth))
    (first,), (one, other) = null_prompts(first_len, seed=7), prompts(4, 6, seed=8)
    served.open("s")
    turn(served, "first", first, 2)
    served.submit("one", one, 30, "s")
    until_output(served, "one", 9)
    served.post(Abort(request_id="one"))
    served.run()
    turn(served, "other", other, 9)
    assert served.output("other") == plainly("forgetful", first + served.output("first") + other, 9)
    close(served)
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize(("kind", "spec"), [("mistral", TREE), ("qwen2-window", TREE), ("qwen3-window", CHAIN)])
def test_11_window_pool_is_counted_to_the_page(kind: str, spec: SpecShape, depth: int) -> None:
    head = make_head("eagle", model_of(kind))
    config = configure(spec=spec, depth=depth, chunk=8, window_pool_tokens=200, pool_tokens=2048)
    served = Served(model_of(kind), config, head=head)
    work = prompts(21, 9, 14, seed=8)
    for number, prompt in enumerate(work):
        served.submit(f"r{number}", prompt, 26)
    served.run()
    for number, prompt in enumerate(work):
        assert served.output(f"r{number}") == plainly(kind, prompt, 26), number
    assert_every_page_is_back(served)


# --- 12, 13, 14: what is in flight, rewinds ---------------------------------------------------------------------------


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_12_abort_in_any_tick_frees_once(spec: SpecShape) -> None:
    served = drafted(configure(spec=spec, chunk=4))
    for ticks, prompt in enumerate(null_prompts(*[9] * 9, seed=9)):
        served.submit(f"r{ticks}", prompt, 12)
        for _ in range(ticks):
            served.engine.tick()
        served.post(Abort(request_id=f"r{ticks}"))
        served.run()
        assert served.finish(f"r{ticks}").reason in ("abort", "length")
        assert accounts(served.engine.state)["leased"] == 0
    assert_every_page_is_back(served)


def test_12_client_lost_while_it_gets_its_last_tokens_frees_once() -> None:
    served = told("llama", configure(spec=NGRAM), [PROMPT + plainly("llama", PROMPT, 8)])

    def lost(event: Event) -> None:
        if isinstance(event, Tokens) and len(event.tokens) > 1:
            raise ConnectionError("gone")

    served.engine.post(Submit(request_id="r", tokens=PROMPT, max_new_tokens=4), lost)
    served.run()
    assert served.engine.state.totals.endings == {"length": 1}
    assert_every_page_is_back(served)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_13_row_and_pages_rest_while_a_launched_step_may_write_them(spec: SpecShape) -> None:
    served = drafted(configure(spec=spec, max_running=1, pool_tokens=256))  # the next one needs what this one had
    first, second = null_prompts(9, 13, seed=10)
    served.submit("first", first, 40)
    request = until_output(served, "first", 6)
    row, pages = request.row, list(request.lease.pages[0])
    served.submit("second", second, 20)
    served.post(Abort(request_id="first"))
    served.engine.tick()
    state = served.engine.state
    named = {page for launched in state.in_flight for page in pages if row in launched.plan.rows}
    owners = {describe(each).split()[0] for each in state.store.ledger.accounts_of(0, sorted(named))}
    assert named and owners <= {"retiring", "cached"}, owners
    assert [each.row for each in state.running] != [row]
    served.run()
    assert served.output("second") == plainly("forgetful", second, 20)
    found = served.finish("second").spec
    assert found.histogram[-1] == found.rounds > 0  # nobody wrote into its draft slots either
    assert_every_page_is_back(served)


@DEPTHS
@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_14_next_turn_drafts_right_after_a_rewind_at_any_offset_in_a_page(spec: SpecShape, depth: int) -> None:
    served = drafted(configure(spec=spec, depth=depth, context=512, pool_tokens=8192))
    served.open("s")
    lengths = set()
    for number, prompt in enumerate(null_prompts(9, 6, 7, 8, 5, 6, 7, 8, 9, 5, 6, 7, seed=11)):
        max_new = 1 + number % (1 + spec.accept_max)  # cut at every length of the last round
        turn(served, f"t{number}", prompt[number > 0 :], max_new)
        found = served.finish(f"t{number}").spec
        assert found.rounds == ceil_div(max_new - 1, spec.accept_max)
        assert found.histogram[-1] == found.rounds, (number, found)  # every draft of every round was right
        lease = served.engine.state.sessions.table["s"].lease
        assert lease is not None
        lengths.add(lease.settled_len % 4)
    assert len(lengths) > 2  # offsets in a page
    close(served)
    assert_every_page_is_back(served)


@pytest.mark.parametrize("spec", [CHAIN, TREE], ids=["chain", "tree"])
def test_14_rounds_that_stop_at_any_offset_in_a_page_rewind_the_draft(spec: SpecShape) -> None:
    wrong = (13, 15, 18, 22, 27, 28, 29, 34)  # accept counts that end before, at and past the edges of pages of 4
    served = drafted(configure(spec=spec), wrong)
    (prompt,) = null_prompts(10, seed=12)
    served.submit("r", prompt, 30)
    served.run()
    assert served.output("r") == plainly("forgetful", prompt, 30)
    expected, length = [0] * spec.accept_max, 10
    while length < 39:  # a wrong draft costs the rest of its round, and nothing after it
        accept_len = 1
        while accept_len < spec.accept_max and length + accept_len - 2 not in wrong:  # the slot it was drafted from
            accept_len += 1
        expected[accept_len - 1] += 1
        length += accept_len
    assert served.finish("r").spec.histogram == tuple(expected)
    assert_every_page_is_back(served)
