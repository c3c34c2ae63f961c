"""Spans: the rows of a step as attention kernels read them, described on the device.

A span is a row's run of tokens in the flat batch. Widths are the host's to say, so tiles of work are cut there; starts
may be known to the device alone. `span_attention` is the plain reference of every kernel that reads spans. Made by
attention backends, read by kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Masks:
    """Trees among the tokens of spans: which nodes of its own span a token reads. All trees are padded to T nodes."""

    of_span: Tensor  # [num_spans] int32: the span's tree; -1: its tokens follow one another
    depths: Tensor  # [num_trees, T] int64: position of each node, less the span's start
    sees: Tensor  # [num_trees, T, T] bool: which nodes each one reads, itself included


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Shifts:
    """Spans that lie apart from their prefix: from `bases` on, position x is kept at row position x + shift."""

    bases: Tensor  # [num_spans] int64
    shifts: Tensor  # [num_spans] int64


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spans:
    """Runs of tokens. Token i of a span is at position start + i and reads what is before it, and itself."""

    rows: Tensor  # [num_spans] int64: rows of the page table
    offsets: Tensor  # [num_spans] int32: first token in the flat batch
    widths: Tensor  # [num_spans] int32
    starts: Tensor  # [num_spans] int64: position of the first token
    tile_spans: Tensor  # [num_tiles] int32: the span of each tile
    tile_firsts: Tensor  # [num_tiles] int32: its first token, within the span
    tile_len: int  # tokens of a tile
    masks: Masks | None = None
    shifts: Shifts | None = None


def span_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    spans: Spans,
    *,
    page_size: int,
    window: int | None,
    scale: float,
) -> Tensor:
    """What the heads [num_tokens, num_heads, head_dim] read from slots [num_slots, num_kv_heads, head_dim]."""
    output = torch.zeros_like(query)
    num_kv_heads = keys.shape[1]
    columns = torch.stack([spans.rows, spans.offsets, spans.widths, spans.starts], dim=1).tolist()
    for number, (row, offset, width, start) in enumerate(columns):
        places = torch.arange(start + width, device=query.device)  # every key of the span, in order
        kept = places
        if spans.shifts is not None:
            kept = torch.where(places < spans.shifts.bases[number], places, places + spans.shifts.shifts[number])
        slots = table[row, kept // page_size].to(torch.int64) * page_size + kept % page_size
        key, value = (each[slots].to(torch.float32) for each in (keys, values))
        own = query[offset : offset + width].to(torch.float32).unflatten(1, (num_kv_heads, -1))
        scores = torch.einsum("qhgd,khd->hgqk", own, key) * scale
        seen = _seen(spans, number, width, start, window)
        value = value.masked_fill(~seen.any(dim=0)[:, None, None], 0.0)  # behind the window anything may lie
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        mixed = torch.einsum("hgqk,khd->qhgd", weights, value)
        output[offset : offset + width] = mixed.flatten(1, 2).to(query.dtype)
    return output


def _seen(spans: Spans, number: int, width: int, start: int, window: int | None) -> Tensor:
    """Which of the keys [0, start + width) each token of a span reads: [width, start + width]."""
    device = spans.rows.device
    of = torch.arange(start + width, device=device)
    at = torch.arange(start, start + width, device=device)
    seen = of <= at[:, None]
    tree = -1 if spans.masks is None else int(spans.masks.of_span[number])
    if spans.masks is not None and tree >= 0:
        depths = spans.masks.depths[tree, :width]
        at = start + depths
        of = torch.cat([of[:start], at])
        seen = torch.cat([seen[:, :start], spans.masks.sees[tree, :width, :width]], dim=1)
    return seen if window is None else seen & (of > at[:, None] - window)


def tiles(widths: Sequence[int], tile_len: int) -> tuple[list[int], list[int]]:
    """(span, first token) of every tile: each span cut into pieces of `tile_len` tokens."""
    pairs = [(span, first) for span, width in enumerate(widths) for first in range(0, width, tile_len)]
    return [span for span, _ in pairs], [first for _, first in pairs]
