"""Drafts that are looked up in Triton are those of the reference."""

import random
from dataclasses import replace

import pytest
import torch

from roost.layers import lookup
from roost.layers.lookup import Texts
from tests.unit.layers.test_lookup import MINE, NOBODY, THEIRS, texts_of

kernels = pytest.importorskip("roost.kernels.lookup")
NUM_ROWS = 6


def _on(texts: Texts, device: torch.device) -> Texts:
    names = ("tokens", "shared_from", "scopes", "places")
    columns = {name: getattr(texts, name) for name in names}
    return replace(texts, **{name: None if each is None else each.clone().to(device) for name, each in columns.items()})


@pytest.mark.parametrize("count", [1, 5, 16])
@pytest.mark.parametrize("is_shared", [False, True])
def test_what_is_found_is_the_references(count: int, is_shared: bool, device: torch.device) -> None:
    rng = random.Random(7)
    base = [rng.randrange(50) for _ in range(70)]
    said = {row: [rng.randrange(3) for _ in range(5)] + base[4 * row :][: 20 + 5 * row] for row in range(NUM_ROWS)}
    said[0] = [rng.randrange(2) for _ in range(60)]
    scopes = {row: rng.choice([NOBODY, MINE, MINE, THEIRS]) for row in said} if is_shared else None
    wanted_in = texts_of(said, scopes, shared_from=4)
    found_in = _on(wanted_in, device)
    for _ in range(2):  # what the first round entered, the second finds
        for row, tokens in said.items():  # one by one: which of two equal places is entered last is not promised
            rows, lasts = torch.tensor([row]), torch.tensor([len(tokens) - 1 - rng.randrange(3)])
            wanted = lookup.find_drafts(wanted_in, rows, lasts, count)
            found = kernels.find_drafts(found_in, rows.to(device), lasts.to(device), count)
            assert found.match_lens.tolist() == wanted.match_lens.tolist()
            assert found.drafts.tolist() == wanted.drafts.tolist()


def test_rows_side_by_side_are_searched_apart(device: torch.device) -> None:
    rng = random.Random(8)
    said = {row: [rng.randrange(3) for _ in range(10 + 9 * row)] for row in range(NUM_ROWS)}
    texts, rows = texts_of(said), torch.tensor(list(said))
    lasts = torch.tensor([len(tokens) - 1 for tokens in said.values()])
    wanted = lookup.find_drafts(texts, rows, lasts, 7)
    found = kernels.find_drafts(_on(texts, device), rows.to(device), lasts.to(device), 7)
    assert found.match_lens.tolist() == wanted.match_lens.tolist()
    assert found.drafts.tolist() == wanted.drafts.tolist()


def test_a_text_of_several_chunks_is_searched_to_its_end(device: torch.device) -> None:
    rng, chunk = random.Random(9), kernels._CHUNK
    width = 2 * chunk + 3
    texts = lookup.empty_texts(4, width, is_shared=False, device=torch.device("cpu"))
    said, again = torch.tensor([rng.randrange(50) for _ in range(width)], dtype=torch.int32), torch.arange(60, 66)
    for last in (chunk, chunk + 1, width - 1):
        for place in (12, chunk - 8, last - 6):  # what the text ends in was said before, up to here
            texts.tokens[1] = said
            texts.tokens[1, last - 5 : last + 1] = again
            texts.tokens[1, place - 5 : place + 1] = again
            rows, lasts = torch.tensor([1]), torch.tensor([last])
            wanted = lookup.find_drafts(texts, rows, lasts, 5)
            found = kernels.find_drafts(_on(texts, device), rows.to(device), lasts.to(device), 5)
            assert found.match_lens.tolist() == wanted.match_lens.tolist() and int(wanted.match_lens) >= 6
            assert found.drafts.tolist() == wanted.drafts.tolist()
