"""Lookup keeps what rows say, finds what may follow, and uses it where the plan says so."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from roost.device.cpu import CpuDevice
from roost.drafters.lookup import FindDrafts, HostLookup, Lookup
from roost.drafters.protocol import Pairs
from roost.layers import host_lookup, lookup
from roost.layers.lookup import empty_texts
from roost.layers.rounds import NOTHING
from roost.layers.segments import Segments
from roost.sampling.params import SamplingParams
from roost.spec_shape import MATCH_MAX
from roost.step import RowId, RowSetup
from tests.support.segments import make_segments

FORMS: dict[str, tuple[type[Lookup], FindDrafts]] = {
    "torch": (Lookup, lookup.find_drafts),
    "host": (HostLookup, host_lookup.find_drafts),
}
every_form = pytest.mark.parametrize("form", FORMS)
NUM_ROWS, WIDTH, COUNT = 4, 64, 5
STORY = list(range(20, 50))


def setup_of(row: int, tokens: Sequence[int], prompt_len: int | None = None, scope: str | None = None) -> RowSetup:
    """A row that begins; all of it is its prompt, unless told."""
    return RowSetup(
        row=RowId(row),
        sampling=SamplingParams(),
        prompt_len=len(tokens) if prompt_len is None else prompt_len,
        min_len=0,
        stop_ids=(),
        tokens=np.array(tokens, dtype=np.int32),
        scope=scope,
    )


def begun(form: str, rows: Mapping[int, list[int]], *, count: int = COUNT, is_shared: bool = False) -> Lookup:
    """What looks drafts up in some rows' tokens."""
    kind, find_drafts = FORMS[form]
    texts = empty_texts(NUM_ROWS, WIDTH, is_shared=is_shared, device=torch.device("cpu"))
    made = kind(texts, find_drafts, count, CpuDevice())
    if rows:
        made.begin([setup_of(row, tokens) for row, tokens in rows.items()])
    return made


def rounds_at(rows: Mapping[int, list[int]]) -> Segments:
    """Rounds of rows that end in their roots."""
    return make_segments(list(rows), [len(tokens) - 1 for tokens in rows.values()])


def wanted(looks_up: Lookup, from_len: Mapping[int, int], width: int = 7, head_width: int = 4) -> None:
    """Have rows take what followed after matches of at least so many tokens; 0: after none."""
    lens = np.array(list(from_len.values()))[:, None]
    widths = np.where((np.arange(MATCH_MAX + 1) >= lens) & (lens > 0), width, 0).astype(np.int32)
    looks_up.want(np.array(list(from_len)), widths, head_width)


def pairs_of(row: int, start: int, tokens: Sequence[int]) -> Pairs:
    """What a step that ended with some tokens, from behind `start` on, hands over."""
    number = len(tokens)
    return Pairs(
        segments=make_segments([row], [start], [number], are_rounds=False),
        rows=torch.full((number,), row),
        slots=torch.zeros(number, dtype=torch.int64),
        positions=torch.arange(start, start + number),
        tokens=torch.tensor(tokens),
        sources=torch.zeros(number, dtype=torch.int64),
        hidden=torch.zeros(1, 1),
        aux_hidden=(),
        sampling_rows=torch.tensor([row]),
        last_pairs=torch.tensor([number - 1]),
    )


def found(looks_up: Lookup, rows: Mapping[int, list[int]]) -> list[tuple[int, bool, list[int]]]:
    """For each row that ends in its root: tokens found again, whether what followed is used, and that."""
    drafts, is_used = looks_up.find(rounds_at(rows), None)
    last = looks_up.last_found(torch.tensor(list(rows)))
    assert last[:, 2:].tolist() == drafts.tolist() and (last[:, 1] > 0).tolist() == is_used.tolist()
    return list(zip(last[:, 0].tolist(), is_used.tolist(), drafts.tolist(), strict=True))


@every_form
def test_a_row_that_begins_again_forgets_what_it_was(form: str) -> None:
    looks_up = begun(form, {1: [5, 6, 7, 5, 6, 7, 5, 6]})
    looks_up.begin([setup_of(1, [8, 9, 5])])
    assert found(looks_up, {1: [8, 9, 5]}) == [(0, True, [5] * COUNT)]
    looks_up.extend(pairs_of(1, 2, [8, 9]))
    assert found(looks_up, {1: [8, 9, 5, 8, 9]}) == [(2, True, [5, 8, 9, 5, 8])]


@every_form
def test_what_a_row_said_before_it_began_again_is_nobodys_any_more(form: str) -> None:
    looks_up = begun(form, {}, is_shared=True)
    looks_up.begin([setup_of(0, STORY, prompt_len=0, scope="mine")])
    looks_up.begin([setup_of(1, STORY[4:20], scope="mine")])
    found(looks_up, {0: STORY[:21]})  # it drafts, and so enters what it says
    assert found(looks_up, {1: STORY[4:20]}) == [(MATCH_MAX, True, STORY[20:25])]
    looks_up.begin([setup_of(0, [1, 2, 3], scope="mine")])
    assert found(looks_up, {1: STORY[4:20]})[0][0] == 0


@every_form
@pytest.mark.parametrize(("mine", "theirs"), [("a", "b"), (None, None), ("a", None)])
def test_what_is_said_in_another_scope_is_not_found(form: str, mine: str | None, theirs: str | None) -> None:
    looks_up = begun(form, {}, is_shared=True)
    looks_up.begin([setup_of(0, STORY, prompt_len=0, scope=theirs)])
    looks_up.begin([setup_of(1, STORY[4:20], scope=mine)])
    found(looks_up, {0: STORY[:21]})
    assert found(looks_up, {1: STORY[4:20]})[0][0] == 0


@every_form
def test_a_prompt_is_found_by_nobody_else_and_an_output_is(form: str) -> None:
    looks_up = begun(form, {}, is_shared=True)
    looks_up.begin([setup_of(0, STORY, prompt_len=14, scope="a")])
    looks_up.begin([setup_of(1, STORY[5:12], scope="a")])
    looks_up.begin([setup_of(2, STORY[9:16], scope="a")])
    for end in (12, 17, 22):
        found(looks_up, {0: STORY[:end]})
    lens = [length for length, _, _ in found(looks_up, {1: STORY[5:12], 2: STORY[9:16]})]
    assert lens == [0, 7]


@every_form
def test_each_row_takes_what_followed_after_the_matches_that_the_plan_names(form: str) -> None:
    text = [1, 2, 3, 9, 8, 1, 2, 3]
    rows = {0: text, 2: text, 3: text}
    looks_up = begun(form, rows)
    assert [is_used for _, is_used, _ in found(looks_up, rows)] == [True] * 3  # until a plan says something
    wanted(looks_up, {0: 3, 2: 4, 3: 0})
    assert [(length, is_used) for length, is_used, _ in found(looks_up, rows)] == [(3, True), (3, False), (3, False)]
    wanted(looks_up, {2: 1})
    assert [is_used for _, is_used, _ in found(looks_up, rows)] == [True, True, False], "others are as they were"
    wanted(looks_up, {0: 0})
    assert [is_used for _, is_used, _ in found(looks_up, rows)] == [False, True, False]


def test_on_the_host_a_round_has_as_many_nodes_as_were_looked_up_or_as_the_head_drafts_for() -> None:
    text = [1, 2, 3, 9, 8, 1, 2, 3]
    rows = {0: text, 2: [4, 5, 6], 3: text}
    looks_up = begun("host", rows)
    assert isinstance(looks_up, HostLookup)
    wanted(looks_up, {0: 3, 2: 3, 3: 4}, width=9, head_width=4)
    found(looks_up, rows)
    assert looks_up.nodes(np.array([3, 0, 2])).tolist() == [4, 9, 4]


@every_form
def test_what_is_known_before_is_drafted_first_and_found_again_from_its_end(form: str) -> None:
    rows = {0: [1, 2, 3, 4, 5, 6, 9], 1: [4, 5, 6, 7, 4, 5], 3: [7, 7]}
    looks_up = begun(form, rows)
    forced = torch.full((3, COUNT), NOTHING)
    forced[0, :2], forced[2] = torch.tensor([2, 3]), torch.tensor([8, 1, 8, 1, 8])
    drafts, is_used = looks_up.find(rounds_at(rows), forced)
    assert drafts.tolist() == [[2, 3, 4, 5, 6], [6, 7, 4, 5, 6], [8, 1, 8, 1, 8]]
    assert looks_up.last_found(torch.tensor([0, 1, 3]))[:, 0].tolist() == [2, 2, 3]
    assert is_used.all()


@every_form
def test_rows_are_found_by_their_own_number_in_any_order(form: str) -> None:
    texts = {row: [*range(10 * row, 10 * row + 6), 10 * row, 10 * row + 1] for row in range(NUM_ROWS)}
    looks_up = begun(form, texts)
    for order in ((3, 0, 2), (1, 3), (2,)):
        chosen = {row: texts[row] for row in order}
        assert found(looks_up, chosen) == [(2, True, [10 * row + place for place in (2, 3, 4, 5, 0)]) for row in order]
