"""Step layout: where everything of a step lies in the target's flat batch, and in the drafter's.

Host arithmetic over how many tokens each row runs; where they start, only the device may know. A row that samples has a
*root* and nodes: a verify round its tree, a final chunk its last token alone. Node n of the g-th sampling row is *cell*
g * tree_width + n. Steps of as many rounds of one width are laid out alike, so their columns are sent once. Never
touches tokens, but for those of chunks. Called by the runner and graphs.
"""

from collections.abc import Mapping
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from roost.device.device import Device
from roost.drafters.tree import Trees
from roost.layers.segments import HostSegments, Index, Segments, Tiles, aranges, tiles
from roost.spec_shape import SpecShape
from roost.step import StepPlan

HostColumns = dict[str, np.ndarray]  # by name

# The flat batches of a step: what the target runs, what the drafter takes over, and the roots that are drafted from.
TOKENS, PAIRS, ROOTS = "tokens", "pairs", "roots"


class StepLayout:
    """The layout of one step: on the host, and once sent on the device. `at` gives it the rows of a certain step."""

    rows: Tensor  # [num_rows]
    rows_host: np.ndarray
    start_positions_host: np.ndarray | None  # None: only the device knows them

    def __init__(
        self,
        query_lens: np.ndarray,
        is_prefill: np.ndarray,
        is_final: np.ndarray,
        shape: SpecShape,
        tree_width: int | None = None,
    ) -> None:
        self.shape = shape
        self.query_lens = query_lens.astype(np.int64)  # tokens of each row that the target runs
        self.is_prefill, self._is_round = is_prefill, ~is_prefill
        self.offsets = np.cumsum(self.query_lens) - self.query_lens
        self.sampling = np.flatnonzero(is_final | ~is_prefill)  # rows that get a token
        self.drafting = np.flatnonzero(~is_prefill & (query_lens > 1))  # rounds that carry drafts
        # nodes that the trees of the step are padded to: unless told, those of its widest round
        self.tree_width = tree_width or int(self.query_lens[self.drafting].max(initial=1))
        self.is_rounds = not is_prefill.any()  # all tokens are nodes, in order: no row is a chunk
        # whether the rows are rounds of one width, that of their trees
        self.is_even = self.is_rounds and bool((self.query_lens == self.tree_width).all())
        self.columns: HostColumns = {}  # what the device has to know
        self.is_sent = False  # whether the device has them
        self._sent: dict[str, Tensor] = {}
        self._sent_segments: dict[str, tuple[Tensor, Tensor, Tensor, Tensor, Tiles | None]] = {}  # by batch
        self._tile_lens: dict[str, int] = {}  # by batch
        self._tile_len_max = 1

    @cached_property
    def num_nodes(self) -> Index:
        """Nodes of each sampling row."""
        return np.where(self.is_prefill, 1, self.query_lens)[self.sampling]

    @cached_property
    def _root_index(self) -> Index:
        """Which of its row's tokens is each sampling row's root."""
        return np.where(self.is_prefill, self.query_lens - 1, 0)[self.sampling]

    @cached_property
    def _root_tokens(self) -> Index:
        """The token of the batch that is each sampling row's root."""
        return self.offsets[self.sampling] + self._root_index

    @cached_property
    def num_pairs(self) -> Index:
        """Pairs of each row that the drafter takes over: a chunk's tokens, or as many as a round can accept."""
        return np.where(self.is_prefill, self.query_lens, np.minimum(self.query_lens, self.shape.depth_max + 1))

    @cached_property
    def _tree_of(self) -> Index:
        """Each row's place among the sampling rows, if it is a round of several tokens; else -1."""
        places = np.full(len(self.query_lens), -1)
        places[self.drafting] = np.searchsorted(self.sampling, self.drafting)
        return places

    @cached_property
    def _sampling_of(self) -> Index:
        """Each row's place among the sampling rows; of no meaning for one that does not sample."""
        places = np.zeros(len(self.query_lens), dtype=np.int64)
        places[self.sampling] = np.arange(len(self.sampling))
        return places

    def lay_out(self, *, has_drafter: bool, tile_len_max: int, chunks: HostColumns | None = None) -> "StepLayout":
        """Work out what the device has to know."""
        sampling, num_nodes = self.sampling, self.num_nodes
        segment, index = np.repeat(np.arange(len(self.query_lens)), self.query_lens), aranges(self.query_lens)
        self.columns = {
            "token_segment": segment,
            "token_index": index,  # within its segment
            "sampling": sampling,
            "root_index": self._root_index,
            "num_nodes": num_nodes,
            "node_tokens": np.repeat(self._root_tokens, num_nodes) + aranges(num_nodes),
            "node_sampling": np.repeat(np.arange(len(sampling)), num_nodes),  # which of the sampling rows it is of
            "node_cells": np.repeat(np.arange(len(sampling)) * self.tree_width, num_nodes) + aranges(num_nodes),
            "node_offsets": np.cumsum(num_nodes) - num_nodes,  # first node of each sampling row
            **self._segment_columns(TOKENS, self.query_lens, tile_len_max),
            "tokens.tree_of": self._tree_of,
            **(chunks or {}),
        }
        if chunks or not self.is_rounds:  # the cell that a token comes from; -1: the host says it
            cells = self._sampling_of[segment] * self.tree_width + index
            self.columns["token_cells"] = np.where(self.is_prefill[segment], -1, cells)
        if has_drafter:
            self.columns |= self._segment_columns(PAIRS, self.num_pairs, tile_len_max)
            self.columns |= self._pair_columns()
        if has_drafter and len(self.drafting):
            self.columns |= self._segment_columns(ROOTS, np.ones_like(self.drafting), tile_len_max)
            self.columns |= {"drafting": self._tree_of[self.drafting], "draft_widths": self.query_lens[self.drafting]}
        return self

    def send(self, device: Device) -> None:
        """Have all columns on the device, in one transfer."""
        self.take(device.send(self.columns))

    def take(self, sent: Mapping[str, Tensor]) -> None:
        """The columns are on the device; those of segments become int32."""
        self._sent = {name: column.to(torch.int32) if "." in name else column for name, column in sent.items()}
        self._sent_segments = {batch: self._segments_of(batch) for batch in self._tile_lens}
        self.is_sent = True

    def at(self, rows: Tensor, rows_host: np.ndarray, start_positions_host: np.ndarray | None) -> "StepLayout":
        """The same layout, of these rows."""
        layout = StepLayout.__new__(StepLayout)
        layout.__dict__.update(self.__dict__)
        layout.rows, layout.rows_host, layout.start_positions_host = rows, rows_host, start_positions_host
        return layout

    def __getitem__(self, name: str) -> Tensor:
        return self._sent[name]

    def __contains__(self, name: str) -> bool:
        return name in self._sent

    def segments(self, batch: str, rows: Tensor, start_positions: Tensor, trees: Trees | None = None) -> Segments:
        """One of the flat batches, as attention reads it; with the trees of its rounds, unless those are chains."""
        offsets, query_lens, tile_segments, tile_offsets, wide_tiles = self._sent_segments[batch]
        return Segments(
            rows=rows,
            start_positions=start_positions,
            offsets=offsets,
            query_lens=query_lens,
            tile_segments=tile_segments,
            tile_offsets=tile_offsets,
            tile_len=self._tile_lens[batch],
            wide_tiles=wide_tiles,
            tree_of=None if trees is None else self._sent["tokens.tree_of"],
            tree_depths=None if trees is None else trees.depths,
            tree_mask=None if trees is None else trees.mask,
            host=self._host_segments(batch),
        )

    def _segments_of(self, batch: str) -> tuple[Tensor, Tensor, Tensor, Tensor, Tiles | None]:
        """Offsets, lengths and tiles of one of the flat batches, and its wide tiles if it has any."""
        names = ("offsets", "query_lens", "tile_segments", "tile_offsets")
        offsets, query_lens, tile_segments, tile_offsets = (self._sent[f"{batch}.{name}"] for name in names)
        of, wide_offsets = self._sent[f"{batch}.wide_tile_segments"], self._sent[f"{batch}.wide_tile_offsets"]
        wide_tiles = Tiles(segments=of, offsets=wide_offsets, tile_len=self._tile_len_max) if len(of) else None
        return offsets, query_lens, tile_segments, tile_offsets, wide_tiles

    def _host_segments(self, batch: str) -> HostSegments | None:
        """The same on the host, if the start positions are known there."""
        starts = self.start_positions_host
        if starts is None:
            return None
        if batch == ROOTS:
            one, at = np.ones_like(self.drafting), self.drafting
            rows, none = self.rows_host[at], np.full(len(at), -1)
            return HostSegments(rows=rows, start_positions=starts[at], query_lens=one, is_round=one > 0, tree_of=none)
        return HostSegments(
            rows=self.rows_host,
            start_positions=starts,
            query_lens=self.query_lens if batch == TOKENS else self.num_pairs,
            is_round=self._is_round,
            tree_of=self._tree_of,
        )

    def _segment_columns(self, batch: str, query_lens: Index, tile_len_max: int) -> HostColumns:
        """Segments of some lengths in a flat batch; tiles that hold any round, and wide ones of what is longer."""
        self._tile_len_max = tile_len_max
        tile_len = self._tile_lens[batch] = min(tile_len_max, 1 << (self._round_len(batch) - 1).bit_length())
        is_wide = query_lens > tile_len
        columns = {f"{batch}.offsets": np.cumsum(query_lens) - query_lens, f"{batch}.query_lens": query_lens}
        cuts = (("tile", ~is_wide, tile_len), ("wide_tile", is_wide, tile_len_max))
        for name, is_cut, length in cuts:
            tile_segments, tile_offsets = tiles(np.where(is_cut, query_lens, 0), length)
            columns |= {f"{batch}.{name}_segments": tile_segments, f"{batch}.{name}_offsets": tile_offsets}
        return columns

    def _round_len(self, batch: str) -> int:
        """Tokens of the widest round in one of the flat batches."""
        return {TOKENS: self.tree_width, PAIRS: self.shape.accept_max_of(self.tree_width), ROOTS: 1}[batch]

    def _pair_columns(self) -> HostColumns:
        """A round's pairs are its accepted path; a final chunk's last pair ends in the token just sampled."""
        counts, sampling = self.num_pairs, self.sampling
        segment, index = np.repeat(np.arange(len(counts)), counts), aranges(counts)
        firsts = (np.cumsum(counts) - counts)[sampling] + np.where(self.is_prefill, counts - 1, 0)[sampling]
        accept_max, is_chunk = self.shape.accept_max_of(self.tree_width), self.is_prefill[segment]
        cells = np.where(is_chunk, -1, self._sampling_of[segment] * accept_max + index)
        cells[firsts] = np.arange(len(sampling)) * accept_max
        return {
            "pair_segment": segment,
            "pair_index": index,  # within its segment
            # the token of the target's batch that stands at the pair's position; of a round's pairs, the round's root
            "pair_sources": self.offsets[segment] + np.where(is_chunk, index, 0),
            "pair_cells": cells,  # which accepted token it ends in: [num_sampling, accept_max]; -1: the host says it
            "accept_firsts": firsts,  # the first pair of each sampling row whose token this step samples
        }


def plan_layout(plan: StepPlan, tree_width: int | None = None) -> StepLayout:
    """The layout of a plan; its trees are padded to `tree_width` nodes, if that is given."""
    return StepLayout(plan.query_lens, plan.is_prefill, plan.is_final, plan.shape, tree_width)


def rounds_layout(number: int, width: int, shape: SpecShape) -> StepLayout:
    """The layout of rounds of one width."""
    none = np.zeros(number, dtype=np.bool_)
    return StepLayout(np.full(number, width), none, none, shape)


def successors(plan: StepPlan, num_pairs: Index) -> Index:
    """The token after each pair's position, where a chunk says it; 0 where the step has yet to find it."""
    after = np.append(plan.tokens[1:], 0)
    after[plan.token_offsets[1:][plan.is_prefill] - 1] = plan.next_tokens[plan.is_prefill]
    found = np.zeros(num_pairs.sum(), dtype=np.int64)
    found[np.repeat(plan.is_prefill, num_pairs)] = after[: len(plan.tokens)].clip(min=0)
    return found


def chunk_columns(plan: StepPlan, layout: StepLayout, *, has_drafter: bool) -> HostColumns:
    """What the host has to say of chunks."""
    tokens = np.zeros(layout.query_lens.sum(), dtype=np.int64)
    tokens[np.repeat(plan.is_prefill, plan.query_lens)] = plan.tokens
    columns: HostColumns = {
        "chunk_starts": plan.start_positions,  # start positions; negative for a round
        "chunk_tokens": tokens,  # 0 where a round says it
    }
    return columns | {"successors": successors(plan, layout.num_pairs)} if has_drafter else columns


def padded(column: np.ndarray, length: int, value: int = 0) -> np.ndarray:
    """A column with as many entries as a graph was captured with."""
    return np.concatenate([column, np.full(length - len(column), value)])
