"""Trees of drafted tokens, several rounds at once: node 0 is the root, and every parent comes before its children.

Nodes are in order of their path's probability, so that the first w nodes of a tree are a tree as well: a narrower round
is a prefix. Fixed shapes, no host sync. Made by drafters, read by the forward passes, the runner and `accept`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from roost.device.device import Device
from roost.layers.rounds import NOTHING
from roost.spec_shape import SpecShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trees:
    """The trees of R rounds, of T nodes each."""

    tokens: Tensor  # [R, T] the target's ids; NOTHING: no such node
    parents: Tensor  # [R, T] node numbers; the root is its own
    depths: Tensor  # [R, T]
    mask: Tensor  # [R, T, T] bool: ancestors, and the node itself
    are_chains: bool = False  # known to have no branches

    @property
    def width(self) -> int:
        """T."""
        return self.tokens.shape[1]

    @property
    def path_tokens(self) -> Tensor:
        """For each node the drafted tokens on its path, itself included: [R, T, T - 1], padded with NOTHING."""
        drafted = self.tokens[:, None, 1:].expand(-1, self.width, -1)
        return drafted.masked_fill(~self.mask[:, :, 1:], NOTHING)

    def fetch(self, device: Device) -> "Trees":
        """The same on the host, once the device has made them."""
        arrays = device.fetch([getattr(self, name).contiguous() for name in self._own_columns])()
        return self._like(map(torch.from_numpy, arrays))

    def on(self, device: Device) -> "Trees":
        """The same on a device."""
        return self._like(device.put(getattr(self, name).numpy()) for name in self._own_columns)

    @property
    def _own_columns(self) -> tuple[str, ...]:
        """What is not the same for all trees of its kind: all chains share one memory for the rest."""
        return ("tokens",) if self.are_chains else ("tokens", "parents", "depths", "mask")

    def _like(self, columns: Iterable[Tensor]) -> "Trees":
        """Trees of the same kind with other columns of their own."""
        tokens, *others = columns
        if self.are_chains:
            return chains(tokens)
        parents, depths, mask = others
        return Trees(tokens=tokens, parents=parents, depths=depths, mask=mask)

    def first(self, number: int) -> "Trees":
        """Those of the first rounds."""
        return Trees(
            tokens=self.tokens[:number],
            parents=self.parents[:number],
            depths=self.depths[:number],
            mask=self.mask[:number],
            are_chains=self.are_chains,
        )

    def cut(self, widths: Tensor) -> "Trees":
        """The trees without the nodes past each round's width [R]."""
        beyond = torch.arange(self.width, device=widths.device) >= widths[:, None]
        return replace(self, tokens=self.tokens.masked_fill(beyond, NOTHING))

    def with_rounds(self, index: Tensor, others: "Trees") -> "Trees":
        """These trees, with those of some rounds [num_others] replaced."""
        return Trees(
            tokens=self.tokens.index_copy(0, index, others.tokens),
            parents=self.parents.index_copy(0, index, others.parents),
            depths=self.depths.index_copy(0, index, others.depths),
            mask=self.mask.index_copy(0, index, others.mask),
            are_chains=self.are_chains and others.are_chains,
        )


def chains(tokens: Tensor) -> Trees:
    """Trees without branches of tokens [R, T], root first."""
    parents, depths, mask = _of_chains(*tokens.shape, tokens.device)
    return Trees(tokens=tokens, parents=parents, depths=depths, mask=mask, are_chains=True)


@cache
def _of_chains(num_rounds: int, width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and masks of chains: views of those of one."""
    parents, depths, mask = _of_a_chain(width, device)
    return parents.expand(num_rounds, -1), depths.expand(num_rounds, -1), mask.expand(num_rounds, -1, -1)


@cache
def _of_a_chain(width: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Parents, depths and mask of a chain, which all of this width share."""
    depths = torch.arange(width, device=device)
    return (depths - 1).clamp(min=0), depths, depths <= depths[:, None]


class RowTrees:
    """The trees of every row of an engine: between the CUDA graph that drafts them and the one that verifies them."""

    def __init__(self, num_rows: int, shape: SpecShape, device: torch.device) -> None:
        trees = chains(torch.full((num_rows, shape.tokens), NOTHING, device=device))
        columns = ("parents", "depths", "mask") if shape.topk > 1 else ()  # those of chains never change
        self._trees = replace(
            trees, **{name: getattr(trees, name).clone() for name in columns}, are_chains=shape.topk == 1
        )
        self._columns = ("tokens", *columns)

    def put(self, rows: Tensor, trees: Trees) -> None:
        """Keep the trees of some rows; they may be narrower than the widest."""
        for name in self._columns:
            kept, new = getattr(self._trees, name), getattr(trees, name)
            kept[:, *[slice(trees.width)] * (new.dim() - 1)].index_copy_(0, rows, new)

    def fetch(self, rows: Tensor, width: int, device: Device) -> Callable[[], Trees]:
        """Start bringing the trees of some rows to the host, `width` nodes of each."""
        columns = [getattr(self._trees, name)[rows] for name in self._columns]
        fetched = device.fetch([each[:, *[slice(width)] * (each.dim() - 1)] for each in columns])

        def wait() -> Trees:
            found = dict(zip(self._columns, map(torch.from_numpy, fetched()), strict=True))
            return chains(found["tokens"]) if self._trees.are_chains else Trees(**found)

        return wait

    def of(self, rows: Tensor, roots: Tensor, widths: Tensor) -> Trees:
        """The trees [R] of some rows, without the nodes past their widths: of width 1, a root alone."""
        tokens = self._trees.tokens[rows]
        tokens[:, 0] = roots
        if self._trees.are_chains:
            return chains(tokens).cut(widths)
        trees = self._trees
        return Trees(tokens=tokens, parents=trees.parents[rows], depths=trees.depths[rows], mask=trees.mask[rows]).cut(
            widths
        )


def with_chain(trees: Trees, number: int, drafts: Sequence[int]) -> Trees:
    """The trees with that of one round replaced: a chain of drafts, then what was drafted, as other first guesses."""
    tokens, parents = trees.tokens.clone(), trees.parents.clone()
    end = 1 + len(drafts)
    tokens[number, 1:end] = tokens.new_tensor(drafts)
    parents[number, 1:end] = torch.arange(len(drafts), device=parents.device)
    parents[number, end:] = 0
    mask = trees.mask.clone()
    mask[number] = _ancestors(parents[number : number + 1])[0]
    return Trees(tokens=tokens, parents=parents, depths=mask.sum(dim=2) - 1, mask=mask)


def with_lookup(trees: Trees, drafts: Tensor, is_used: Tensor) -> Trees:
    """The trees with looked-up drafts [R, n] as one more path, where `is_used` [R]; their last nodes make room for it.

    As far as a tree has the path already it is shared, so that as few nodes as possible go.
    """
    num_rounds, width = len(trees.tokens), trees.width
    number, count = torch.arange(width, device=drafts.device), drafts.shape[1]
    node = torch.zeros(num_rounds, dtype=torch.int64, device=drafts.device)  # where the path has come to
    shared, goes_on = torch.zeros_like(node), is_used  # how many of its drafts the tree has
    for place in range(count):
        stays = (number > 0) & (number < width - count + place + 1)
        is_child = stays & (trees.parents == node[:, None]) & (trees.tokens == drafts[:, place : place + 1])
        goes_on = goes_on & is_child.any(dim=1)
        node = torch.where(goes_on, is_child.to(torch.int8).argmax(dim=1), node)
        shared = shared + goes_on
    at = number - (width - count)  # of the draft that a node would be
    is_new = is_used[:, None] & (at >= shared[:, None])
    tokens = torch.where(is_new, drafts.gather(1, at.clamp(min=0).expand(num_rounds, -1)), trees.tokens)
    above = torch.where(at == shared[:, None], node[:, None], number - 1)
    parents = torch.where(is_new, above, trees.parents)
    mask = _ancestors(parents)
    return Trees(tokens=tokens, parents=parents, depths=mask.sum(dim=2) - 1, mask=mask)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Candidates:
    """Drafted tokens of R rounds that may become nodes; a parent comes before its children."""

    tokens: Tensor  # [R, C] the target's ids
    scores: Tensor  # [R, C] log-probability of the path, no better than the parent's
    parents: Tensor  # [R, C] candidate numbers, -1 for a child of the root


def best_trees(roots: Tensor, candidates: Candidates, num_nodes: int) -> Trees:
    """The trees of roots [R] and the `num_nodes - 1` best candidates of each.

    Equal scores go to the earlier candidate, so no node is chosen without its parent.
    """
    scores = candidates.scores.nan_to_num(nan=-torch.inf)  # what is not a number is not better than its parent
    order = scores.sort(dim=1, descending=True, stable=True).indices
    chosen = order[:, : num_nodes - 1]  # [R, T - 1] candidates, best first
    node_of = order.argsort(dim=1) + 1  # [R, C] node number, were all candidates chosen
    of_root = candidates.parents.gather(1, chosen)
    parents = node_of.gather(1, of_root.clamp(min=0)).masked_fill(of_root < 0, 0)
    tokens = torch.cat([roots[:, None], candidates.tokens.gather(1, chosen)], dim=1)
    parents = torch.cat([torch.zeros_like(roots)[:, None], parents], dim=1)
    mask = _ancestors(parents)
    return Trees(tokens=tokens, parents=parents, depths=mask.sum(dim=2) - 1, mask=mask)


def _ancestors(parents: Tensor) -> Tensor:
    """Which nodes are on each node's path: [R, T, T] bool. Each turn doubles how far up a node looks."""
    num_rounds, width = parents.shape
    sees = torch.eye(width, dtype=torch.bool, device=parents.device).repeat(num_rounds, 1, 1)
    above = parents
    for _ in range((width - 1).bit_length()):
        sees = sees | sees.gather(1, above[:, :, None].expand(-1, -1, width))
        above = above.gather(1, above)
    return sees
