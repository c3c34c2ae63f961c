"""The sampler against its plain reference: every option, alone and together, in any company."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.device.cpu import CpuDevice
from roost.sampling import draw
from roost.sampling import sampler as sampler_module
from roost.sampling.draw import RANKED_FIRST
from roost.sampling.params import SamplingParams
from roost.sampling.sampler import Sampler
from tests.support.plain_sampler import Case, Logits, changed_logits, choice, distribution, sampled, sampler_of

VOCAB_SIZE = 13
LOGITS = st.floats(-20, 20, width=32) | st.sampled_from([0.0, -0.0, 1.0, 2.5, -3.0])
TOKENS = st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8).map(tuple)
BIASES = st.dictionaries(st.integers(0, VOCAB_SIZE - 1), st.floats(-10, 10), max_size=4)


def _one_in(values: st.SearchStrategy, neutral: float) -> st.SearchStrategy:
    return st.just(neutral) | values


SAMPLINGS = st.builds(
    SamplingParams,
    temperature=_one_in(st.floats(0.05, 5) | st.just(0.0), 1.0),
    top_k=_one_in(st.integers(1, VOCAB_SIZE + 2), -1),
    top_p=_one_in(st.floats(0.01, 1), 1.0),
    min_p=_one_in(st.floats(0, 1), 0.0),
    repetition_penalty=_one_in(st.floats(0.5, 3), 1.0),
    presence_penalty=_one_in(st.floats(-2, 2), 0.0),
    frequency_penalty=_one_in(st.floats(-2, 2), 0.0),
    logit_bias=BIASES.map(lambda biases: tuple(biases.items())),
    seed=st.integers(0, 2**63 - 1),
)
CASES = st.builds(
    Case,
    sampling=SAMPLINGS,
    prompt=TOKENS,
    output=TOKENS,
    min_len=st.integers(0, 20),
    stop_ids=TOKENS.map(set).map(tuple),
)
ROWS_OF_LOGITS = st.lists(LOGITS, min_size=VOCAB_SIZE, max_size=VOCAB_SIZE)


def _random_logits(num_entries: int, vocab_size: int = VOCAB_SIZE, seed: int = 0) -> Logits:
    return (np.random.default_rng(seed).standard_normal((num_entries, vocab_size)) * 3).astype(np.float32)


@settings(max_examples=300, deadline=None)
@given(CASES, ROWS_OF_LOGITS, st.integers(0, 10**6))
def test_every_option_does_what_the_reference_does(case: Case, logits: list[float], first: int) -> None:
    case = dataclasses.replace(case, min_len=len(case.prompt) + case.min_len)
    begin = len(case.prompt)
    positions = [*range(begin, begin + 16), *range(begin + first, begin + first + 16)]  # below min_len, and far off
    table = np.array([logits] * len(positions), dtype=np.float32)
    got = sampled(sampler_of([case], VOCAB_SIZE), table, [0] * len(positions), positions)
    for position, token, row_logits in zip(positions, got, table, strict=True):
        expected = choice(case, row_logits, position)
        assert expected is None or token == expected


@settings(max_examples=100, deadline=None)
@given(st.lists(CASES, min_size=2, max_size=6), st.data())
def test_a_row_does_not_see_the_others(cases: list[Case], data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(len(cases))))
    logits = _random_logits(len(cases))
    positions = data.draw(st.lists(st.integers(0, 30), min_size=len(cases), max_size=len(cases)))
    sampler = sampler_of(cases, VOCAB_SIZE)
    alone = [sampled(sampler, logits[[row]], [row], [positions[row]])[0] for row in range(len(cases))]
    together = sampled(sampler, logits[order], order, [positions[row] for row in order])
    assert together == [alone[row] for row in order]


@pytest.mark.parametrize("vocab_size", [1000, 5003])
def test_a_row_does_not_see_the_others_in_a_large_vocabulary(vocab_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        SamplingParams(seed=1),
        SamplingParams(temperature=0.3, top_p=0.9, seed=2),
        SamplingParams(top_k=50, top_p=0.8, seed=3),
        SamplingParams(top_k=700, min_p=0.01, seed=4),
        SamplingParams(temperature=0),
        SamplingParams(temperature=0, logit_bias=((3, 9.0),)),
        SamplingParams(temperature=2.0, frequency_penalty=1.0, seed=1),
    ]
    cases = [Case(sampling=options[i % len(options)], prompt=(1, 2), output=(5, 5, 9)) for i in range(40)]
    logits, positions = _random_logits(40, vocab_size), list(range(40, 80))
    sampler = sampler_of(cases, vocab_size)
    together = sampled(sampler, logits, range(40), positions)
    assert [sampled(sampler, logits[[row]], [row], [positions[row]])[0] for row in range(40)] == together
    assert sampled(sampler, logits[::-1].copy(), range(39, -1, -1), positions[::-1]) == together[::-1]
    monkeypatch.setattr(sampler_module, "CHUNK_ELEMENTS_MAX", 3 * vocab_size)
    assert sampled(sampler, logits, range(40), positions) == together


def _flat_and_peaked(vocab_size: int) -> Logits:
    """A row whose tokens are all about as likely, and two that have a favourite."""
    logits = _random_logits(3, vocab_size, seed=5) / 100
    logits[[0, 2], 7] += 30
    return logits


# on both sides of the number of tokens that are put in order first
@pytest.mark.parametrize("vocab_size", [RANKED_FIRST - 1, RANKED_FIRST, RANKED_FIRST + 1, 5 * RANKED_FIRST])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.97])
def test_top_p_keeps_what_it_should_of_a_flat_row_beside_peaked_ones(vocab_size: int, top_p: float) -> None:
    logits = _flat_and_peaked(vocab_size)
    ks, ps = torch.full((3,), vocab_size), torch.full((3,), top_p, dtype=torch.float64)
    kept = draw.truncated(*_weights(logits), ks, ps, vocab_size) > 0
    for row, row_logits in zip(kept, logits, strict=True):
        expected, unsure = distribution(SamplingParams(top_p=top_p), row_logits)
        assert not unsure and row.nonzero().flatten().tolist() == list(expected)
    assert kept[1].sum() > 0.9 * top_p * vocab_size
    cases = [Case(sampling=SamplingParams(top_p=top_p, seed=seed)) for seed in range(3)]
    sampler = sampler_of(cases, vocab_size)
    for position in range(8):
        alone = [sampled(sampler, logits[[row]], [row], [position])[0] for row in range(3)]
        assert sampled(sampler, logits, range(3), [position] * 3) == alone


def _weights(logits: Logits) -> tuple[torch.Tensor, torch.Tensor]:
    row_logits = draw.sane(torch.from_numpy(logits))
    return row_logits, draw.weights_of(row_logits, torch.ones(len(logits), dtype=torch.float64))


def test_the_row_and_its_past_do_not_matter() -> None:
    case, other = (
        Case(sampling=SamplingParams(seed=5)),
        Case(sampling=SamplingParams(top_k=2, frequency_penalty=2), output=(3, 3)),
    )
    logits = _random_logits(1)
    sampler = sampler_of([other, other, case], VOCAB_SIZE)
    expected = sampled(sampler, logits, [2], [7])
    sampler.set_row(case.setup(0))
    sampler.note(torch.tensor([0]), torch.tensor([4]))
    assert sampled(sampler, logits, [0], [7]) == expected


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0.6),
        SamplingParams(temperature=1.7),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.8),
        SamplingParams(min_p=0.1),
        SamplingParams(temperature=1.3, top_k=8, top_p=0.9, min_p=0.05),
    ],
    ids=lambda sampling: f"t{sampling.temperature}-k{sampling.top_k}-p{sampling.top_p}-m{sampling.min_p}",
)
@pytest.mark.parametrize("along", ["positions", "seeds"])
def test_draws_follow_the_distribution(sampling: SamplingParams, along: str) -> None:
    num_draws, logits = 20_000, _random_logits(1, seed=3)
    table = np.repeat(logits, num_draws, axis=0)
    if along == "positions":
        sampler = sampler_of([Case(sampling=sampling)], VOCAB_SIZE)
        counts = Counter(sampled(sampler, table, [0] * num_draws, range(num_draws)))
    else:
        num_draws = 2000
        cases = [Case(sampling=dataclasses.replace(sampling, seed=seed)) for seed in range(num_draws)]
        sampler = sampler_of(cases, VOCAB_SIZE)
        counts = Counter(sampled(sampler, table[:num_draws], range(num_draws), [9] * num_draws))
    expected, _ = distribution(sampling, logits[0])
    assert set(counts) <= set(expected)
    common = {token: share * num_draws for token, share in expected.items() if share * num_draws >= 5}
    chi_square = sum((counts[token] - wanted) ** 2 / wanted for token, wanted in common.items())
    assert chi_square < len(common) + 5 * math.sqrt(2 * len(common))


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(frequency_penalty=0.8, presence_penalty=0.5),
        SamplingParams(repetition_penalty=1.6, temperature=1.5),
        SamplingParams(repetition_penalty=0.7, frequency_penalty=-0.4, top_k=8, top_p=0.95, logit_bias=((4, 2.0),)),
    ],
    ids=["output", "both", "sought"],
)
@pytest.mark.parametrize("path", [(), (3,), (3, 3, 7), (9, 1, 2, 9)], ids=str)
def test_draws_at_a_tree_node_follow_the_distribution_after_its_path(
    sampling: SamplingParams, path: tuple[int, ...]
) -> None:
    num_draws, logits = 10_000, _random_logits(1, seed=4) / 2
    case = Case(sampling=sampling, prompt=(0, 3, 5), output=(7, 7, 2))
    paths = [[*path, *[-1] * (5 - len(path))]] * num_draws
    table = np.repeat(logits, num_draws, axis=0)
    counts = Counter(sampled(sampler_of([case], VOCAB_SIZE), table, [0] * num_draws, range(num_draws), paths))
    expected, unsure = distribution(sampling, changed_logits(case, logits[0], 0, path))
    assert not unsure and set(counts) <= set(expected)
    common = {token: share * num_draws for token, share in expected.items() if share * num_draws >= 5}
    chi_square = sum((counts[token] - wanted) ** 2 / wanted for token, wanted in common.items())
    assert chi_square < len(common) + 5 * math.sqrt(2 * len(common))


def test_top_k_keeps_exactly_k_and_of_equals_the_lowest_ids() -> None:
    logits = np.array([1, 2, 2, 0, 2, 2, 1], dtype=np.float32)
    for top_k, kept in ((2, {1, 2}), (3, {1, 2, 4}), (5, {0, 1, 2, 4, 5}), (6, {0, 1, 2, 4, 5, 6})):
        sampler = sampler_of([Case(sampling=SamplingParams(top_k=top_k))], 7)
        assert set(sampled(sampler, np.repeat(logits[None], 500, axis=0), [0] * 500, range(500))) == kept


def test_top_p_keeps_the_fewest_that_reach_it() -> None:
    logits = np.zeros(4, dtype=np.float32)  # a quarter each: sums are exact
    for top_p, kept in (
        (1e-9, {0}),
        (0.25, {0}),
        (0.2500001, {0, 1}),
        (0.5, {0, 1}),
        (0.75, {0, 1, 2}),
        (0.8, {0, 1, 2, 3}),
    ):
        sampler = sampler_of([Case(sampling=SamplingParams(top_p=top_p))], 4)
        assert set(sampled(sampler, np.repeat(logits[None], 200, axis=0), [0] * 200, range(200))) == kept


def test_top_p_is_of_what_top_k_left() -> None:
    logits = np.zeros(10, dtype=np.float32)
    sampler = sampler_of([Case(sampling=SamplingParams(top_k=4, top_p=0.5))], 10)
    assert set(sampled(sampler, np.repeat(logits[None], 200, axis=0), [0] * 200, range(200))) == {0, 1}


def test_min_p_of_one_keeps_the_best_alone() -> None:
    logits = np.array([1, 3, 3, 2.999], dtype=np.float32)
    sampler = sampler_of([Case(sampling=SamplingParams(min_p=1))], 4)
    assert set(sampled(sampler, np.repeat(logits[None], 200, axis=0), [0] * 200, range(200))) == {1, 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [(), ((0, -1.0),)])
def test_greedy_ties_go_to_the_lowest_id(dtype: torch.dtype, bias: tuple[tuple[int, float], ...]) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 2.0]], dtype=dtype)
    for sampling in (SamplingParams(temperature=0, logit_bias=bias), SamplingParams(top_k=1, logit_bias=bias)):
        sampler = sampler_of([Case(sampling=sampling)], 5)
        assert sampler.sample(logits, torch.tensor([0]), [0], torch.tensor([3])).tolist() == [1]


def test_the_coldest_draw_is_the_greedy_one() -> None:
    sampler = sampler_of(
        [Case(sampling=SamplingParams(temperature=1e-300)), Case(sampling=SamplingParams(temperature=0))], VOCAB_SIZE
    )
    logits = _random_logits(30)
    assert sampled(sampler, logits, [0] * 30, range(30)) == sampled(sampler, logits, [1] * 30, range(30))


def test_bfloat16_logits_are_drawn_like_their_float32_values() -> None:
    logits = torch.from_numpy(_random_logits(50)).to(torch.bfloat16)
    sampler = sampler_of([Case(sampling=SamplingParams(top_p=0.9, presence_penalty=1), output=(1, 2))], VOCAB_SIZE)
    rows, positions = torch.zeros(50, dtype=torch.int32), torch.arange(50, dtype=torch.int32)
    tokens = sampler.sample(logits, rows, [0] * 50, positions)
    assert tokens.dtype == torch.int64
    assert torch.equal(tokens, sampler.sample(logits.float(), rows, [0] * 50, positions))


PENALTIES = SamplingParams(temperature=0, repetition_penalty=1.5, presence_penalty=0.7, frequency_penalty=0.4)


@settings(max_examples=60, deadline=None)
@given(TOKENS, TOKENS, TOKENS)
def test_noted_tokens_count_like_those_the_row_began_with(
    prompt: tuple[int, ...], output: tuple[int, ...], noted: tuple[int, ...]
) -> None:
    grown, whole = (
        Case(sampling=PENALTIES, prompt=prompt, output=output),
        Case(sampling=PENALTIES, prompt=prompt, output=output + noted),
    )
    sampler = sampler_of([grown, whole], VOCAB_SIZE)
    for token in noted:
        sampler.note(torch.tensor([0], dtype=torch.int32), torch.tensor([token], dtype=torch.int32))
    logits = _random_logits(20)
    assert sampled(sampler, logits, [0] * 20, range(20)) == sampled(sampler, logits, [1] * 20, range(20))
    for row_logits, token in zip(logits, sampled(sampler, logits, [0] * 20, range(20)), strict=True):
        assert token == choice(whole, row_logits, 0)


def test_a_note_counts_repeats_and_skips_padding_and_rows_without_penalties() -> None:
    case, free = (
        Case(sampling=SamplingParams(temperature=0, frequency_penalty=2)),
        Case(sampling=SamplingParams(temperature=0)),
    )
    sampler = sampler_of([case, free], 3)
    sampler.note(torch.tensor([0, 0, 0, 1, 0]), torch.tensor([2, 2, -1, 1, -1]))
    logits = np.array([[0.0, 1.0, 4.5]], dtype=np.float32)  # 4.5 - 2 * 2 < 1
    assert sampled(sampler, logits, [0], [0]) == [1] and sampled(sampler, logits, [1], [0]) == [2]
    assert sampled(sampler, np.array([[0.9, 0.0, 4.5]], dtype=np.float32), [0], [0]) == [0]
    sampler.set_row(Case(sampling=case.sampling).setup(1))  # nothing was counted while it had no penalty
    assert sampled(sampler, np.array([[0.0, 4.5, 4.0]], dtype=np.float32), [1], [0]) == [1]


def test_a_row_that_begins_forgets_the_counts_of_the_one_before() -> None:
    sampling = SamplingParams(temperature=0, repetition_penalty=2, frequency_penalty=2)
    sampler = sampler_of([Case(sampling=sampling, prompt=(0,), output=(1, 1))], 3)
    sampler.note(torch.tensor([0]), torch.tensor([2]))
    sampler.set_row(Case(sampling=sampling).setup(0))
    logits = np.array([[4.0, 3.5, 3.9], [3.0, 3.5, 3.4], [3.0, 3.4, 3.5]], dtype=np.float32)
    assert sampled(sampler, logits, [0] * 3, [0] * 3) == [0, 1, 2]


def test_counts_are_made_for_the_first_row_that_penalises() -> None:
    sampler = sampler_of([Case(sampling=SamplingParams())] * 2, VOCAB_SIZE)
    sampler.note(torch.tensor([0]), torch.tensor([1]))
    assert sampler._output_counts is None and sampler._in_prompt is None
    sampler.set_row(Case(sampling=PENALTIES).setup(1))
    assert sampler._output_counts is not None and sampler._output_counts.dtype == torch.int32


@settings(max_examples=60, deadline=None)
@given(CASES, st.lists(TOKENS, min_size=1, max_size=5))
def test_a_path_counts_for_its_own_entry_alone(case: Case, paths: list[tuple[int, ...]]) -> None:
    logits, path_len = _random_logits(len(paths)), 8
    padded = [[*path, *[-1] * (path_len - len(path))] for path in paths]
    sampler = sampler_of([case], VOCAB_SIZE)
    positions = range(30, 30 + len(paths))
    got = sampled(sampler, logits, [0] * len(paths), positions, padded)
    for row_logits, token, position, path in zip(logits, got, positions, paths, strict=True):
        expected = choice(case, row_logits, position, path if case.sampling.penalises else ())
        assert expected is None or token == expected
    plain = [choice(case, row_logits, position) for row_logits, position in zip(logits, positions, strict=True)]
    again = sampled(sampler, logits, [0] * len(paths), positions)  # nothing was kept
    assert all(expected in (None, token) for expected, token in zip(plain, again, strict=True))


@pytest.mark.parametrize(
    "sampling", [SamplingParams(temperature=0), SamplingParams(top_k=1), SamplingParams(temperature=0.01, top_k=3)]
)
def test_stop_ids_are_held_below_min_len_and_free_from_there(sampling: SamplingParams) -> None:
    case = Case(sampling=sampling, prompt=(1, 2, 3), min_len=6, stop_ids=(4, 2, 99, -7))
    logits = np.repeat(np.array([[0, 5, 8, 1, 9]], dtype=np.float32), 5, axis=0)
    assert sampled(sampler_of([case], 5), logits, [0] * 5, [3, 4, 5, 6, 7]) == [1, 1, 1, 4, 4]


def test_a_wider_list_leaves_the_others_as_they_are() -> None:
    few = Case(sampling=SamplingParams(temperature=0, logit_bias=((1, 5.0),)), min_len=9, stop_ids=(2,))
    many_biases = tuple((token, 50.0 if token == 6 else 0.0) for token in range(9))
    many = Case(sampling=SamplingParams(temperature=0, logit_bias=many_biases), min_len=9, stop_ids=(2, 3, 4, 5, 7, 8))
    sampler = sampler_of([few, many, few], VOCAB_SIZE)
    logits = np.zeros((3, VOCAB_SIZE), dtype=np.float32)
    logits[:, 2] = 40
    assert sampled(sampler, logits, [0, 1, 2], [3, 3, 3]) == [1, 6, 1]
    sampler.set_row(few.setup(1))
    assert sampled(sampler, logits, [0, 1, 2], [3, 3, 3]) == [1, 1, 1]


BAD_ROWS = (
    [math.nan] * 6,
    [-math.inf] * 6,
    [math.inf] * 6,
    [math.nan, 1, math.inf, -math.inf, 2, 3],
    [3.4e38, -3.4e38, 0, 0, 0, 0],
)


@pytest.mark.parametrize("bad", BAD_ROWS, ids=str)
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(temperature=1e-300),
        SamplingParams(top_k=3, top_p=0.5),
        SamplingParams(top_p=0.5, min_p=0.5),
        SamplingParams(repetition_penalty=1e-300, frequency_penalty=-2, logit_bias=((0, 100.0), (3, -100.0))),
    ],
)
def test_logits_that_are_no_numbers_never_leave_the_vocabulary(bad: list[float], sampling: SamplingParams) -> None:
    case = Case(sampling=sampling, prompt=(0, 3), output=(1, 3), min_len=9, stop_ids=(5,))
    good = Case(sampling=SamplingParams(seed=4))
    sampler = sampler_of([case, good], 6)
    logits = np.array([bad] * 50 + [[1, 2, 3, 4, 5, 6]], dtype=np.float32)
    tokens = sampled(sampler, logits, [0] * 50 + [1], [*range(50), 0])
    assert all(0 <= token < 6 for token in tokens)
    assert tokens[-1] == choice(good, logits[-1], 0)
    if not sampling.greedy and not all(math.isnan(value) for value in bad):
        assert not any(math.isnan(bad[token]) for token in tokens[:50])


def test_a_chain_is_drawn_up_to_the_first_draft_that_was_not() -> None:
    sampling = SamplingParams(temperature=1, top_k=2, seed=3)
    sampler, logits = sampler_of([Case(sampling=sampling)] * 2, 9), torch.randn(6, 9)
    rows, positions = [0, 0, 0, 0, 1, 1], torch.arange(6)
    whole = sampler.sample(logits, torch.tensor(rows), rows, positions).tolist()
    chain = [8, whole[0], (whole[1] + 1) % 9, whole[2], 8, whole[4]]  # the third node's draft is wrong
    found = sampler.sample(logits, torch.tensor(rows), rows, positions, chain_tokens=chain).tolist()
    assert found == [*whole[:2], -1, -1, *whole[4:]]


def test_the_callers_logits_stay_as_they_are() -> None:
    case = Case(sampling=PENALTIES, output=(1, 1, 4), min_len=9, stop_ids=(3,))
    biased = Case(sampling=SamplingParams(logit_bias=((2, 4.0),)))
    logits = torch.from_numpy(_random_logits(2))
    before = logits.clone()
    sampler_of([case, biased], VOCAB_SIZE).sample(logits, torch.tensor([0, 1]), [0, 1], torch.tensor([2, 2]))
    assert torch.equal(logits, before)


def test_a_row_that_never_began_does_not_sample() -> None:
    sampler = Sampler(2, VOCAB_SIZE, CpuDevice())
    with pytest.raises(AssertionError, match="before it began"):
        sampled(sampler, _random_logits(1), [1], [0])


def test_it_does_not_matter_who_is_in_inference_mode() -> None:
    wide = Case(sampling=dataclasses.replace(PENALTIES, logit_bias=((1, 1.0),)), min_len=5, stop_ids=(2,))
    with torch.inference_mode():
        sampler = sampler_of([wide], VOCAB_SIZE)
    sampler.note(torch.tensor([0]), torch.tensor([3]))
    sampler.set_row(wide.setup(0))
    tokens = sampler.sample(torch.from_numpy(_random_logits(1)), torch.tensor([0]), [0], torch.tensor([2]))
    assert tokens.tolist() == [choice(wide, _random_logits(1)[0], 2)]


def test_no_entries_are_no_tokens() -> None:
    sampler = sampler_of([Case(sampling=SamplingParams())], VOCAB_SIZE)
    assert (
        sampler.sample(torch.zeros(0, VOCAB_SIZE), torch.zeros(0, dtype=torch.int64), [], torch.zeros(0)).tolist() == []
    )


def test_the_reference_knows_the_order_of_changes() -> None:
    case = Case(
        sampling=SamplingParams(
            logit_bias=((0, -3.0),), repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=0.5
        ),
        prompt=(0, 1),
        output=(1, 2, 2),
        min_len=5,
        stop_ids=(3,),
    )
    row_logits = changed_logits(case, np.array([2, 4, 4, 9], dtype=np.float32), 4)
    assert row_logits.tolist() == [-2.0, 0.5, 0.0, -np.inf]  # bias comes first, and turns a quotient into a product
    assert sampled(sampler_of([case], 4), np.array([[2, 4, 4, 9]], dtype=np.float32), [0], [5]) == [3]
