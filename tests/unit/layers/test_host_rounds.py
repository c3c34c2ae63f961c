"""Rounds of chains on the host: plain Python gives the very numbers of the torch reference, at every shape."""

from dataclasses import fields, replace

import pytest
import torch

from roost.layers import host_rounds
from roost.layers import rounds as reference
from roost.layers.ops import TORCH_OPS, on_host
from roost.layers.rounds import Pages, RowState

NUM_ROWS, PADDING_ROW, VOCAB_SIZE = 9, 8, 5  # few tokens, so that drafts are often right


def state_of(seed: int, page_size: int, num_books: int) -> tuple[RowState, tuple[Pages, ...]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 40, (NUM_ROWS,), generator=generator)
    tokens = torch.randint(0, VOCAB_SIZE, (NUM_ROWS,), generator=generator)
    tables = torch.randint(1, 99, (num_books, NUM_ROWS, 64 // page_size + 2), generator=generator, dtype=torch.int32)
    return RowState(lengths=lengths, last_tokens=tokens), tuple(Pages(table=table, size=page_size) for table in tables)


def copied(state: RowState) -> RowState:
    return RowState(lengths=state.lengths.clone(), last_tokens=state.last_tokens.clone())


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("num_books", [1, 2])
@pytest.mark.parametrize(
    ("rows", "width"), [([3], 1), ([5, 0, 2, 7], 1), ([4], 5), ([6, 2, 0, 1, 5], 4), ([7, 8], 7), ([], 2)]
)
def test_rounds_are_laid_out_and_settled_as_the_reference_has_it(
    rows: list[int], width: int, num_books: int, page_size: int
) -> None:
    state, pages = state_of(10 * width + page_size, page_size, num_books)
    generator = torch.Generator().manual_seed(width)
    at = torch.tensor(rows, dtype=torch.int64)
    drafts = torch.randint(-1, VOCAB_SIZE, (len(rows), width - 1), generator=generator)
    given = None if width == 1 else drafts
    found, wanted = (form.chain_inputs(at, state, given, pages) for form in (host_rounds, reference))
    for name in ("starts", "tokens", "positions"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert all(torch.equal(*both) for both in zip(found.slots, wanted.slots, strict=True))

    places, expected_places = (form.chain_places(at, found.starts, 3, pages[0]) for form in (host_rounds, reference))
    assert torch.equal(places.positions, expected_places.positions)
    assert torch.equal(places.slots, expected_places.slots)

    drawn = torch.randint(0, VOCAB_SIZE, (len(rows), width), generator=generator)
    ours, theirs = copied(state), copied(state)
    settled = host_rounds.settle_chains(at, ours, found, drawn, PADDING_ROW, pages[0])
    expected = reference.settle_chains(at, theirs, wanted, drawn, PADDING_ROW, pages[0])
    for field in fields(expected):
        assert torch.equal(getattr(settled, field.name), getattr(expected, field.name)), field.name
    assert torch.equal(ours.lengths, theirs.lengths) and torch.equal(ours.last_tokens, theirs.last_tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_best_logit_is_the_first_of_equal_ones_and_of_those_that_are_no_number(dtype: torch.dtype) -> None:
    logits = torch.tensor(
        [[0.0, 3.0, 3.0, -1.0], [0.0, -0.0, -5.0, -5.0], [1.0, torch.nan, torch.nan, 9.0]], dtype=dtype
    )
    assert on_host(TORCH_OPS).argmax(logits).tolist() == logits.argmax(dim=-1).tolist() == [1, 0, 1]


def test_an_operation_that_a_backend_has_a_form_of_its_own_of_is_left_to_it() -> None:
    own = replace(TORCH_OPS, argmax=lambda logits: logits, chain_places=lambda *args: None)  # type: ignore[arg-type,return-value]
    found = on_host(own)
    assert found.argmax is own.argmax and found.chain_places is own.chain_places
    assert found.settle_chains is host_rounds.settle_chains and found.chain_inputs is host_rounds.chain_inputs
