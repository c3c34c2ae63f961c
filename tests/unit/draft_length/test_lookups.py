"""What is learned of drafts that are looked up: for each row, by how much was found again, and beside the head."""

import random
from collections.abc import Sequence

import pytest

from roost.draft_length.lookups import Lookups, Repeat, RowDrafts, Share, tokens_of
from roost.spec_shape import MATCH_MAX

STEPS = 16
DRAFTS = list(range(100, 100 + STEPS))
WRONG = 7


def said(num_right: int) -> list[int]:
    """What a round says that proves so many of the drafts right, and the next one wrong."""
    return [*DRAFTS[:num_right], WRONG]


def learned(
    lookups: Lookups, row: RowDrafts, match_len: int, num_right: int, num_rounds: int = 64, num_head_drafts: int = 0
) -> None:
    """The same round again and again."""
    for _ in range(num_rounds):
        lookups.note(row, match_len, DRAFTS, said(num_right), num_head_drafts)


def first_of(lookups: Lookups, row: RowDrafts, match_len: int) -> float:
    """How often the first draft is right."""
    return lookups.lookup_share(row, match_len)[0]


@pytest.mark.parametrize("share", [(0.0, 0.9), (0.3, 0.3), (0.1, 0.99), (0.8, 0.2), (1.0, 1.0)])
@pytest.mark.parametrize("width", [1, 2, 17])
def test_a_round_adds_the_drafts_that_are_right_in_a_row_and_one_more(share: Share, width: int) -> None:
    first, later = share
    assert tokens_of(share, width) == pytest.approx(1 + sum(first * later**place for place in range(width - 1)))


def test_a_share_is_what_was_assumed_until_something_is_seen_and_soon_what_was_seen_lately() -> None:
    share = RowDrafts().head
    assert share.value((0.4, 0.7), 2) == pytest.approx((0.4, 0.7))
    for right in (1, 0):
        for _ in range(200):
            share.note(2 * right, 1 + right)
        assert share.value((0.4, 0.7), 2) == pytest.approx((right, 1), abs=0.05), (
            "of later drafts nothing was seen since"
        )


def test_matches_that_rarely_go_on_but_then_for_long_are_no_reason_for_short_drafts() -> None:
    lookups, row = Lookups(STEPS), RowDrafts()
    for _ in range(30):
        for right in (STEPS, *[0] * 9):
            row.repeat_len = 0
            lookups.note(row, 3, DRAFTS, [*DRAFTS[:right], WRONG], 0)
    share = lookups.lookup_share(row, 3)
    assert share == pytest.approx((0.1, 1.0), abs=0.05)
    assert tokens_of(share, 4) < 1.5 and tokens_of(share, STEPS + 1) == pytest.approx(2.6, abs=0.5)


def test_before_anything_is_seen_the_longer_match_is_trusted_more() -> None:
    lookups, row = Lookups(STEPS), RowDrafts()
    shares = [lookups.lookup_share(row, length) for length in range(1, 40)]
    for each in zip(*shares, strict=True):
        assert list(each) == sorted(each) and 0 < each[0] < each[-1] < 1


@pytest.mark.parametrize("match_len", [1, 2, 3, 4, 7, 8])
def test_matches_of_one_length_are_judged_by_what_followed_them(match_len: int) -> None:
    lookups, good, bad = Lookups(STEPS), RowDrafts(), RowDrafts()
    before = {length: lookups.lookup_share(bad, length) for length in range(1, 9)}
    learned(lookups, bad, match_len, num_right=0)
    assert first_of(lookups, bad, match_len) < 0.3 * before[match_len][0]
    others = [length for length in before if length not in range(match_len - 1, match_len + 2)]
    assert [lookups.lookup_share(bad, length) for length in others] == [before[length] for length in others]
    for _ in range(64):
        lookups.note(good, match_len, DRAFTS, DRAFTS[:5], 0)
        good.repeat_len = 0  # as if each came alone
    assert first_of(lookups, good, match_len) > 0.8


def test_a_lookup_is_judged_as_far_as_something_was_said_whether_or_not_it_was_drafted() -> None:
    for num_head_drafts in (0, 4):
        lookups, row = Lookups(STEPS), RowDrafts()
        for _ in range(300):  # always two right, then a wrong one
            lookups.note(row, 3, DRAFTS, said(2), num_head_drafts)
        assert lookups.lookup_share(row, 3) == pytest.approx((1, 0.5), abs=0.02)


def test_a_row_goes_by_its_own_rounds_and_by_everybodys_while_it_has_few() -> None:
    lookups, good, bad, new = Lookups(STEPS), RowDrafts(), RowDrafts(), RowDrafts()
    first = first_of(lookups, new, 2)
    for _ in range(200):
        lookups.note(good, 2, DRAFTS, said(4), 0)
    assert first < first_of(lookups, new, 2) < first_of(lookups, good, 2) + 0.01
    learned(lookups, bad, 2, num_right=0, num_rounds=40)
    assert first_of(lookups, bad, 2) < 0.3 < first_of(lookups, good, 2)
    assert first_of(lookups, bad, 2) < first_of(lookups, new, 2) < first_of(lookups, good, 2)


def test_the_heads_drafts_are_judged_where_they_were_verified_and_by_what_was_found_beside_them() -> None:
    lookups, row = Lookups(STEPS), RowDrafts()
    before = lookups.head_share(row, 3)
    for _ in range(100):
        lookups.note(row, 3, DRAFTS, said(0), 0)  # not the head's
    assert lookups.head_share(row, 3) == before
    for _ in range(100):
        lookups.note(row, 3, DRAFTS, [1, 2, 3, 4, 5], 4)  # all four right
        lookups.note(row, 0, DRAFTS, [1], 4)  # where nothing was found, none
    assert lookups.head_share(row, 3)[0] > 0.9 > lookups.head_share(row, 1)[0]


def test_tokens_that_were_forced_behind_the_heads_drafts_are_not_its() -> None:
    lookups, row = Lookups(STEPS), RowDrafts()
    for _ in range(40):
        lookups.note(row, 3, DRAFTS, list(range(8)), 3)  # eight tokens said, three drafted
    assert all(0.9 < share <= 1 for share in lookups.head_share(row, 3))


def test_a_row_repeats_a_text_as_long_as_all_that_was_looked_up_is_right() -> None:
    lookups, row = Lookups(STEPS), RowDrafts()
    lookups.note(row, 3, DRAFTS, DRAFTS[:5], 0)
    assert row.repeat_len == 8
    lookups.note(row, MATCH_MAX, DRAFTS, DRAFTS, 0)
    assert row.repeat_len == 8 + STEPS
    lookups.note(row, MATCH_MAX, DRAFTS, said(2), 0)
    assert row.repeat_len == 0
    lookups.note(row, 2, DRAFTS, [*DRAFTS, WRONG], 0)  # all of a round: more than can be looked up is said
    assert row.repeat_len == 2 + STEPS
    lookups.note(row, 0, DRAFTS, DRAFTS[:2], 0)
    assert row.repeat_len == 0


def test_what_follows_a_text_that_is_repeated_is_judged_apart_from_short_matches() -> None:
    lookups, row = Lookups(STEPS), RowDrafts()
    chances = random.Random(4)
    for _ in range(300):
        if row.repeat_len:
            lookups.note(row, MATCH_MAX, DRAFTS, DRAFTS if chances.random() < 0.95 else said(3), 0)
        else:
            lookups.note(row, MATCH_MAX, DRAFTS, DRAFTS if chances.random() < 0.05 else said(0), 0)
    assert first_of(lookups, row, MATCH_MAX) < 0.7
    assert lookups.lookup_share(row, 40)[1] > 0.95


@pytest.mark.parametrize("unknown_len", [0, 4, 40])
def test_a_repeat_is_worth_less_the_more_is_unknown_of_it(unknown_len: int) -> None:
    sure, unsure = Repeat((1.0, 1.0), unknown_len), Repeat((0.8, 0.9), unknown_len)
    assert sure.tokens(17, usual=3.0) == 17
    still = 0.9**unknown_len
    assert unsure.tokens(17, usual=3.0) == pytest.approx(still * tokens_of((0.8, 0.9), 17) + (1 - still) * 3.0)


def test_nothing_is_divided_by_nothing_for_a_row_without_rounds() -> None:
    lookups, row = Lookups(1), RowDrafts()
    lookups.note(row, 1, DRAFTS[:1], [WRONG], 0)
    fresh: Sequence[Share] = [lookups.head_share(row, length) for length in range(1, 9)]
    assert all(0 < share < 1 for each in fresh for share in each)
