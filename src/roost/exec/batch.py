"""Batch: where everything of a step lies in the target's flat batch, and in the drafter's.

Host arithmetic over a plan and the rows' lengths. Whatever samples has a *root* and nodes: a round its tree, a final
chunk its last token alone. Never touches tokens. Called by the runner.
"""

from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from roost.step import Ints, StepPlan

Index = NDArray[np.int64]


class Batch:
    """The layout of one step."""

    def __init__(self, plan: StepPlan, starts: Ints) -> None:
        self._plan = plan
        self.starts = starts.astype(np.int64)
        self.widths = plan.widths.astype(np.int64)
        self.offsets = np.cumsum(self.widths) - self.widths
        self.ends = self.starts + self.widths  # first row position past what each row's tokens are written to
        self.sampling = np.flatnonzero(plan.is_final | ~plan.is_prefill)  # rows that get a token
        self.drafting = np.flatnonzero(~plan.is_prefill & (plan.widths > 1))  # rounds that carry drafts

    @cached_property
    def token_rows(self) -> Index:
        """The row of each token."""
        return np.repeat(self._plan.rows.astype(np.int64), self.widths)

    @cached_property
    def token_places(self) -> Index:
        """The row position that each token is written to."""
        return ramps(self.widths) + np.repeat(self.starts, self.widths)

    @cached_property
    def num_nodes(self) -> Index:
        """Nodes of each sampling row."""
        return np.where(self._plan.is_prefill, 1, self.widths)[self.sampling]

    @cached_property
    def root_tokens(self) -> Index:
        """The token of the batch that is each sampling row's root."""
        return (self.offsets + np.where(self._plan.is_prefill, self.widths - 1, 0))[self.sampling]

    @cached_property
    def root_places(self) -> Index:
        """The position of each sampling row's root."""
        return (self.starts + np.where(self._plan.is_prefill, self.widths - 1, 0))[self.sampling]

    @cached_property
    def node_tokens(self) -> Index:
        """The token of the batch that each node is, sampling row by sampling row."""
        return np.repeat(self.root_tokens, self.num_nodes) + ramps(self.num_nodes)

    @cached_property
    def node_offsets(self) -> Index:
        """Number of the first node of each sampling row, among all nodes."""
        return np.cumsum(self.num_nodes) - self.num_nodes

    def node_cells(self, tree_width: int) -> Index:
        """Where each node stands in trees [num_sampling, tree_width], flattened."""
        return np.repeat(np.arange(len(self.sampling)) * tree_width, self.num_nodes) + ramps(self.num_nodes)

    @cached_property
    def num_pairs(self) -> Index:
        """Pairs of each row that the drafter takes over: a chunk's tokens, or as many as a round can accept."""
        shape = self._plan.shape
        rounds = np.array([shape.accept_max_of(width) for width in self.widths.tolist()])
        return np.where(self._plan.is_prefill, self.widths, rounds)

    @cached_property
    def chunk_successors(self) -> Index:
        """The token after each pair's position, where a chunk says it; 0 where the step has yet to find it."""
        plan = self._plan
        after = np.append(plan.tokens[1:], 0)
        after[plan.token_offsets[1:][plan.is_prefill] - 1] = plan.next_tokens[plan.is_prefill]
        successors = np.zeros(self.num_pairs.sum(), dtype=np.int64)
        successors[np.repeat(plan.is_prefill, self.num_pairs)] = after[: len(plan.tokens)].clip(min=0)
        return successors

    @cached_property
    def pair_offsets(self) -> Index:
        """First pair of each row."""
        return np.cumsum(self.num_pairs) - self.num_pairs


def ramps(lengths: Index) -> Index:
    """0, 1, … length - 1 for each length, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
