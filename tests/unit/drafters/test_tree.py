"""Trees of drafts: the best candidates, parents first, and every prefix a tree of its own."""

import itertools

import numpy as np
import pytest
import torch

from roost.device.cpu import CpuDevice
from roost.drafters.tree import Candidates, RowTrees, Trees, best_trees, chains, with_chain
from roost.layers.rounds import NOTHING
from roost.spec_shape import DraftKv, SpecShape

SHAPES = [(3, 2, 5), (1, 3, 4), (5, 1, 6), (4, 4, 16), (5, 8, 32), (2, 3, 13)]  # S, K, T


def grown(steps: int, topk: int, seed: int, ties: bool) -> Candidates:
    """Candidates as a beam meets them: of each step K children of each of the K best so far."""
    generator = torch.Generator().manual_seed(seed)

    def falls(count: int) -> list[float]:
        values = (
            torch.randint(0, 3, (count,), generator=generator) / 2 if ties else torch.rand(count, generator=generator)
        )
        return (-values).tolist()

    scores, parents = falls(topk), [-1] * topk
    beam = list(range(topk))
    for _ in range(steps - 1):
        first = len(scores)
        for member in beam:
            scores += [scores[member] + fall for fall in falls(topk)]
            parents += [member] * topk
        beam = sorted(range(first, len(scores)), key=lambda each: (-scores[each], each))[:topk]
    return Candidates(
        tokens=torch.arange(100, 100 + len(scores))[None],
        scores=torch.tensor([scores]),
        parents=torch.tensor([parents]),
    )


@pytest.mark.parametrize(("steps", "topk", "num_nodes"), SHAPES)
@pytest.mark.parametrize("ties", [False, True])
def test_the_best_candidates_are_nodes_and_come_after_their_parents(
    steps: int, topk: int, num_nodes: int, ties: bool
) -> None:
    for seed in range(20):
        candidates = grown(steps, topk, seed, ties)
        trees = best_trees(torch.tensor([7]), candidates, num_nodes)
        scores, parents = candidates.scores[0].tolist(), candidates.parents[0].tolist()
        best = sorted(range(len(scores)), key=lambda each: (-scores[each], each))[: num_nodes - 1]
        assert trees.tokens[0].tolist() == [7, *(100 + each for each in best)]
        for node, candidate in enumerate(best, 1):
            parent = 0 if parents[candidate] < 0 else 1 + best.index(parents[candidate])
            assert int(trees.parents[0, node]) == parent < node
        assert_consistent(trees.parents[0].tolist(), trees.depths[0].tolist(), trees.mask[0])


def assert_consistent(parents: list[int], depths: list[int], sees: torch.Tensor) -> None:
    paths = [{0}]
    for node, parent in enumerate(parents[1:], 1):
        paths.append(paths[parent] | {node})
    assert depths == [len(path) - 1 for path in paths]
    assert [set(torch.nonzero(row).flatten().tolist()) for row in sees] == paths


def test_rounds_do_not_mix() -> None:
    made = [grown(4, 3, seed, ties=True) for seed in range(9)]
    together = Candidates(
        **{name: torch.cat([getattr(each, name) for each in made]) for name in ("tokens", "scores", "parents")}
    )
    trees = best_trees(torch.arange(9), together, 11)
    for number, candidates in enumerate(made):
        alone = best_trees(torch.tensor([number]), candidates, 11)
        for name in ("tokens", "parents", "depths", "mask"):
            assert torch.equal(getattr(trees, name)[number], getattr(alone, name)[0])


@pytest.mark.parametrize("width", range(1, 12))
def test_a_narrower_tree_is_a_prefix(width: int) -> None:
    candidates = grown(4, 3, seed=5, ties=False)
    wide, narrow = (best_trees(torch.tensor([1]), candidates, num_nodes) for num_nodes in (12, width))
    cut = wide.cut(torch.tensor([width]))
    assert cut.tokens[0].tolist() == narrow.tokens[0].tolist() + [NOTHING] * (12 - width)
    assert torch.equal(cut.mask[:, :width, :width], narrow.mask)


def test_a_path_holds_the_drafts_down_to_a_node_and_not_the_root() -> None:
    trees = best_trees(torch.tensor([7]), grown(3, 2, seed=1, ties=False), 7)
    for node, path in enumerate(trees.path_tokens[0].tolist()):
        above, expected = node, []
        while above:
            expected.append(int(trees.tokens[0, above]))
            above = int(trees.parents[0, above])
        assert sorted(each for each in path if each != NOTHING) == sorted(expected)


def test_a_chain_is_a_tree_whose_nodes_follow_each_other() -> None:
    trees = chains(torch.tensor([[5, 6, 7], [8, 9, 8]]))
    for parents, depths, sees in itertools.islice(zip(trees.parents, trees.depths, trees.mask, strict=True), 2):
        assert parents.tolist() == [0, 0, 1]
        assert_consistent(parents.tolist(), depths.tolist(), sees)


def test_some_rounds_replaced_leave_the_others() -> None:
    roots = chains(torch.tensor([[1, NOTHING], [2, NOTHING], [3, NOTHING]]))
    both = roots.with_rounds(torch.tensor([2]), chains(torch.tensor([[3, 4]])))
    assert both.tokens.tolist() == [[1, NOTHING], [2, NOTHING], [3, 4]]


def test_scores_that_are_no_numbers_still_make_a_tree() -> None:
    nan = float("nan")
    candidates = Candidates(
        tokens=torch.tensor([[5, 6, 7, 8, 9, 10]]),
        scores=torch.tensor([[-1.0, nan, -2.0, nan, nan, -1.5]]),
        parents=torch.tensor([[-1, -1, 0, 1, 1, 0]]),
    )
    trees = best_trees(torch.tensor([1]), candidates, 6)
    assert trees.tokens.tolist() == [[1, 5, 10, 7, 6, 8]]
    assert (trees.parents < torch.arange(6).clamp(min=1)).all()


@pytest.mark.parametrize("topk", [1, 3])
def test_trees_that_are_kept_by_row_are_found_by_row_with_no_node_past_their_width(topk: int) -> None:
    kept = RowTrees(6, SpecShape(steps=4, topk=topk, tokens=5, draft_kv=DraftKv.PAIR), torch.device("cpu"))
    roots = torch.tensor([50, 51, 52, 53])

    def grow(rows: list[int], width: int, seed: int) -> Trees:
        each = [best_trees(roots[row : row + 1], grown(4, topk, seed + row, ties=False), width) for row in rows]
        trees = Trees(
            **{
                name: torch.cat([getattr(tree, name) for tree in each])
                for name in ("tokens", "parents", "depths", "mask")
            }
        )
        kept.put(torch.tensor(rows), trees)
        return trees

    grow([0, 1, 2, 3], 5, seed=1)
    three, two = grow([2, 0], 3, seed=9), grow([1], 2, seed=20)
    found = kept.of(torch.tensor([0, 1, 2, 3, 5]), torch.tensor([90, 91, 92, 93, 95]), torch.tensor([3, 2, 3, 1, 1]))
    assert found.are_chains == (topk == 1)
    assert found.tokens[:, 0].tolist() == [90, 91, 92, 93, 95]  # the root is the output's last token
    assert found.tokens[0].tolist()[1:] == [*three.tokens[1, 1:].tolist(), NOTHING, NOTHING]
    assert found.tokens[2].tolist()[1:] == [*three.tokens[0, 1:].tolist(), NOTHING, NOTHING]
    assert found.tokens[1].tolist()[1:] == [int(two.tokens[0, 1]), *[NOTHING] * 3]
    assert (
        found.tokens[3:, 1:] == NOTHING
    ).all()  # a root alone, whatever the row had before, and of one that had none
    for mine, right in ((found.mask[0, :3, :3], three.mask[1]), (found.parents[0, :3], three.parents[1])):
        assert mine.tolist() == right.tolist()
    assert found.depths[:, 0].tolist() == [0] * 5 and found.mask[:, 0, 0].all()


def test_a_forced_chain_comes_first_and_the_rest_hangs_on_the_root() -> None:
    drafted = best_trees(
        torch.tensor([7, 8]), Candidates(**{name: torch.cat([each, each]) for name, each in _columns().items()}), 6
    )
    changed = with_chain(drafted, 1, [50, 51])
    assert changed.tokens[1].tolist() == [8, 50, 51, *drafted.tokens[1, 3:].tolist()]
    assert changed.parents[1].tolist() == [0, 0, 1, 0, 0, 0]
    assert changed.depths[1].tolist() == [0, 1, 2, 1, 1, 1]
    assert changed.mask[1, 2].tolist() == [True, True, True, False, False, False]
    assert changed.mask[1, 5].tolist() == [True, False, False, False, False, True]
    for name in ("tokens", "parents", "depths", "mask"):
        assert torch.equal(getattr(changed, name)[0], getattr(drafted, name)[0]), name


def _columns() -> dict[str, torch.Tensor]:
    """Candidates of three steps, by name."""
    candidates = grown(3, 2, seed=1, ties=False)
    return {name: getattr(candidates, name) for name in ("tokens", "scores", "parents")}


class Strict(CpuDevice):
    """Takes what can be copied to pinned memory: no two elements in the same place."""

    def put(self, array: np.ndarray) -> torch.Tensor:
        """A copy of it."""
        assert 0 not in array.strides
        return super().put(array)


@pytest.mark.parametrize("are_chains", [True, False])
def test_trees_of_several_rounds_go_to_the_device_and_back_as_they_are(are_chains: bool) -> None:
    trees = (
        chains(torch.arange(12).view(3, 4)) if are_chains else best_trees(torch.tensor([7]), grown(3, 2, 5, False), 5)
    )
    device = Strict()
    for same in (trees.on(device), trees.fetch(device)):
        for name in ("tokens", "parents", "depths", "mask"):
            assert torch.equal(getattr(same, name), getattr(trees, name))
        assert same.are_chains == are_chains
