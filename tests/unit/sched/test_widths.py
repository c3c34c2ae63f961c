"""Widths: each round's is in the plan; where more rows decode than --spec-max-batch allows, none carries drafts."""

import pytest

from roost.spec_shape import SpecShape
from roost.step import StepPlan
from tests.sim.script import CHAIN, Script, Setting, depths, prompt_of, shapes
from tests.support.spec_configs import AUTO_CHAIN


def _rounds(plan: StepPlan) -> list[int]:
    return [int(width) for width, is_chunk in zip(plan.query_lens, plan.is_prefill, strict=True) if not is_chunk]


@depths
@shapes("chain", "ngram", "tree")
@pytest.mark.parametrize("mixed", [False, True])
def test_rounds_carry_drafts_up_to_the_limit_and_none_beyond_it(spec: SpecShape, overlap: bool, mixed: bool) -> None:
    script = Script(Setting(spec=spec, spec_max_batch=2, overlap=overlap, mixed=mixed, num_pages=200))
    for salt in range(4):
        script.submit(prompt_of(5, salt), 6 + 12 * salt)
    script.run()
    rounds = [_rounds(plan) for plan in script.watch.plans]
    assert all(set(widths) <= {spec.tokens if len(widths) <= 2 else 1} for widths in rounds)
    assert {len(widths) for widths in rounds} >= {1, 2, 3, 4}
    script.wind_up()


@shapes("plain", "chain", "ngram", "tree")
def test_without_a_limit_every_round_carries_drafts(spec: SpecShape) -> None:
    script = Script(Setting(spec=spec, num_pages=200))
    for salt in range(4):
        script.submit(prompt_of(5, salt), 12)
    script.run()
    assert {width for plan in script.watch.plans for width in _rounds(plan)} == {spec.tokens}


def test_rows_in_prefill_do_not_count_against_the_limit() -> None:
    script = Script(Setting(spec=CHAIN, spec_max_batch=1, chunk=8))
    script.submit(prompt_of(4), 40)
    script.tick(3)
    script.submit(prompt_of(40, 1), 1)
    script.run()
    mixed = [_rounds(plan) for plan in script.watch.plans if plan.is_prefill.any() and not plan.is_prefill.all()]
    assert mixed and set(map(tuple, mixed)) == {(CHAIN.tokens,)}


@pytest.mark.parametrize(("limit", "most"), [(None, 4), (2, 4), (1, 1)])
def test_a_claim_is_as_large_as_its_round_can_accept(limit: int | None, most: int) -> None:
    script = Script(Setting(spec=CHAIN, spec_max_batch=limit))
    handles = [script.submit(prompt_of(5, salt), 60) for salt in range(2)]
    script.tick(4)
    for handle in handles:
        lease = script.request(handle).lease
        assert [(claim.size, claim.most) for claim in lease.claims] == [(1, most)] * 2
        assert lease.device_len_max == lease.settled_len + 2 * most
    script.run()


def _a_prompt_beside_two_rounds(script: Script) -> StepPlan:
    """The plan of such a step; all requests have ended."""
    for salt in range(2):
        script.submit(prompt_of(5, salt), 60)
    script.tick(4)
    script.submit(prompt_of(40, 7), 1)
    script.tick()
    plan = script.watch.plans[-1]
    script.run()
    return plan


@pytest.mark.parametrize("limit", [None, 2, 1])
def test_drafts_take_no_tokens_from_prefill(limit: int | None) -> None:
    plan = _a_prompt_beside_two_rounds(Script(Setting(spec=CHAIN, spec_max_batch=limit, chunk=16)))
    assert plan.query_lens[plan.is_prefill].tolist() == [16] and len(_rounds(plan)) == 2


def test_drafts_of_a_chosen_length_take_no_tokens_from_prefill() -> None:
    plan = _a_prompt_beside_two_rounds(Script(Setting(spec=AUTO_CHAIN, auto=True, chunk=16, num_pages=200)))
    assert plan.query_lens[plan.is_prefill].tolist() == [16] and min(_rounds(plan)) > 1


@depths
@shapes("chain", "tree")
def test_a_drafter_keeps_up_through_rounds_without_drafts(spec: SpecShape, overlap: bool) -> None:
    script = Script(Setting(spec=spec, spec_max_batch=1, overlap=overlap, num_pages=200))
    first, second = (script.submit(prompt_of(5, salt), max_new) for salt, max_new in ((0, 9), (1, 60)))
    script.run()
    widths = [tuple(_rounds(plan)) for plan in script.watch.plans]
    assert (1, 1) in widths and (spec.tokens,) in widths
    assert first.finished.spec.histogram[:-1] == second.finished.spec.histogram[:-1] == (0,) * (spec.accept_max - 1)
    assert second.finished.spec.rounds > 5  # each of them, after the other had ended, was right to its last draft
    script.wind_up()


@shapes("plain", "chain", "ngram")
def test_only_rounds_that_carry_drafts_count_as_rounds(spec: SpecShape) -> None:
    limit = None if spec.tokens == 1 else 1
    script = Script(Setting(spec=spec, spec_max_batch=limit, overlap=False))
    handles = [script.submit(prompt_of(5, salt), 9) for salt in range(2)]
    script.run()
    for handle in handles:  # both decode to their end in the same steps
        stats = handle.finished.spec
        assert (stats.rounds, stats.drafts_offered, stats.accept_length) == (0, 0, 0.0)
    alone = script.submit(prompt_of(5, 3), 9)
    script.run()
    stats = alone.finished.spec
    rounds = 0 if spec.tokens == 1 else 2
    assert (stats.rounds, stats.drafts_offered, stats.drafts_accepted) == (rounds, rounds * 3, rounds * 3)
    assert stats.accept_length == (0.0 if spec.tokens == 1 else 4.0)
    assert script.state.spec_counters.rounds == rounds
    script.wind_up()
