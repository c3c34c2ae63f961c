"""Batch: where everything of a step lies in the target's flat batch, and in the drafter's.

Host arithmetic over the rows' widths; where a row's tokens start, only the device may know. Whatever samples has a
*root* and nodes: a round its tree, a final chunk its last token alone. Steps of as many rounds of one width are laid
out alike, so their layout is sent once. Never touches tokens. Called by the runner and graphs.
"""

from functools import cached_property

import numpy as np
from torch import Tensor

from roost.attention.segments import Cut, Index
from roost.device.device import Device
from roost.forward.sizes import ChunkSize
from roost.spec_shape import SpecShape
from roost.step import StepPlan

Columns = dict[str, np.ndarray]  # by name


class Batch:
    """The layout of one step."""

    def __init__(self, widths: np.ndarray, is_prefill: np.ndarray, is_final: np.ndarray, shape: SpecShape) -> None:
        self.shape = shape
        self.widths = widths.astype(np.int64)
        self.is_prefill = is_prefill
        self.offsets = np.cumsum(self.widths) - self.widths
        self.sampling = np.flatnonzero(is_final | ~is_prefill)  # rows that get a token
        self.drafting = np.flatnonzero(~is_prefill & (widths > 1))  # rounds that carry drafts

    @classmethod
    def of_plan(cls, plan: StepPlan) -> "Batch":
        """The layout of a plan."""
        return cls(plan.widths, plan.is_prefill, plan.is_final, plan.shape)

    @classmethod
    def of_rounds(cls, number: int, width: int, shape: SpecShape) -> "Batch":
        """The layout of rounds of one width."""
        none = np.zeros(number, dtype=np.bool_)
        return cls(np.full(number, width), none, none, shape)

    @classmethod
    def of_chunks(cls, widths: np.ndarray, is_final: np.ndarray, size: ChunkSize, shape: SpecShape) -> "Batch":
        """The layout of chunks, padded with rows of the sink's, the last of which has all the tokens that are left.

        Whatever does not sample, the last one does in its place.
        """
        padding = np.zeros(size.num_rows - len(widths), dtype=np.int64)
        padding[-1] = size.num_tokens - widths.sum()
        all_widths = np.concatenate([widths, padding])
        all_rows = np.ones(size.num_rows, dtype=np.bool_)
        batch = cls(all_widths, all_rows, all_rows, shape)
        batch.sampling = np.full(size.num_rows, size.num_rows - 1)
        finals = np.flatnonzero(is_final)
        batch.sampling[: len(finals)] = finals
        return batch

    @cached_property
    def is_rounds(self) -> bool:
        """Whether all tokens are nodes, in order: no row is a chunk."""
        return not self.is_prefill.any()

    @cached_property
    def is_even(self) -> bool:
        """Whether the rows are rounds of one width, that of their trees."""
        return self.is_rounds and bool((self.widths == self.tree_width).all())

    @cached_property
    def num_nodes(self) -> Index:
        """Nodes of each sampling row."""
        return np.where(self.is_prefill, 1, self.widths)[self.sampling]

    @cached_property
    def root_ramps(self) -> Index:
        """Where each sampling row's root is among its row's tokens."""
        return np.where(self.is_prefill, self.widths - 1, 0)[self.sampling]

    @cached_property
    def root_tokens(self) -> Index:
        """The token of the batch that is each sampling row's root."""
        return self.offsets[self.sampling] + self.root_ramps

    @cached_property
    def node_offsets(self) -> Index:
        """Number of the first node of each sampling row, among all nodes."""
        return np.cumsum(self.num_nodes) - self.num_nodes

    @cached_property
    def tree_width(self) -> int:
        """Nodes that the trees of the step are padded to: those of its widest round."""
        return int(self.widths[self.drafting].max(initial=1))

    @cached_property
    def num_pairs(self) -> Index:
        """Pairs of each row that the drafter takes over: a chunk's tokens, or as many as a round can accept."""
        rounds = np.array([self.shape.accept_max_of(width) for width in self.widths.tolist()])
        return np.where(self.is_prefill, self.widths, rounds)

    @cached_property
    def tree_of(self) -> Index:
        """Each row's place among the sampling rows, if it is a round of several tokens; else -1."""
        places = np.full(len(self.widths), -1)
        places[self.drafting] = np.searchsorted(self.sampling, self.drafting)
        return places


def ramps(lengths: Index) -> Index:
    """0, 1, … length - 1 for each length, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def successors(plan: StepPlan, num_pairs: Index) -> Index:
    """The token after each pair's position, where a chunk says it; 0 where the step has yet to find it."""
    after = np.append(plan.tokens[1:], 0)
    after[plan.token_offsets[1:][plan.is_prefill] - 1] = plan.next_tokens[plan.is_prefill]
    found = np.zeros(num_pairs.sum(), dtype=np.int64)
    found[np.repeat(plan.is_prefill, num_pairs)] = after[: len(plan.tokens)].clip(min=0)
    return found


def chunk_columns(plan: StepPlan, batch: Batch, *, pairs: bool) -> Columns:
    """What the host has to say of chunks."""
    columns: Columns = {
        "given_starts": plan.starts,
        "chunk_at": np.flatnonzero(np.repeat(plan.is_prefill, plan.widths)),
        "chunk_tokens": plan.tokens,
    }
    return columns | {"successors": successors(plan, batch.num_pairs)} if pairs else columns


class Layout:
    """A batch's layout: on the host, and once sent on the device."""

    def __init__(
        self,
        batch: Batch,
        device: Device | None,
        *,
        pairs: bool,
        chunks: Columns,
        tile_len_max: int,
        num_tiles: int | None = None,
    ) -> None:
        self.batch = batch
        widths, sampling, num_nodes = batch.widths, batch.sampling, batch.num_nodes
        self.tokens = Cut("tokens", widths, ~batch.is_prefill, batch.tree_of, tile_len_max, num_tiles)
        self.pairs: Cut | None = None  # of the drafter's batch
        self.sent: dict[str, Tensor] = {}
        self.arrays: Columns = {
            "token_runs": np.repeat(np.arange(len(widths)), widths),
            "token_ramps": ramps(widths),
            "sampling": sampling,
            "root_ramps": batch.root_ramps,
            "node_tokens": np.repeat(batch.root_tokens, num_nodes) + ramps(num_nodes),
            "node_roots": np.repeat(np.arange(len(sampling)), num_nodes),
            "node_cells": np.repeat(np.arange(len(sampling)) * batch.tree_width, num_nodes) + ramps(num_nodes),
            "node_offsets": batch.node_offsets,
            "drafting": batch.tree_of[batch.drafting],
            "draft_widths": widths[batch.drafting],
            **self.tokens.arrays,
            **chunks,
        }
        if pairs:
            no_trees = np.full(len(widths), -1)
            self.pairs = Cut("pairs", batch.num_pairs, ~batch.is_prefill, no_trees, tile_len_max, num_tiles)
            self.arrays |= {**self.pairs.arrays, **_pair_arrays(batch)}
        if device is not None:
            self.take(device.send(self.arrays))

    def take(self, sent: dict[str, Tensor]) -> None:
        """Its columns have been sent."""
        self.sent = sent
        for cut in (self.tokens, self.pairs):
            if cut is not None:
                cut.take(sent)

    @property
    def packed(self) -> Index:
        """All columns, one after the other."""
        return np.concatenate([column.reshape(-1) for column in self.arrays.values()])

    def parts(self, packed: Tensor) -> dict[str, Tensor]:
        """The columns in such memory of the device."""
        parts = packed.split([column.size for column in self.arrays.values()])
        return dict(zip(self.arrays, parts, strict=True))

    def __getitem__(self, name: str) -> Tensor:
        return self.sent[name]


def _pair_arrays(batch: Batch) -> dict[str, np.ndarray]:
    """A round's pairs are its accepted path; a final chunk's last pair ends in the token just sampled."""
    counts, sampling = batch.num_pairs, batch.sampling
    offsets = np.cumsum(counts) - counts
    of_sampling = np.where(batch.is_prefill, 1, counts)[sampling]
    firsts = offsets[sampling] + np.where(batch.is_prefill, counts - 1, 0)[sampling]
    accept_max = batch.shape.accept_max_of(batch.tree_width)
    return {
        "pair_runs": np.repeat(np.arange(len(counts)), counts),
        "pair_ramps": ramps(counts),
        "pair_sources": np.repeat(batch.offsets, counts) + ramps(counts),  # right for chunks
        "pair_firsts": firsts,
        "pair_at": np.repeat(firsts, of_sampling) + ramps(of_sampling),
        "pair_cells": np.repeat(np.arange(len(sampling)) * accept_max, of_sampling) + ramps(of_sampling),
        "pair_roots": np.repeat(batch.root_tokens, of_sampling),
    }
