"""Shape of a round: the reserve table and the branch examples of the design, number by number."""

import pytest

from roost.errors import ConfigError
from roost.spec_shape import PLAIN, DraftKv, SpecShape

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=5, topk=4, tokens=8, draft_kv=DraftKv.PAIR)
WIDE = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)
JOINT = SpecShape(steps=3, topk=1, tokens=7, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=6)
JOINT_TREE = SpecShape(steps=5, topk=4, tokens=8, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=5)


@pytest.mark.parametrize(
    ("shape", "branch", "branches", "reserve"),
    [
        (PLAIN, 0, 0, 1),
        (CHAIN, 2, 2, 4),
        (TREE, 4, 16, 16),
        (WIDE, 4, 32, 32),
        (SpecShape(steps=4, topk=4, tokens=16, draft_kv=DraftKv.PAIR), 3, 12, 16),
        (SpecShape(steps=2, topk=4, tokens=20, draft_kv=DraftKv.PAIR), 1, 4, 20),
        (SpecShape(steps=1, topk=4, tokens=5, draft_kv=DraftKv.PAIR), 0, 0, 5),  # the first drafts are there already
        (SpecShape(steps=5, topk=4, tokens=3, draft_kv=DraftKv.PAIR), 1, 4, 4),  # no deeper than the nodes verified
        (SpecShape(steps=2, topk=4, tokens=8), 0, 0, 8),  # a drafter without KV
        (JOINT, 2, 2, 7),  # what is looked up needs no passes
        (JOINT_TREE, 4, 16, 16),
    ],
    ids=str,
)
def test_the_reserve_of_a_round_is_the_tables(shape: SpecShape, branch: int, branches: int, reserve: int) -> None:
    assert (shape.branch_len, shape.scratch_len, shape.alloc_len_per_decode) == (branch, branches, reserve)


@pytest.mark.parametrize(
    ("shape", "length", "firsts"),
    [(TREE, 10, [10, 14, 18, 22]), (TREE, 126, [126, 130, 134, 138]), (WIDE, 254, [254 + 4 * k for k in range(8)])],
)
def test_branches_lie_one_after_the_other_behind_the_text(shape: SpecShape, length: int, firsts: list[int]) -> None:
    assert [shape.branch_position(length, branch, 0) for branch in range(shape.topk)] == firsts
    places = [
        shape.branch_position(length, branch, step) for branch in range(shape.topk) for step in range(shape.branch_len)
    ]
    assert places == list(range(length, length + shape.scratch_len))  # no hole, and no two meet


def test_a_chain_goes_on_where_its_prefix_ends() -> None:
    assert [CHAIN.branch_position(10, 0, step) for step in range(CHAIN.branch_len)] == [10, 11]


def test_a_round_adds_at_most_its_depth_and_the_bonus() -> None:
    assert [shape.accept_max for shape in (PLAIN, CHAIN, TREE)] == [1, 4, 6]
    shallow = SpecShape(steps=5, topk=4, tokens=3, draft_kv=DraftKv.PAIR)
    assert shallow.accept_max == 3  # two drafts are verified, however deep the tree was drafted
    assert [shape.speculates for shape in (PLAIN, CHAIN, TREE)] == [False, True, True]


def test_a_narrow_round_adds_at_most_what_it_verifies() -> None:
    assert [CHAIN.accept_max_of(width) for width in (1, 2, 4)] == [1, 2, 4]
    assert [TREE.accept_max_of(width) for width in (1, 3, 6, 8)] == [1, 3, 6, 6]
    assert [JOINT.accept_max_of(width) for width in (1, 4, 5, 7)] == [1, 4, 5, 7]  # longer than its head drafts
    assert PLAIN.accept_max_of(1) == SpecShape(draft_kv=DraftKv.PAIR).accept_max_of(1) == 1


def test_a_head_drafts_its_steps_and_lookup_the_rest_of_a_chain_or_half_of_a_tree() -> None:
    widths = (1, 2, 4, 6, 7)
    assert [JOINT.head_steps_of(width) for width in widths] == [0, 1, 3, 3, 3]
    assert [JOINT.lookup_nodes_of(width) for width in widths] == [0, 1, 3, 5, 6]
    assert [JOINT_TREE.lookup_nodes_of(width) for width in (2, 3, 8)] == [1, 1, 4]
    assert [CHAIN.lookup_nodes_of(width) for width in (1, 4)] == [0, 0]
    assert [shape.depth_max for shape in (PLAIN, CHAIN, JOINT, JOINT_TREE)] == [0, 3, 6, 5]
    narrower = SpecShape(steps=6, topk=1, tokens=7, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=2)
    assert (narrower.depth_max, narrower.lookup_nodes_of(7)) == (6, 2)


def test_only_a_pair_drafters_slot_depends_on_the_next_token() -> None:
    assert [kind for kind in DraftKv if SpecShape(steps=1, tokens=2, draft_kv=kind).pair] == [DraftKv.PAIR]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (SpecShape(steps=3, topk=1, tokens=5), r"--spec-tokens must be --spec-steps \+ 1 = 4 .*, got 5"),
        (SpecShape(steps=3, topk=1, tokens=3), r"--spec-tokens must be --spec-steps \+ 1 = 4 .*, got 3"),
        (
            SpecShape(steps=3, topk=1, tokens=4, lookup_steps=6),
            r"--spec-tokens must be --spec-steps \+ 1 = 7 .*, got 4",
        ),
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
        JOINT,
        JOINT_TREE,
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
