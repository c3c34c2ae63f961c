"""A head and lookup together: each round has the drafts of one of them in a chain, of both in a tree."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from roost.drafters.joint import JointDrafter
from roost.drafters.protocol import Pairs
from roost.drafters.tree import Candidates, Trees, best_trees, chains
from roost.layers.rounds import NOTHING
from roost.layers.segments import Segments
from roost.spec_shape import DraftKv, SpecShape
from roost.step import RowSetup
from tests.unit.drafters.test_lookup import COUNT, begun, every_form, found, pairs_of, rounds_at, setup_of, wanted

CHAIN = SpecShape(steps=3, topk=1, tokens=6, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=COUNT)
TREE = SpecShape(steps=3, topk=2, tokens=9, draft_kv=DraftKv.PAIR, reads_history=True, lookup_steps=3)
TEXT = [1, 2, 3, 9, 8, 1, 2, 3]  # what followed: 9, 8, 1, 2, 3
ROWS = {0: TEXT, 1: [4, 5, 6], 3: TEXT}
ROOTS = torch.tensor([3, 6, 3])
_FIRST = 50


class Head:
    """Drafts 50, 51, … after every root, or a tree of such; remembers what it was asked and told."""

    aux_layers = (2,)

    def __init__(self, shape: SpecShape) -> None:
        self._shape = shape
        self.asked: list[tuple[int, Tensor | None]] = []
        self.rounds: list[Segments] = []
        self.begun: list[RowSetup] = []
        self.extended: list[Pairs] = []

    def begin(self, setups: Sequence[RowSetup]) -> None:
        """Remember them."""
        self.begun.extend(setups)

    def propose(self, rounds: Segments, roots: Tensor, width: int, forced: Tensor | None) -> Trees:
        """Numbers from 50 on."""
        self.asked.append((width, forced))
        self.rounds.append(rounds)
        drafts = torch.arange(_FIRST, _FIRST + width - 1).expand(len(roots), -1)
        if self._shape.topk == 1:
            return chains(torch.cat([roots[:, None], drafts], dim=1))
        parents = torch.tensor([-1, -1, 0, 0, 1, 1, 2, 2])[: width - 1].expand(len(roots), -1)
        scores = -torch.arange(width - 1.0).expand(len(roots), -1)
        return best_trees(roots, Candidates(tokens=drafts, scores=scores, parents=parents), width)

    def extend(self, pairs: Pairs) -> None:
        """Remember it."""
        self.extended.append(pairs)


def joint(form: str, shape: SpecShape, *, is_host: bool = True, head_width: int = 99) -> tuple[JointDrafter, Head]:
    """A drafter whose rows 0 and 1 take what followed any match, and row 3 none."""
    head, looks_up = Head(shape), begun(form, ROWS)
    wanted(looks_up, {0: 1, 1: 1, 3: 0}, head_width=head_width)
    return JointDrafter(head, looks_up, shape, is_host=is_host), head


def proposed(drafter: JointDrafter, width: int, forced: Tensor | None = None) -> list[list[int]]:
    """Chains for all rows."""
    trees = drafter.propose(rounds_at(ROWS), ROOTS, width, forced)
    assert trees.are_chains
    return trees.tokens.tolist()


@every_form
def test_a_round_has_what_was_looked_up_or_what_the_head_drafts(form: str) -> None:
    drafter, head = joint(form, CHAIN)
    assert proposed(drafter, 4) == [[3, 9, 8, 1], [6, 50, 51, 52], [3, 50, 51, 52]]
    assert proposed(drafter, 2) == [[3, 9], [6, 50], [3, 50]]
    assert [width for width, _ in head.asked] == [4, 2]


@every_form
def test_what_is_looked_up_goes_on_where_the_head_has_no_more(form: str) -> None:
    drafter, head = joint(form, CHAIN)
    looked_up, *drafted = proposed(drafter, 6)
    assert looked_up == [3, 9, 8, 1, 2, 3]
    assert [each[:4] for each in drafted] == [[6, 50, 51, 52], [3, 50, 51, 52]]
    assert all(token >= 0 for each in drafted for token in each), "the target embeds every node"
    assert [width for width, _ in head.asked] == [4]


@every_form
@pytest.mark.parametrize("head_width", [1, 2, 3])
def test_the_head_drafts_for_no_more_nodes_than_the_plan_says(form: str, head_width: int) -> None:
    drafter, head = joint(form, CHAIN, head_width=head_width)
    looked_up, *drafted = proposed(drafter, 6)
    assert looked_up == [3, 9, 8, 1, 2, 3]
    own = list(range(_FIRST, _FIRST + head_width - 1))
    assert [each[1:head_width] for each in drafted] == [own, own]
    assert [width for width, _ in head.asked] == ([head_width] if head_width > 1 else [])


@every_form
@pytest.mark.parametrize("is_host", [True, False])
def test_on_a_host_nobody_asks_a_head_whose_drafts_no_round_takes(form: str, is_host: bool) -> None:
    drafter, head = joint(form, CHAIN, is_host=is_host)
    trees = drafter.propose(rounds_at({0: TEXT}), ROOTS[:1], 4, None)
    assert trees.tokens.tolist() == [[3, 9, 8, 1]]
    assert len(head.asked) == (not is_host)


@every_form
@pytest.mark.parametrize("is_host", [True, False])
def test_a_head_goes_on_from_what_is_forced(form: str, is_host: bool) -> None:
    drafter, head = joint(form, CHAIN, is_host=is_host)
    forced = torch.full((3, 5), NOTHING)
    forced[2, 0] = 7
    proposed(drafter, 6, forced)
    ((width, own),) = head.asked
    assert own is not None
    assert own.tolist() == forced[is_host:, : width - 1].tolist(), "on a host the first round is not its"


@every_form
def test_on_a_host_a_head_is_asked_for_those_rounds_alone_that_take_its_drafts(form: str) -> None:
    drafter, head = joint(form, CHAIN)
    assert proposed(drafter, 4) == [[3, 9, 8, 1], [6, 50, 51, 52], [3, 50, 51, 52]]
    (rounds,) = head.rounds
    assert rounds.rows.tolist() == [1, 3] and rounds.start_positions.tolist() == [len(ROWS[1]) - 1, len(ROWS[3]) - 1]
    assert rounds.host is not None and rounds.host.rows.tolist() == [1, 3]
    assert rounds.offsets.tolist() == rounds.tile_segments.tolist() == [0, 1] and rounds.query_lens.tolist() == [1, 1]


@every_form
def test_in_a_tree_what_was_looked_up_is_one_more_path_beside_the_heads_best_nodes(form: str) -> None:
    drafter, head = joint(form, TREE)
    trees, plain = drafter.propose(rounds_at(ROWS), ROOTS, 9, None), head.propose(rounds_at(ROWS), ROOTS, 9, None)
    assert trees.tokens[1:].tolist() == plain.tokens[1:].tolist()
    assert trees.parents[1:].tolist() == plain.parents[1:].tolist()
    assert trees.tokens[0].tolist() == [*plain.tokens[0, :6].tolist(), 9, 8, 1]
    assert trees.parents[0].tolist() == [*plain.parents[0, :6].tolist(), 0, 6, 7]
    narrow = drafter.propose(rounds_at(ROWS), ROOTS, 4, None)
    assert narrow.tokens[0].tolist() == [3, 50, 9, 8]  # half of the nodes are the head's


@every_form
def test_both_take_over_rows_and_what_steps_write(form: str) -> None:
    looks_up, head = begun(form, {}), Head(CHAIN)
    drafter = JointDrafter(head, looks_up, CHAIN, is_host=True)
    assert drafter.aux_layers == head.aux_layers
    setup, pairs = setup_of(2, [1, 2, 3, 9]), pairs_of(2, 3, [1, 2])
    drafter.begin([setup])
    drafter.extend(pairs)
    assert (head.begun, head.extended) == ([setup], [pairs])
    assert found(looks_up, {2: [1, 2, 3, 9, 1, 2]}) == [(2, True, [3, 9, 1, 2, 3])]
