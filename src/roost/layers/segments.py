"""Segments: a flat batch as attention reads it, one segment of consecutive tokens for each row.

How many tokens a segment has is the host's to say, so tiles of work are cut there; where it starts may be known to the
device alone. `segment_attention` is the plain reference of every kernel that reads segments. Made by passes and
drafters, read by attention backends and kernels.
"""

from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Index = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostSegments:
    """The same columns on the host, where start positions are known there: for backends that plan on the host."""

    rows: np.ndarray  # [num_segments]
    start_positions: np.ndarray  # [num_segments]
    query_lens: np.ndarray  # [num_segments]
    is_round: np.ndarray  # [num_segments] bool: decodes or verifies; else a chunk of a prompt
    tree_of: np.ndarray  # [num_segments]
    branch_bases: np.ndarray | None = None  # [num_segments]
    branch_shifts: np.ndarray | None = None  # [num_segments]
    num_branches: int = 1  # segments next to each other that are branches of one round

    @property
    def offsets(self) -> np.ndarray:
        """First token of each segment in the flat batch."""
        return np.cumsum(self.query_lens) - self.query_lens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Tiles:
    """Pieces of segments, each the work of one program at a time."""

    segments: Tensor  # [num_tiles] int32: the segment of each; -1: the tile is padding
    offsets: Tensor  # [num_tiles] int32: its first token, within the segment
    tile_len: int  # tokens, at most


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segments:
    """One segment for each row. Token i is at position start + i, and reads what is before it in its row, and itself.

    A segment may be a tree of drafts: then a token's position is the start plus its depth, and of its own segment it
    reads its ancestors alone. All trees are padded to T nodes. A draft branch lies apart from its prefix: from its base
    on, position x is kept at row position x + shift. A segment is cut either into tiles or into wide ones.
    """

    rows: Tensor  # [num_segments] int64: rows of the page table
    start_positions: Tensor  # [num_segments] int64: position of the first token
    offsets: Tensor  # [num_segments] int32: first token in the flat batch
    query_lens: Tensor  # [num_segments] int32: tokens
    tile_segments: Tensor  # [num_tiles] int32: the segment of each tile; -1: the tile is padding
    tile_offsets: Tensor  # [num_tiles] int32: its first token, within the segment
    tile_len: int  # tokens of a tile, at most
    wide_tiles: Tiles | None = None  # of segments that are longer than a tile
    tree_of: Tensor | None = None  # [num_segments] int32: the segment's tree; -1: its tokens follow one another
    tree_depths: Tensor | None = None  # [num_trees, T] int64
    tree_mask: Tensor | None = None  # [num_trees, T, T] bool: which nodes each one reads, itself included
    branch_bases: Tensor | None = None  # [num_segments] int64
    branch_shifts: Tensor | None = None  # [num_segments] int64
    host: HostSegments | None = None  # None where lengths are the device's alone, and in CUDA graphs

    @property
    def kind(self) -> tuple[int | None, bool]:
        """What tells batches apart for whoever records how they are read: the nodes of trees, and branches."""
        return None if self.tree_mask is None else self.tree_mask.shape[1], self.branch_bases is not None

    def of_one_token(self, places: np.ndarray) -> "Segments":
        """Some of these segments, which have one token each."""
        at, index = torch.from_numpy(places), torch.arange(len(places), dtype=torch.int32)
        host = self.host
        if host is not None:
            names = ("rows", "start_positions", "query_lens", "is_round", "tree_of")
            host = replace(host, **{name: getattr(host, name)[places] for name in names})
        return Segments(
            rows=self.rows[at],
            start_positions=self.start_positions[at],
            offsets=index,
            query_lens=torch.ones_like(index),
            tile_segments=index,
            tile_offsets=torch.zeros_like(index),
            tile_len=self.tile_len,
            host=host,
        )

    def later(self, num_tokens: int, start_positions: Tensor) -> "Segments":
        """The same segments so many tokens further on, where they start at `start_positions`."""
        if num_tokens == 0:
            return self
        host = self.host
        if host is not None:
            host = replace(host, start_positions=host.start_positions + num_tokens)
        return replace(self, start_positions=start_positions, host=host)


def segment_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    segments: Segments,
    *,
    page_size: int,
    window: int | None,
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """What the heads [num_tokens, num_heads, head_dim] read from slots [num_slots, num_kv_heads, head_dim].

    Sinks [num_heads] are scores that join the sum of weights and stand for no key.
    """
    output = torch.zeros_like(query)
    num_kv_heads = keys.shape[1]
    columns = [segments.rows, segments.offsets, segments.query_lens, segments.start_positions]
    for number, (row, offset, query_len, start) in enumerate(torch.stack(columns, dim=1).tolist()):
        positions = torch.arange(start + query_len, device=query.device)  # of every key of the segment, in order
        if segments.branch_bases is not None and segments.branch_shifts is not None:
            shifted = positions + segments.branch_shifts[number]
            positions = torch.where(positions < segments.branch_bases[number], positions, shifted)
        slots = table[row, positions // page_size].to(torch.int64) * page_size + positions % page_size
        key, value = (each[slots].to(torch.float32) for each in (keys, values))
        own = query[offset : offset + query_len].to(torch.float32).unflatten(1, (num_kv_heads, -1))
        logits = torch.einsum("qhgd,khd->hgqk", own, key) * scale
        seen = _seen(segments, number, query_len, start, window)
        value = value.masked_fill(~seen.any(dim=0)[:, None, None], 0.0)  # before the window anything may lie
        weights = key_weights(logits.masked_fill(~seen, -torch.inf), sinks)
        mixed = torch.einsum("hgqk,khd->qhgd", weights, value)
        output[offset : offset + query_len] = mixed.flatten(1, 2).to(query.dtype)
    return output


def key_weights(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """The softmax over keys of scores [num_kv_heads, shared, num_tokens, num_keys], with sinks in its denominator."""
    if sinks is None:
        return scores.softmax(dim=-1)
    column = sinks.to(scores.dtype).view(*scores.shape[:2], 1, 1).expand(-1, -1, scores.shape[2], -1)
    return torch.cat([scores, column], dim=-1).softmax(dim=-1)[..., :-1]


def _seen(segments: Segments, number: int, query_len: int, start: int, window: int | None) -> Tensor:
    """Which of the keys [0, start + query_len) each token of a segment reads: [query_len, start + query_len]."""
    device = segments.rows.device
    of = torch.arange(start + query_len, device=device)
    at = torch.arange(start, start + query_len, device=device)
    seen = of <= at[:, None]
    if segments.tree_of is not None and segments.tree_depths is not None and segments.tree_mask is not None:
        tree = int(segments.tree_of[number])
        if tree >= 0:
            at = start + segments.tree_depths[tree, :query_len]
            of = torch.cat([of[:start], at])
            seen = torch.cat([seen[:, :start], segments.tree_mask[tree, :query_len, :query_len]], dim=1)
    return seen if window is None else seen & (of > at[:, None] - window)


def aranges(lengths: Index) -> Index:
    """0, 1, … length - 1 for each length, one after the other."""
    return np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)


def tiles(query_lens: Index, tile_len: int) -> tuple[Index, Index]:
    """(segment, first token) of every tile: each segment cut into pieces of `tile_len` tokens."""
    counts = -(-query_lens // tile_len)
    return np.repeat(np.arange(len(query_lens)), counts), aranges(counts) * tile_len
