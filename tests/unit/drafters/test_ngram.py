"""The n-gram drafter proposes what followed the last tokens before."""

import random

import numpy as np
import pytest
import torch

from roost.device.cpu import CpuDevice
from roost.drafters.ngram import MATCH_MAX, NgramDrafter
from roost.drafters.protocol import Pairs
from roost.sampling.params import SamplingParams
from roost.step import RowId, RowSetup
from tests.support.segments import make_segments

WIDTH = 6
FORMS = pytest.mark.parametrize("is_host", [False, True], ids=["torch", "host"])


def begun(rows: dict[int, list[int]], *, is_host: bool = False) -> NgramDrafter:
    """A drafter that knows some rows' tokens."""
    drafter = NgramDrafter(num_rows=4, row_width=64, device=CpuDevice(), is_host=is_host)
    for row, tokens in rows.items():
        drafter.begin(
            RowSetup(
                row=RowId(row),
                sampling=SamplingParams(),
                prompt_len=len(tokens),
                min_len=0,
                stop_ids=(),
                tokens=np.array(tokens, dtype=np.int32),
            )
        )
    return drafter


def drafts(drafter: NgramDrafter, rows: dict[int, list[int]]) -> list[list[int]]:
    """What it proposes where the rows end in their roots."""
    starts = [len(tokens) - 1 for tokens in rows.values()]
    roots = torch.tensor([tokens[-1] for tokens in rows.values()])
    trees = drafter.propose(make_segments(list(rows), starts), roots, WIDTH, None)
    assert trees.tokens[:, 0].tolist() == [tokens[-1] for tokens in rows.values()]
    return trees.tokens[:, 1:].tolist()


def looked_up(tokens: list[int], count: int) -> list[int]:
    """The same, plainly."""
    best, at = -1, 0
    for end in range(len(tokens) - 1):
        length = 0
        while length < MATCH_MAX and length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length >= best:
            best, at = length, end
    after = tokens[at + 1 :]
    return [after[i % len(after)] for i in range(count)]


@FORMS
def test_the_longest_match_wins_then_the_latest(is_host: bool) -> None:
    rng = random.Random(2)
    for _ in range(200):
        rows = {row: [rng.randrange(3) for _ in range(rng.randint(2, 40))] for row in rng.sample(range(4), 3)}
        assert drafts(begun(rows, is_host=is_host), rows) == [looked_up(tokens, WIDTH - 1) for tokens in rows.values()]


def test_what_is_forced_counts_as_said() -> None:
    rows = {0: [1, 2, 3, 4, 5, 9], 1: [4, 5, 6, 7, 4, 5]}
    forced = torch.tensor([[1, 2, -1, -1, -1], [-1] * 5])
    trees = begun(rows, is_host=True).propose(make_segments([0, 1], [5, 5]), torch.tensor([9, 5]), WIDTH, forced)
    assert trees.tokens.tolist() == [[9, 1, 2, 3, 4, 5], [5, 6, 7, 4, 5, 6]]


@FORMS
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1, 2]),
        ([7, 7, 7, 7], [7, 7, 7, 7, 7]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1]),  # it goes round in circles, past what is known
        ([1, 2, 3], [3, 3, 3, 3, 3]),  # no match: the last token again
    ],
)
def test_repetition_is_continued(tokens: list[int], expected: list[int], is_host: bool) -> None:
    assert drafts(begun({0: tokens}, is_host=is_host), {0: tokens}) == [expected]


def test_a_row_that_begins_again_forgets_what_it_was() -> None:
    drafter = begun({1: [5, 6, 5, 6, 5]})
    again = begun({})
    for each in (drafter, again):
        each.begin(
            RowSetup(
                row=RowId(1),
                sampling=SamplingParams(),
                prompt_len=3,
                min_len=0,
                stop_ids=(),
                tokens=np.array([8, 9, 5], dtype=np.int32),
            )
        )
    assert drafts(drafter, {1: [8, 9, 5]}) == drafts(again, {1: [8, 9, 5]})


@FORMS
def test_what_a_step_adds_is_known_to_the_next(is_host: bool) -> None:
    drafter, hidden = begun({2: [1, 2, 3, 9, 9]}, is_host=is_host), torch.zeros(1, 1)
    pairs = Pairs(
        segments=make_segments([2], [4], [2], are_rounds=False),
        rows=torch.tensor([2, 2]),
        slots=torch.tensor([0, 0]),
        positions=torch.tensor([4, 5]),
        tokens=torch.tensor([1, 2]),
        sources=torch.tensor([0, 0]),
        hidden=hidden,
        aux_hidden=(),
        sampling_rows=torch.tensor([2]),
        last_pairs=torch.tensor([1]),
    )
    drafter.extend(pairs)
    assert drafts(drafter, {2: [1, 2, 3, 9, 9, 1, 2]}) == [[3, 9, 9, 1, 2]]
