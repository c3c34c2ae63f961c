"""A looked-up path in a tree: all of it is there, on no more nodes than are new, and the tree is one as before."""

import random
from collections.abc import Sequence

import pytest
import torch

from roost.drafters.tree import Trees, best_trees, with_lookup
from tests.unit.drafters.test_tree import assert_consistent, grown

COLUMNS = ("tokens", "parents", "depths", "mask")
SHAPES = [(3, 2, 5), (1, 4, 5), (4, 4, 16), (5, 3, 9), (2, 3, 12)]  # S, K, T


def trees_of(shape: tuple[int, int, int], seed: int, number: int, vocab: int) -> Trees:
    """Trees of several rounds whose tokens are few, so that a path may be there already; no two siblings are alike."""
    steps, topk, width = shape
    each = [
        best_trees(torch.tensor([7]), grown(steps, topk, seed + place, ties=False), width) for place in range(number)
    ]
    columns = {name: torch.cat([getattr(tree, name) for tree in each]) for name in COLUMNS}
    chances = random.Random(seed)
    for tokens, parents in zip(columns["tokens"], columns["parents"].tolist(), strict=True):
        taken = {(-1, 7)}
        for node in range(1, width):
            free = [token for token in range(vocab) if (parents[node], token) not in taken]
            tokens[node] = chances.choice(free)
            taken.add((parents[node], int(tokens[node])))
    return Trees(**columns)


def paths(tokens: Sequence[int], parents: Sequence[int]) -> list[tuple[int, ...]]:
    """The drafts down to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in list(zip(tokens, parents, strict=True))[1:]:
        found.append((*found[parent], token))
    return found


def plainly(tokens: Sequence[int], parents: Sequence[int], drafts: Sequence[int]) -> list[tuple[int, ...]]:
    """The paths of the tree with one more: the most of its first nodes that leave room for what they lack."""
    have = paths(tokens, parents)
    for kept in range(len(have) - 1, 0, -1):
        missing = [path for path in (tuple(drafts[: end + 1]) for end in range(len(drafts))) if path not in have[:kept]]
        if kept + len(missing) <= len(have):
            return have[: len(have) - len(missing)] + missing
    raise AssertionError("there is no room")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_path_of_the_lookup_is_there_and_only_the_last_nodes_made_room(shape: tuple[int, int, int]) -> None:
    chances, width = random.Random(5), shape[2]
    shared = set()
    for seed in range(60):
        count = chances.randint(1, max(1, width // 2))
        trees = trees_of(shape, seed, number=4, vocab=6)
        drafts = torch.tensor([[chances.randrange(6) for _ in range(count)] for _ in range(4)])
        if seed % 2:  # one that is there already, as far as its tree is deep
            deepest = int(trees.depths[0].argmax())
            known = paths(trees.tokens[0].tolist(), trees.parents[0].tolist())[deepest][:count]
            drafts[0, : len(known)] = torch.tensor(known)
        is_used = torch.tensor([True, True, bool(seed % 3), False])
        joined = with_lookup(trees, drafts, is_used)
        for number in range(4):
            before = trees.tokens[number].tolist(), trees.parents[number].tolist()
            tokens, parents = joined.tokens[number].tolist(), joined.parents[number].tolist()
            assert len(tokens) == width and tokens[0] == 7 and parents[0] == 0
            assert_consistent(parents, joined.depths[number].tolist(), joined.mask[number])
            if not is_used[number]:
                assert (tokens, parents) == before
                continue
            own = paths(tokens, parents)
            assert own == plainly(*before, drafts[number].tolist())
            assert len(set(own)) == width, "no path is there twice"
            assert all(parent < node for node, parent in enumerate(parents) if node)
            shared.add(width - count - sum(path in own for path in paths(*before)))
    assert len(shared) > 1, "some were there in part, others not at all"


def test_a_path_that_is_all_there_changes_nothing() -> None:
    trees = trees_of((4, 2, 10), seed=3, number=1, vocab=9)
    deepest = int(trees.depths[0, :6].argmax())
    path = paths(trees.tokens[0].tolist(), trees.parents[0].tolist())[deepest]
    joined = with_lookup(trees, torch.tensor([path]), torch.tensor([True]))
    for name in COLUMNS:
        assert torch.equal(getattr(joined, name), getattr(trees, name)), name
