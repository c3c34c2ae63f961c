"""The n-gram drafter proposes what followed the last tokens before, whatever it was, and never fewer drafts."""

import pytest
import torch

from roost.drafters.lookup import Lookup
from roost.drafters.ngram import NgramDrafter
from tests.unit.drafters.test_lookup import FORMS, begun, pairs_of, rounds_at, wanted

WIDTH = 6


def drafts(drafter: NgramDrafter, rows: dict[int, list[int]]) -> list[list[int]]:
    """What it proposes where the rows end in their roots."""
    roots = torch.tensor([tokens[-1] for tokens in rows.values()])
    trees = drafter.propose(rounds_at(rows), roots, WIDTH, None)
    assert trees.are_chains and trees.tokens[:, 0].tolist() == roots.tolist()
    return trees.tokens[:, 1:].tolist()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5, 1, 2]),
        ([7, 7, 7, 7], [7, 7, 7, 7, 7]),
        ([1, 2, 1, 2, 1, 2], [1, 2, 1, 2, 1]),  # it goes round in circles, past what is known
        ([1, 2, 3], [3, 3, 3, 3, 3]),  # no match: the last token again
    ],
)
def test_repetition_is_continued(tokens: list[int], expected: list[int], form: str) -> None:
    lookup = begun(form, {0: tokens}, count=WIDTH - 1)
    wanted(lookup, {0: 0})  # the plan's word is for those who draft beside it: there is nobody else to ask
    assert drafts(NgramDrafter(lookup), {0: tokens}) == [expected]


@pytest.mark.parametrize("form", FORMS)
def test_a_narrow_round_takes_the_first_of_what_followed(form: str) -> None:
    rows = {0: [1, 2, 3, 4, 5, 1, 2], 3: [8, 9, 8]}
    drafter = NgramDrafter(begun(form, rows, count=WIDTH - 1))
    trees = drafter.propose(rounds_at(rows), torch.tensor([2, 8]), 3, None)
    assert trees.tokens.tolist() == [[2, 3, 4], [8, 9, 8]]


def test_what_is_forced_counts_as_said() -> None:
    rows = {0: [1, 2, 3, 4, 5, 9], 1: [4, 5, 6, 7, 4, 5]}
    forced = torch.tensor([[1, 2, -1, -1, -1], [-1] * 5])
    drafter = NgramDrafter(begun("host", rows, count=WIDTH - 1))
    trees = drafter.propose(rounds_at(rows), torch.tensor([9, 5]), WIDTH, forced)
    assert trees.tokens.tolist() == [[9, 1, 2, 3, 4, 5], [5, 6, 7, 4, 5, 6]]


@pytest.mark.parametrize("form", FORMS)
def test_what_a_step_adds_is_known_to_the_next(form: str) -> None:
    lookup: Lookup = begun(form, {2: [1, 2, 3, 9, 9]}, count=WIDTH - 1)
    drafter = NgramDrafter(lookup)
    drafter.extend(pairs_of(2, 4, [1, 2]))
    assert drafts(drafter, {2: [1, 2, 3, 9, 9, 1, 2]}) == [[3, 9, 9, 1, 2]]
