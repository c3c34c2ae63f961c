"""Accept: which path of its tree a round keeps.

The target's token after each node is drawn by the one sampling function; the path goes on while that token is a child.
Greedy or sampled, this is exact and needs no draft probabilities. Fixed shapes, no host sync. Called by the forward
passes.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from roost.drafters.tree import Trees
from roost.layers.rounds import NOTHING, chain_lens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Accepted:
    """What R rounds add to their outputs; the last token is the bonus, which is in no tree."""

    lens: Tensor  # [R] at least 1
    tokens: Tensor  # [R, accept_max], padded with NOTHING
    nodes: Tensor  # [R, accept_max] the node each token was drawn at, in rising order; the last again in the padding

    def first(self, number: int) -> "Accepted":
        """Those of the first rounds."""
        return Accepted(lens=self.lens[:number], tokens=self.tokens[:number], nodes=self.nodes[:number])


def accept(trees: Trees, targets: Tensor, accept_max: int) -> Accepted:
    """Walk down the trees along `targets` [R, T], the target's token after each node."""
    if trees.are_chains:
        return _accept_chains(trees.tokens, targets, accept_max)
    num_rounds, width = trees.tokens.shape
    number = torch.arange(width, device=targets.device)
    node = torch.zeros(num_rounds, dtype=torch.int64, device=targets.device)
    tokens, nodes, lens = [targets[:, 0]], [node], torch.ones_like(node)
    for _ in range(accept_max - 1):
        wanted = targets.gather(1, node[:, None])
        is_child = (trees.parents == node[:, None]) & (trees.tokens == wanted) & (number > 0)
        goes_on = is_child.any(dim=1)  # never again once it was not: the node stays
        node = torch.where(goes_on, is_child.to(torch.int8).argmax(dim=1), node)
        tokens.append(targets.gather(1, node[:, None]).squeeze(1).masked_fill(~goes_on, NOTHING))
        nodes.append(node)
        lens = lens + goes_on
    return Accepted(lens=lens, tokens=torch.stack(tokens, dim=1), nodes=torch.stack(nodes, dim=1))


def _accept_chains(tokens: Tensor, targets: Tensor, accept_max: int) -> Accepted:
    """The same for chains, at once: a draft is kept if it and all before it are what the target says."""
    lens = chain_lens(tokens[:, :accept_max], targets[:, :accept_max])
    number = torch.arange(accept_max, device=targets.device)
    beyond = number >= lens[:, None]
    return Accepted(
        lens=lens,
        tokens=targets[:, :accept_max].masked_fill(beyond, NOTHING),
        nodes=torch.minimum(number, lens[:, None] - 1),
    )
