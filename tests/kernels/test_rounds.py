"""Rounds of chains: the fused index arithmetic gives the very numbers of its reference, and no more."""

from dataclasses import fields
from types import ModuleType

import pytest
import torch

from roost.layers import rounds as reference
from roost.layers.rounds import Pages, RowState

rounds = pytest.importorskip("roost.kernels.rounds")

NUM_ROWS, PADDING_ROW, VOCAB_SIZE = 9, 8, 5  # few tokens, so that drafts are often right


def state_of(seed: int, page_size: int, num_books: int, device: torch.device) -> tuple[RowState, tuple[Pages, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 40, (NUM_ROWS,), generator=generator)
    lengths[PADDING_ROW] = 0
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=generator)
    tables = torch.randint(1, 99, (num_books, NUM_ROWS, 64 // page_size + 2), generator=generator, dtype=torch.int32)
    tables[:, PADDING_ROW] = 0
    pages = tuple(Pages(table=table.to(device), size=page_size) for table in tables)
    return RowState(lengths=lengths.to(device), last_tokens=tokens.to(device)), pages


def copied(state: RowState) -> RowState:
    return RowState(lengths=state.lengths.clone(), last_tokens=state.last_tokens.clone())


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("num_books", [1, 2])
@pytest.mark.parametrize(
    ("rows", "width"),
    [([3], 1), ([5, 0, 2, 7], 1), ([4, 1], 2), ([6, 2, 0, 1, 5], 4), ([0, 3, 8, 8], 3), ([7, 8], 7), ([], 2)],
)
def test_rounds_are_laid_out_and_settled_as_the_reference_has_it(
    rows: list[int], width: int, num_books: int, page_size: int, device: torch.device
) -> None:
    seed = 10 * width + page_size + len(rows)
    state, pages = state_of(seed, page_size, num_books, device)
    generator = torch.Generator().manual_seed(seed)
    at = torch.tensor(rows, dtype=torch.int64, device=device)
    drafts = torch.randint(-1, VOCAB_SIZE, (len(rows), width - 1), generator=generator).to(device)
    given = None if width == 1 else drafts
    found = rounds.chain_inputs(at, state, given, pages)
    wanted = reference.chain_inputs(at, state, given, pages)
    for name in ("starts", "tokens", "positions"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert all(torch.equal(*both) for both in zip(found.slots, wanted.slots, strict=True))

    places = rounds.chain_places(at, found.starts, width - 1, pages[0])
    expected_places = reference.chain_places(at, found.starts, width - 1, pages[0])
    assert torch.equal(places.positions, expected_places.positions)
    assert torch.equal(places.slots, expected_places.slots)

    drawn = torch.randint(0, VOCAB_SIZE, (len(rows), width), generator=generator).to(device)
    ours, theirs = copied(state), copied(state)
    settled = rounds.settle_chains(at, ours, found, drawn, PADDING_ROW, pages[0])
    expected = reference.settle_chains(at, theirs, wanted, drawn, PADDING_ROW, pages[0])
    for field in fields(expected):
        assert torch.equal(getattr(settled, field.name), getattr(expected, field.name)), field.name
    real = torch.arange(NUM_ROWS, device=device) != PADDING_ROW
    assert torch.equal(ours.lengths, theirs.lengths) and ours.lengths[PADDING_ROW] == 0
    assert torch.equal(ours.last_tokens[real], theirs.last_tokens[real])


def test_the_reference_keeps_drafts_up_to_the_first_wrong_one(device: torch.device) -> None:
    check_what_is_kept(reference, device)


def test_a_round_keeps_its_drafts_up_to_the_first_wrong_one(device: torch.device) -> None:
    check_what_is_kept(rounds, device)


def check_what_is_kept(form: ModuleType, device: torch.device) -> None:
    """Of three chains, the first is right throughout, the second up to its second draft, the third not at all."""
    state, pages = state_of(1, 4, 1, device)
    rows = torch.tensor([2, 5, 7], device=device)
    drafts = torch.tensor([[1, 2, 3], [1, 4, 3], [0, 2, 3]], device=device)
    inputs = form.chain_inputs(rows, state, drafts, pages)
    before = state.lengths[rows].clone()
    drawn = torch.tensor([[1, 2, 3, 0]] * 3, device=device)
    settled = form.settle_chains(rows, state, inputs, drawn, PADDING_ROW, pages[0])
    assert settled.result[:, 0].tolist() == [4, 2, 1]
    assert settled.result[:, 2:].tolist() == [[1, 2, 3, 0], [1, 2, -1, -1], [1, -1, -1, -1]]
    assert (state.lengths[rows] - before).tolist() == [4, 2, 1]
    assert state.last_tokens[rows].tolist() == [0, 2, 1]


def test_more_rounds_than_a_program_takes_have_their_places(device: torch.device) -> None:
    state, pages = state_of(2, 4, 1, device)
    rows = torch.arange(150, device=device) % NUM_ROWS
    places = rounds.chain_places(rows, state.lengths[rows], 2, pages[0])
    expected = reference.chain_places(rows, state.lengths[rows], 2, pages[0])
    assert torch.equal(places.positions, expected.positions) and torch.equal(places.slots, expected.slots)
