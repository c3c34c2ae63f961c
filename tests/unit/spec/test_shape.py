"""Shape of a round: the reserve table and the branch examples of the design, number by number."""

import pytest

from roost.errors import ConfigError
from roost.spec.shape import PLAIN, DraftKv, SpecShape

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=5, topk=4, tokens=8, draft_kv=DraftKv.PAIR)
WIDE = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)


@pytest.mark.parametrize(
    ("page_size", "chain", "tree", "wide"),
    [(1, 4, 20, 40), (4, 4, 32, 64), (64, 4, 512, 1024), (256, 4, 2048, 4096)],
)
def test_the_reserve_of_a_round_is_the_tables(page_size: int, chain: int, tree: int, wide: int) -> None:
    assert [shape.alloc_len_per_decode(page_size) for shape in (CHAIN, TREE, WIDE)] == [chain, tree, wide]


def test_a_plain_round_needs_one_position() -> None:
    assert [PLAIN.alloc_len_per_decode(page_size) for page_size in (1, 16, 256)] == [1, 1, 1]


@pytest.mark.parametrize(
    ("length", "page_size", "live", "end"),
    [
        (10, 4, [(10, 14), (18, 22), (26, 30), (34, 38)], 40),
        (103, 64, [(103, 107), (167, 171), (231, 235), (295, 299)], 320),
        (126, 64, [(126, 130), (254, 258), (382, 386), (510, 514)], 576),
        (254, 256, [(254, 258), (766, 770), (1278, 1282), (1790, 1794)], 2048),
    ],
)
def test_branches_lie_where_the_examples_say(
    length: int, page_size: int, live: list[tuple[int, int]], end: int
) -> None:
    branches = TREE.branches(length, page_size)
    found = [(branches.position(branch, 0), branches.position(branch, TREE.steps - 1)) for branch in range(TREE.topk)]
    assert (found, branches.end) == (live, end)


@pytest.mark.parametrize("page_size", [1, 4, 16, 64, 256, 512])
@pytest.mark.parametrize("shape", [TREE, WIDE], ids=["tree", "wide"])
def test_every_branch_fits_the_reserve_and_no_two_meet(page_size: int, shape: SpecShape) -> None:
    reserve = shape.alloc_len_per_decode(page_size)
    for length in range(1, 2 * page_size + 2):
        branches = shape.branches(length, page_size)
        used = [branches.position(branch, step) for branch in range(shape.topk) for step in range(shape.steps)]
        assert len(set(used)) == len(used)
        assert max(used) < branches.end <= -(-(length + reserve) // page_size) * page_size


def test_the_prefixs_partial_page_is_copied_to_every_branch_but_the_first() -> None:
    assert TREE.branches(10, 4).tail_copies() == [(8, 16), (9, 17), (8, 24), (9, 25), (8, 32), (9, 33)]
    assert TREE.branches(12, 4).tail_copies() == []


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (SpecShape(steps=3, topk=1, tokens=5), r"--spec-tokens must be --spec-steps \+ 1 = 4"),
        (SpecShape(steps=2, topk=2, tokens=8, draft_kv=DraftKv.PAIR), r"--spec-tokens must be in \[2, 7\]"),
        (SpecShape(steps=2, topk=2, tokens=1, draft_kv=DraftKv.PAIR), r"--spec-tokens must be in \[2, 7\]"),
        (SpecShape(steps=-1), "--spec-steps must be at least 0"),
        (SpecShape(steps=2, topk=0, tokens=3), "--spec-topk must be at least 1"),
        (SpecShape(steps=0, topk=2), "--spec-steps 0 needs --spec-topk 1"),
        (SpecShape(steps=2, topk=2, tokens=4), "--spec-topk must be 1 for a drafter without KV"),
    ],
)
def test_an_impossible_shape_is_refused_with_the_flag_and_its_range(shape: SpecShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape.check()


def test_the_largest_tree_is_allowed() -> None:
    SpecShape(steps=2, topk=2, tokens=7, draft_kv=DraftKv.PAIR).check()
