"""Truncation: the order of tokens, and sums that no device can get wrong."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from roost.sampling import draw
from tests.support import plain_sampler as plain


@given(st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=40))
def test_keys_are_distinct_and_order_by_logit_then_lowest_id(values: list[float]) -> None:
    logits = draw.sane(torch.tensor([values], dtype=torch.float32))
    keys = draw.ranking_keys(logits)[0].tolist()
    assert len(set(keys)) == len(keys)
    best_first = sorted(range(len(keys)), key=lambda token: -keys[token])
    assert best_first == plain.ranked(logits[0].numpy())


def test_a_sum_of_the_largest_vocabulary_does_not_overflow() -> None:
    assert draw.VOCAB_SIZE_MAX * draw.WEIGHT_ONE < 2**63
