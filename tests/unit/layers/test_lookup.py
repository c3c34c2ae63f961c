"""Drafts that are looked up: what followed before, in the row's own text or in one that it may see."""

import random
from collections.abc import Callable

import pytest
import torch

from roost.layers import host_lookup, lookup
from roost.layers.lookup import GRAM, NOBODY, Found, Texts, empty_texts
from roost.layers.rounds import NOTHING
from roost.spec_shape import MATCH_MAX

Find = Callable[[Texts, torch.Tensor, torch.Tensor, int], Found]
FORMS: dict[str, Find] = {"torch": lookup.find_drafts, "host": host_lookup.find_drafts}
every_form = pytest.mark.parametrize("find", FORMS.values(), ids=FORMS)
COUNT, WIDTH, MINE, THEIRS = 6, 80, 11, 12


def texts_of(said: dict[int, list[int]], scopes: dict[int, int] | None = None, shared_from: int = 0) -> Texts:
    """Rows that have said something; without scopes nobody shares."""
    texts = empty_texts(6, WIDTH, is_shared=scopes is not None, device=torch.device("cpu"))
    for row, tokens in said.items():
        texts.tokens[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        texts.scopes[row] = (scopes or {}).get(row, NOBODY)
    texts.shared_from.fill_(shared_from)
    return texts


def found_in(find: Find, texts: Texts, lasts: dict[int, int], count: int = COUNT) -> list[tuple[int, list[int]]]:
    """How much matched and what followed, for some rows."""
    found = find(texts, torch.tensor(list(lasts)), torch.tensor(list(lasts.values())), count)
    return list(zip(found.match_lens.tolist(), found.drafts.tolist(), strict=True))


def looked_up(tokens: list[int]) -> tuple[int, list[int]]:
    """The same in a row's own text, plainly."""
    best, at = 0, max(0, len(tokens) - 2)
    for end in range(len(tokens) - 1):
        length = 0
        while length < MATCH_MAX and length <= end and tokens[end - length] == tokens[-1 - length]:
            length += 1
        if length and length >= best:
            best, at = length, end
    after = tokens[at + 1 :]
    return best, [after[i % len(after)] for i in range(COUNT)]


@every_form
def test_in_the_own_text_the_longest_match_wins_then_the_latest(find: Find) -> None:
    rng = random.Random(3)
    for _ in range(150):
        said = {row: [rng.randrange(3) for _ in range(rng.randint(2, 60))] for row in rng.sample(range(6), 3)}
        lasts = {row: len(tokens) - 1 for row, tokens in said.items()}
        assert found_in(find, texts_of(said), lasts) == [looked_up(tokens) for tokens in said.values()]


@every_form
def test_what_another_row_of_the_scope_said_is_found(find: Find) -> None:
    story = list(range(20, 60))
    texts = texts_of({0: story, 1: [1, 2, 3, *story[5:12]]}, {0: MINE, 1: MINE})
    found_in(find, texts, {0: len(story) - 1}, count=40)  # it drafts, and so what it has said is entered
    assert found_in(find, texts, {1: 9}) == [(7, story[12:18])]


@every_form
@pytest.mark.parametrize(("scope", "other"), [(MINE, THEIRS), (NOBODY, NOBODY), (MINE, NOBODY)])
def test_nothing_is_found_in_another_scope(find: Find, scope: int, other: int) -> None:
    story = list(range(20, 60))
    texts = texts_of({0: story, 1: [1, 2, 3, *story[5:12]]}, {0: scope, 1: other})
    found_in(find, texts, {0: len(story) - 1}, count=40)
    assert found_in(find, texts, {1: 9}) == [(0, [story[11]] * COUNT)]


@every_form
def test_a_place_whose_text_is_gone_or_was_taken_by_another_scope_is_not_used(find: Find) -> None:
    story = list(range(20, 60))
    for changed in ("text", "scope"):
        texts = texts_of({0: story, 1: [1, 2, 3, *story[5:12]]}, {0: MINE, 1: MINE})
        found_in(find, texts, {0: len(story) - 1}, count=40)
        if changed == "text":
            texts.tokens[0] = NOTHING
        else:
            texts.scopes[0] = THEIRS
        assert found_in(find, texts, {1: 9})[0][0] == 0, changed


@every_form
def test_only_what_follows_the_prompt_is_shared(find: Find) -> None:
    story = list(range(20, 60))
    texts = texts_of({0: story, 1: story[5:12], 2: story[20:27]}, {0: MINE, 1: MINE, 2: MINE}, shared_from=20)
    found_in(find, texts, {0: len(story) - 1}, count=40)
    assert [length for length, _ in found_in(find, texts, {1: 6, 2: 6})] == [0, 7]


@every_form
def test_what_others_say_is_found_by_four_tokens_and_by_no_fewer(find: Find) -> None:
    story = list(range(20, 60))
    texts = texts_of({0: story, 1: [1, *story[9:12]], 2: [1, *story[8:12]]}, {0: MINE, 1: MINE, 2: MINE})
    found_in(find, texts, {0: len(story) - 1}, count=40)
    assert [length for length, _ in found_in(find, texts, {1: 3, 2: 4})] == [0, GRAM] == [0, 4]


@pytest.mark.parametrize(
    ("num_rows", "width", "entries"), [(1, 3, 4), (4, 64, 512), (128, 8191, 2**20), (128, 8192, 2**20)]
)
def test_the_table_of_places_is_a_power_of_two_and_one_and_at_most_8_mb(
    num_rows: int, width: int, entries: int
) -> None:
    texts = empty_texts(num_rows, width, is_shared=True, device=torch.device("cpu"))
    assert texts.places is not None and len(texts.places) == entries + 1
    assert texts.places.nbytes <= 2**23 + 8
    assert empty_texts(num_rows, width, is_shared=False, device=torch.device("cpu")).places is None


@every_form
def test_the_longer_match_is_taken_and_the_own_one_among_equals(find: Find) -> None:
    story = list(range(20, 60))
    near, far = [*story[8:12], 7, 8, *story[8:12]], [*story[10:12], 7, 8, *story[5:12]]
    texts = texts_of({0: story, 1: near, 2: far}, {0: MINE, 1: MINE, 2: MINE})
    texts.shared_from[1:] = WIDTH  # these have only prompts
    found_in(find, texts, {0: len(story) - 1}, count=40)
    own, other = found_in(find, texts, {1: len(near) - 1, 2: len(far) - 1})
    assert own[1][:2] == [7, 8] and own[0] == GRAM
    assert other == (7, story[12:18])


@every_form
def test_drafts_at_the_end_of_a_text_are_tokens_all_the_same(find: Find) -> None:
    story = list(range(20, 20 + WIDTH))
    texts = texts_of({0: story, 1: story[-8:]}, {0: MINE, 1: MINE})
    found_in(find, texts, {0: WIDTH - 1}, count=40)
    ((_, drafts),) = found_in(find, texts, {1: 5})
    assert drafts[:2] == story[-2:] and all(token >= 0 for token in drafts)


def test_both_forms_find_the_same_in_texts_that_share() -> None:
    rng = random.Random(5)
    for _ in range(100):
        base = [rng.randrange(40) for _ in range(60)]
        said = {}
        for row in range(6):
            begin = rng.randrange(40)
            said[row] = [rng.randrange(40) for _ in range(rng.randint(1, 8))] + base[begin : begin + rng.randint(4, 20)]
        scopes = {row: rng.choice([NOBODY, MINE, THEIRS]) for row in said}
        mine, theirs = texts_of(said, scopes), texts_of(said, scopes)
        lasts = {row: len(tokens) - 1 for row, tokens in said.items()}
        for row, last in lasts.items():  # one after the other: which of equal places counts is then the same
            assert found_in(FORMS["torch"], mine, {row: last}) == found_in(FORMS["host"], theirs, {row: last})
