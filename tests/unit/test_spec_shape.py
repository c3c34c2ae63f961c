"""Shape of a round: the reserve table and the branch examples of the design, number by number."""

import pytest

from roost.errors import ConfigError
from roost.spec_shape import PLAIN, DraftKv, SpecShape

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


def test_a_drafter_without_kv_needs_no_branch_pages() -> None:
    shape = SpecShape(steps=2, topk=4, tokens=8)
    assert [shape.alloc_len_per_decode(page_size) for page_size in (1, 16, 256)] == [8, 8, 8]


def test_the_reserve_holds_every_node_verified() -> None:
    bushy = SpecShape(steps=2, topk=4, tokens=20, draft_kv=DraftKv.PAIR)
    assert [bushy.alloc_len_per_decode(page_size) for page_size in (1, 2, 4)] == [20, 20, 32]


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
        owners = {(position // page_size, i // shape.steps) for i, position in enumerate(used)}
        assert len(owners) == len({page for page, _ in owners})  # attention reads whole pages
        assert max(used) < branches.end <= -(-(length + reserve) // page_size) * page_size


def test_the_prefixs_partial_page_is_copied_to_every_branch_but_the_first() -> None:
    assert TREE.branches(10, 4).tail_copies() == [(8, 16), (9, 17), (8, 24), (9, 25), (8, 32), (9, 33)]
    assert TREE.branches(12, 4).tail_copies() == []
    assert TREE.branches(7, 1).tail_copies() == []


def test_a_chain_goes_on_where_its_prefix_ends() -> None:
    branches = CHAIN.branches(10, 4)
    assert [branches.position(0, step) for step in range(CHAIN.steps)] == [10, 11, 12]
    assert branches.tail_copies() == []


def test_a_round_adds_at_most_its_depth_and_the_bonus() -> None:
    assert [shape.accept_max for shape in (PLAIN, CHAIN, TREE)] == [1, 4, 6]
    shallow = SpecShape(steps=5, topk=4, tokens=3, draft_kv=DraftKv.PAIR)
    assert shallow.accept_max == 3  # two drafts are verified, however deep the tree was drafted
    assert [shape.speculates for shape in (PLAIN, CHAIN, TREE)] == [False, True, True]


def test_a_narrow_round_adds_at_most_what_it_verifies() -> None:
    assert [CHAIN.accept_max_of(width) for width in (1, 2, 4)] == [1, 2, 4]
    assert [TREE.accept_max_of(width) for width in (1, 3, 6, 8)] == [1, 3, 6, 6]
    assert PLAIN.accept_max_of(1) == SpecShape(draft_kv=DraftKv.PAIR).accept_max_of(1) == 1


def test_only_a_pair_drafters_slot_depends_on_the_next_token() -> None:
    assert [kind for kind in DraftKv if SpecShape(steps=1, tokens=2, draft_kv=kind).pair] == [DraftKv.PAIR]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (SpecShape(steps=3, topk=1, tokens=5), r"--spec-tokens must be --spec-steps \+ 1 = 4 .*, got 5"),
        (SpecShape(steps=3, topk=1, tokens=3), r"--spec-tokens must be --spec-steps \+ 1 = 4 .*, got 3"),
        (SpecShape(steps=2, topk=2, tokens=8, draft_kv=DraftKv.PAIR), r"--spec-tokens must be in \[2, 7\].*, got 8"),
        (SpecShape(steps=1, topk=4, tokens=6, draft_kv=DraftKv.PAIR), r"--spec-tokens must be in \[2, 5\].*, got 6"),
        (SpecShape(steps=2, topk=2, tokens=1, draft_kv=DraftKv.PAIR), r"--spec-tokens must be in \[2, 7\].*, got 1"),
        (SpecShape(steps=-1), "--spec-steps must be at least 0, got -1"),
        (SpecShape(steps=2, topk=0, tokens=3), "--spec-topk must be at least 1, got 0"),
        (SpecShape(steps=0, topk=2), "--spec-steps 0 needs --spec-topk 1 and --spec-tokens 1, got 2 and 1"),
        (SpecShape(steps=0, tokens=2), "--spec-steps 0 needs --spec-topk 1 and --spec-tokens 1, got 1 and 2"),
    ],
)
def test_an_impossible_shape_is_refused_with_the_flag_and_its_range(shape: SpecShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        shape.check()


@pytest.mark.parametrize(
    "shape",
    [
        PLAIN,
        CHAIN,
        TREE,
        WIDE,
        SpecShape(draft_kv=DraftKv.PAIR),
        SpecShape(steps=3, topk=1, tokens=4),
        SpecShape(steps=2, topk=2, tokens=4),  # whether its drafter may propose trees, the drafter declares
        SpecShape(steps=2, topk=2, tokens=7, draft_kv=DraftKv.PAIR),  # every candidate: 2 + 1 * 4, and the root
        SpecShape(steps=2, topk=2, tokens=2, draft_kv=DraftKv.PAIR),
    ],
    ids=str,
)
def test_a_possible_shape_is_taken(shape: SpecShape) -> None:
    shape.check()
