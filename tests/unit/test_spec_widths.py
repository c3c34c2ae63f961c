"""Widths of rounds: one, or a menu; what may be planned is captured, at every number of rounds."""

from itertools import pairwise

import pytest

from roost.graph_sizes import batch_sizes, graph_sizes, step_tokens_max
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from roost.spec_widths import AUTO_STEPS_MAX, LOOKUP_STEPS_MAX, Widths
from tests.support.spec_configs import AUTO_CHAIN, AUTO_JOINT, AUTO_NGRAM

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)


def _fixed(shape: SpecShape, limit: int | None = None) -> Widths:
    return Widths(shape=shape, is_auto=False, limit=limit)


def _captured(widths: Widths, size: int) -> list[int]:
    return [width for batch, width in graph_sizes(widths, 8) if batch == size]


def test_a_captured_size_serves_drafts_up_to_the_limit_and_none_above() -> None:
    assert _captured(_fixed(PLAIN), 8) == [1]
    assert _captured(_fixed(CHAIN), 8) == [4]
    assert _captured(_fixed(CHAIN, 8), 8) == [4]
    assert _captured(_fixed(CHAIN, 6), 8) == [4, 1]  # 5 and 6 rows with drafts, 7 and 8 without
    assert _captured(_fixed(CHAIN, 4), 8) == [1]


def test_the_largest_rounds_are_captured_first() -> None:
    captured = graph_sizes(Widths(shape=AUTO_CHAIN, is_auto=True, limit=None), 20)
    assert captured == sorted(captured, reverse=True)
    assert {size for size, _ in captured} == set(batch_sizes(20))


@pytest.mark.parametrize("shape", [AUTO_CHAIN, AUTO_JOINT, AUTO_NGRAM], ids=["head", "joint", "n-gram"])
@pytest.mark.parametrize("limit", [None, 1, 7, 40])
def test_what_may_be_chosen_is_captured(limit: int | None, shape: SpecShape) -> None:
    widths = Widths(shape=shape, is_auto=True, limit=limit)
    captured, sizes = graph_sizes(widths, 200), batch_sizes(200)
    for number in range(1, 201):
        size = min(each for each in sizes if each >= number)
        assert {(size, width) for width in widths.of(number) + widths.wide_of(number)} <= set(captured), number
        assert max(width for each, width in captured if each == size) >= widths.widest_of(number)


def test_a_step_that_a_row_sits_out_has_a_width_of_its_menu_too() -> None:
    widths = Widths(shape=AUTO_CHAIN, is_auto=True, limit=None)
    menus = [widths.of(number) for number in range(1, 300)]
    assert menus[0][0] == 1 and menus[0][-1] == AUTO_STEPS_MAX + 1 == AUTO_CHAIN.tokens
    assert all(set(more) <= set(fewer) for fewer, more in pairwise(menus))
    assert all(menu[:2] == (1, 2) for menu in menus)  # drafting or not is always a choice


def test_above_the_limit_there_is_no_choice() -> None:
    widths = Widths(shape=AUTO_CHAIN, is_auto=True, limit=3)
    assert len(widths.of(3)) > 1 and widths.of(4) == (1,)


@pytest.mark.parametrize(("num_rounds", "longest"), [(1, 7), (8, 7), (9, 5), (64, 5), (65, 3), (1000, 3)])
def test_the_more_rounds_share_a_step_the_shorter_is_the_menu(num_rounds: int, longest: int) -> None:
    assert max(Widths(shape=AUTO_CHAIN, is_auto=True, limit=None).of(num_rounds)) == longest


@pytest.mark.parametrize(
    ("num_rounds", "wide"), [(1, (9, 17)), (8, (9, 17)), (9, (9,)), (32, (9,)), (33, ()), (1000, ())]
)
def test_the_fewer_rounds_share_a_step_the_wider_are_those_that_repeat_a_text(
    num_rounds: int, wide: tuple[int, ...]
) -> None:
    widths = Widths(shape=AUTO_JOINT, is_auto=True, limit=None)
    assert widths.wide_of(num_rounds) == wide
    assert widths.widest_of(num_rounds) == max(wide, default=max(widths.of(num_rounds)))
    assert widths.widest_of(1) == LOOKUP_STEPS_MAX + 1 == AUTO_JOINT.tokens


def test_nothing_is_wider_where_nothing_is_looked_up_the_length_is_fixed_or_drafts_are_over() -> None:
    for widths in (
        Widths(shape=AUTO_CHAIN, is_auto=True, limit=None),
        Widths(shape=AUTO_JOINT, is_auto=False, limit=None),
        Widths(shape=AUTO_JOINT, is_auto=True, limit=1),
    ):
        assert widths.wide_of(2) == ()
        assert widths.widest_of(2) == widths.of(2)[-1]


@pytest.mark.parametrize("limit", [None, 1, 5, 8, 9, 33])
@pytest.mark.parametrize("rounds_max", [1, 7, 8, 9, 31, 32, 33, 64, 65, 100, 300])
def test_a_step_has_room_for_the_widest_rounds_that_any_number_may_have(rounds_max: int, limit: int | None) -> None:
    for shape in (AUTO_CHAIN, AUTO_JOINT):
        widths = Widths(shape=shape, is_auto=True, limit=limit)
        most = max(number * widths.widest_of(number) for number in range(1, rounds_max + 1))
        assert widths.num_nodes_max(rounds_max) == most
        assert step_tokens_max(512, widths, rounds_max) == 512 + most
