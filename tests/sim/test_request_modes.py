"""Failure modes of a request's ends: no output, limits, chunks, input that never fits; a test's number is the mode's.

Every script ends in `wind_up`: audited page by page, then everything closed and evicted, and every page free.
"""

import pytest

from roost.spec_shape import PLAIN, SpecShape
from tests.sim.script import CHAIN, Script, Setting, accounts, depths, prompt_of, shapes

# --- 26: zero output and limits ---------------------------------------------------------------------------------------


@depths
@shapes("plain", "chain", "tree")
@pytest.mark.parametrize("session", [None, "s"], ids=["plain", "turn"])
def test_26_first_token_that_is_a_stop_is_the_whole_output(spec: SpecShape, overlap: bool, session: str | None) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    handle = script.submit(prompt_of(10), 20, session, stops=script.model.greedy(prompt_of(10), 1))
    script.run()
    assert (handle.finished.reason, handle.finished.usage.completion_tokens) == ("stop", 1)
    assert (handle.finished.spec.rounds, script.state.spec_counters.rounds) == (
        0,
        0,
    )  # a round in flight counts for nobody
    script.wind_up()


@depths
@shapes("plain", "chain")
def test_26_continuation_whose_first_token_is_a_stop_goes_on_afterwards(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    script.turn("s", 10, 4)
    history = script.histories["s"]
    for salt in (1, 2):
        tokens = prompt_of(3, salt)
        stop = script.model.greedy([*history, *tokens], 1)
        turn = script.submit(tokens, 20, "s", stops=stop)
        script.run()
        assert (turn.finished.reason, turn.tokens) == ("stop", stop)
        assert turn.finished.usage.prompt_tokens == len(history) + 3
        history = script.histories["s"]
        assert script.lease("s").settled_len == len(history) - (0 if overlap else 1)
    assert len(script.turn("s", 2, 6, salt=3).tokens) == 6
    script.wind_up()


@depths
@shapes("plain", "chain")
def test_26_max_new_tokens_0_returns_nothing_and_keeps_the_whole_prompt(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    silent = script.turn("s", 10, 0)
    assert (silent.finished.reason, silent.tokens, silent.finished.spec.rounds) == ("length", [], 0)
    assert len(script.state.sessions.table["s"].record) == script.lease("s").settled_len == 10
    answer = script.submit((), 4, "s")  # no new token: the last one runs again
    script.run()
    assert (answer.cached, answer.finished.usage.prompt_tokens, len(answer.tokens)) == (9, 10, 4)
    script.wind_up()


@depths
@shapes("plain", "chain", "tree")
def test_26_max_new_tokens_1_returns_one_token(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    short = script.turn("s", 10, 1)
    assert (short.finished.reason, len(short.tokens), short.finished.spec.rounds) == ("length", 1, 0)
    assert script.turn("s", 3, 1, salt=1).cached == (11 if overlap else 10)
    script.wind_up()


@depths
@shapes("plain", "chain")
def test_26_turn_without_new_tokens_does_not_write_a_shared_page(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    script.turn("s", 8, 0)
    shared_len = 8 if spec is PLAIN else 4  # a pair drafter's last slot depends on what comes next
    assert script.lease("s").shared_len == shared_len
    turn = script.submit((), 3, "s")
    script.run()
    assert turn.cached == (4 if spec is PLAIN else 7)  # back by one, or to the page floor where the page is shared
    script.wind_up()


@depths
@shapes("plain", "chain", "tree")
def test_26_every_turn_has_its_own_limit(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, overlap=overlap))
    script.open("s")
    limits = [5, 2, 0, 7, 1, 3]
    turns = [script.turn("s", 4, limit, salt) for salt, limit in enumerate(limits)]
    assert [(len(turn.tokens), turn.finished.max_new_tokens) for turn in turns] == [(each, each) for each in limits]
    assert {turn.finished.reason for turn in turns} == {"length"}
    queued = [script.submit(prompt_of(2, limit), limit, "s", queue=True) for limit in limits]
    script.run()
    assert [len(turn.tokens) for turn in queued] == limits
    script.wind_up()


@depths
def test_26_absent_limit_is_what_context_allows_and_is_reported(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap, context=40))
    script.open("s")
    script.turn("s", 10, 5)
    turn = script.submit(prompt_of(5, 1), None, "s")
    script.run()
    assert (turn.finished.max_new_tokens, len(turn.tokens), turn.finished.reason) == (20, 20, "length")
    script.wind_up()


# --- 31: chunked prefill and the drafter ------------------------------------------------------------------------------


@depths
@shapes("chain", "tree")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 4, 5])
def test_31_last_draft_input_of_a_chunk_that_is_not_final_is_the_next_prompt_token(
    spec: SpecShape, overlap: bool, mixed: bool, chunk: int
) -> None:
    script = Script(Setting(spec=spec, overlap=overlap, mixed=mixed, chunk=chunk))
    script.open("s")
    turns = [script.turn("s", 10, 1 + 2 * spec.accept_max, salt) for salt in range(2)]
    for turn in turns:
        assert turn.finished.spec.histogram == (*[0] * spec.steps, 2)  # every draft was right
    first = [plan for plan in script.watch.plans if plan.is_prefill[0]][: 10 // chunk]
    ends = [int(plan.start_positions[0] + plan.query_lens[0]) for plan in first]
    expected = [prompt_of(10)[end] if end < 10 else -1 for end in ends]
    assert [int(plan.next_tokens[0]) for plan in first] == expected
    script.wind_up()


# --- 36: input that never fits is answered ----------------------------------------------------------------------------


@depths
@pytest.mark.parametrize(("length", "max_new"), [(41, 0), (40, 1), (500, 1), (41, None), (10, 31)])
def test_36_input_longer_than_the_context_is_refused_with_the_numbers(
    overlap: bool, length: int, max_new: int | None
) -> None:
    script = Script(Setting(overlap=overlap, context=40))
    other = script.submit(prompt_of(5, 1), 6)
    handle = script.submit(prompt_of(length), max_new)
    script.tick()
    assert handle.refused.status == 413
    wanted = 1 if max_new is None else max_new
    assert f"prompt of {length} and {wanted} new tokens" in handle.refused.message
    assert "--context 40" in handle.refused.message
    script.run()
    assert len(other.tokens) == 6
    script.wind_up()


@depths
@shapes("plain", "chain")
def test_36_input_larger_than_an_empty_pool_is_refused_with_the_numbers(spec: SpecShape, overlap: bool) -> None:
    setting = Setting(spec=spec, overlap=overlap, num_pages=10, context=96)
    script = Script(setting)
    most = 40 - spec.alloc_len_per_decode - spec.accept_max - 4  # beside 4 new tokens
    fits, large = script.submit(prompt_of(most), 4), script.submit(prompt_of(most + 1, 1), 4)
    script.run()
    assert len(fits.tokens) == 4
    assert large.refused.status == 413
    assert "need [11] pages, an empty pool has [10] of 4 tokens" in large.refused.message
    script.wind_up()


@depths
def test_36_over_long_turn_is_refused_and_its_session_is_untouched(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap, context=40))
    script.open("s")
    script.turn("s", 20, 3)
    lease, held = script.lease("s"), accounts(script.state)
    before = (lease.settled_len, lease.epoch, list(lease.pages[0]))
    for length, max_new in ((18, 0), (10, 8), (300, None)):
        turn = script.submit(prompt_of(length, 1), max_new, "s")
        script.tick()
        assert turn.refused.status == 413
    assert script.lease("s") is lease and (lease.settled_len, lease.epoch, lease.pages[0]) == before
    assert accounts(script.state) == held and script.state.sessions.table["s"].turn is None
    after = script.turn("s", 5, 6, salt=2)
    assert (after.cached, after.finished.usage.prompt_tokens) == (23, 28)
    script.wind_up()


@depths
def test_36_waiting_turn_that_its_session_outgrew_is_answered(overlap: bool) -> None:
    script = Script(Setting(overlap=overlap, context=40))
    script.open("s")
    running = script.submit(prompt_of(10), 20, "s")
    large = script.submit(prompt_of(8, 1), 5, "s", queue=True)  # 43 tokens, once the running turn has ended
    small = script.submit(prompt_of(2, 2), 5, "s", queue=True)
    script.run()
    assert (len(running.tokens), large.refused.status) == (20, 413)
    assert "prompt of 38 and 5 new tokens" in large.refused.message
    assert (small.finished.usage.prompt_tokens, len(small.tokens)) == (32, 5)
    script.wind_up()


def test_36_every_bad_request_is_answered_at_once() -> None:
    script = Script(Setting(spec=CHAIN))
    script.open("s")
    bad = [
        script.submit((), 4),
        script.submit((), 4, "s"),
        script.submit((1, 997), 4),
        script.submit((1, -1), 4),
        script.submit((1,), -1),
        script.submit((1,), 4, stops=[997]),
        script.submit((1,), 4, queue=True),
        script.submit((1,), 4, "nobody"),
    ]
    script.tick()
    assert [each.refused.status for each in bad] == [400] * 7 + [404]
    assert not script.state.requests and accounts(script.state)["free"] == 64
    assert script.turn("s", 4, 4).finished.reason == "length"
    script.wind_up()
