"""A round keeps the path that agrees with the target, and one token more."""

import random
from dataclasses import replace

import torch

from roost.drafters.accept import accept
from roost.drafters.tree import Trees, chains
from roost.layers.rounds import NOTHING


def drawn_tree(rng: random.Random, width: int) -> Trees:
    """A random tree; siblings differ, cousins may not."""
    parents, tokens = [0], [rng.randrange(4)]
    while len(tokens) < width:
        parent, token = rng.randrange(len(tokens)), rng.randrange(4)
        siblings = [tokens[each] for each in range(1, len(tokens)) if parents[each] == parent]
        if token not in siblings:
            parents.append(parent)
            tokens.append(token)
    sees = torch.eye(width, dtype=torch.bool)
    for node in range(1, width):
        sees[node] |= sees[parents[node]]
    return Trees(
        tokens=torch.tensor([tokens]), parents=torch.tensor([parents]), depths=sees.sum(1)[None] - 1, mask=sees[None]
    )


def walked(trees: Trees, targets: list[int], accept_max: int) -> tuple[list[int], list[int]]:
    """The same, plainly: tokens and the nodes they were drawn at."""
    parents, tokens, node, path = trees.parents[0].tolist(), trees.tokens[0].tolist(), 0, [0]
    while len(path) < accept_max:
        wanted = [n for n in range(1, len(tokens)) if parents[n] == node and tokens[n] == targets[node]]
        if not wanted:
            break
        node = wanted[0]
        path.append(node)
    return [targets[each] for each in path], path


def test_the_path_goes_on_while_the_targets_token_is_a_child() -> None:
    rng = random.Random(1)
    lens = set()
    for _ in range(300):
        trees = drawn_tree(rng, rng.randint(1, 12))
        accept_max = int(trees.depths.max()) + 1
        targets = [rng.randrange(4) for _ in range(trees.width)]
        accepted = accept(trees, torch.tensor([targets]), accept_max)
        tokens, path = walked(trees, targets, accept_max)
        count = int(accepted.lens[0])
        assert accepted.tokens[0].tolist() == tokens + [NOTHING] * (accept_max - count)
        assert accepted.nodes[0].tolist() == path + path[-1:] * (accept_max - count)
        assert path == sorted(path)
        lens.add(count)
    assert lens >= {1, 2, 3, 4}


def test_rounds_of_different_widths_are_accepted_side_by_side() -> None:
    trees = chains(torch.tensor([[1, 2, 3, 4]] * 4)).cut(torch.tensor([1, 2, 3, 4]))
    accepted = accept(trees, torch.tensor([[2, 3, 4, 9]] * 4), 4)
    assert accepted.lens.tolist() == [1, 2, 3, 4]
    assert accepted.tokens.tolist() == [[2, -1, -1, -1], [2, 3, -1, -1], [2, 3, 4, -1], [2, 3, 4, 9]]


def test_the_root_is_nobodys_child() -> None:
    accepted = accept(chains(torch.tensor([[5, 6]])), torch.tensor([[5, 6]]), 2)
    assert accepted.lens.tolist() == [1]


def test_chains_are_accepted_as_trees_without_branches_are() -> None:
    generator = torch.Generator().manual_seed(1)
    for width in range(1, 8):
        tokens, targets = torch.randint(2, (2, 40, width), generator=generator)
        widths = torch.randint(1, width + 1, (40,), generator=generator)
        drafted = chains(tokens).cut(widths)
        targets = targets.masked_fill(torch.arange(width) >= widths[:, None], NOTHING)
        at_once, walked = (accept(replace(drafted, are_chains=known), targets, width) for known in (True, False))
        assert at_once.lens.tolist() == walked.lens.tolist()
        assert at_once.tokens.tolist() == walked.tokens.tolist()
        assert at_once.nodes.tolist() == walked.nodes.tolist()


def test_trees_among_chains_are_no_chains() -> None:
    two, one = chains(torch.tensor([[1, 2], [1, 2]])), chains(torch.tensor([[1, 3]]))
    assert two.with_rounds(torch.tensor([1]), one).are_chains and two.first(1).are_chains
    assert not two.with_rounds(torch.tensor([1]), replace(one, are_chains=False)).are_chains
