"""Random batches for attention: segments of any length, trees, branches apart from their prefix, pages of nothing."""

from dataclasses import dataclass, replace
from random import Random

import numpy as np
import torch
from torch import Tensor

from roost.layers.segments import Segments, tiles

NOWHERE = 2**30  # a page past every pool


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What a kernel is compiled for."""

    num_kv_heads: int
    group: int
    head_dim: int
    page_size: int
    dtype: torch.dtype
    window: int | None = None
    tile_len: int = 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Arguments of attention."""

    query: Tensor
    keys: Tensor
    values: Tensor
    table: Tensor
    segments: Segments


def random_tree(width: int, random: Random) -> tuple[list[int], list[list[bool]]]:
    """Depths and sight of a tree's nodes, in any order."""
    depths, sees = [0], [[True] + [False] * (width - 1)]
    for node in range(1, width):
        parent = random.randrange(node)
        depths.append(depths[parent] + 1)
        sees.append([*sees[parent][:node], True, *[False] * (width - node - 1)])
    order = random.sample(range(width), width)
    return [depths[node] for node in order], [[sees[node][other] for other in order] for node in order]


def make(
    shape: Shape,
    columns: list[tuple[int, int]],
    device: torch.device,
    *,
    seed: int = 0,
    trees: tuple[int, ...] = (),
    shifts: list[tuple[int, int]] | None = None,
) -> Batch:
    """A batch of (start, width) segments, those in `trees` with one; what nobody may read is NaN, or a page nowhere."""
    random, generator = Random(seed), torch.Generator().manual_seed(seed)
    starts, widths = [start for start, _ in columns], [width for _, width in columns]
    rows = random.sample(range(len(columns) + 3), len(columns))
    page, window = shape.page_size, shape.window
    reads = []  # row positions that each segment reads
    for number, (start, width) in enumerate(columns):
        low = 0 if window is None else max(0, start - window + 1)
        base, shift = (0, 0) if shifts is None else shifts[number]
        reads.append([place if place < base else place + shift for place in range(low, start + width)])
    num_columns = 2 + max([places[-1] // page for places in reads if places], default=0)
    table = torch.full((len(columns) + 3, num_columns), NOWHERE, dtype=torch.int32)
    pages = {(row, place // page) for row, places in zip(rows, reads, strict=True) for place in places}
    numbers = random.sample(range(1, len(pages) + 4), len(pages))
    for (row, column), number in zip(sorted(pages), numbers, strict=True):
        table[row, column] = number
    sizes = (shape.num_kv_heads, shape.head_dim)
    kv = torch.full((2, (len(pages) + 4) * page, *sizes), torch.nan)
    for row, places in zip(rows, reads, strict=True):
        at = torch.tensor(places, dtype=torch.int64)
        slots = table[row, at // page].to(torch.int64) * page + at % page
        kv[:, slots] = torch.randn((2, len(places), *sizes), generator=generator)
    num_tokens = sum(widths)
    # queries are a view of something wider, as projections leave them
    wide = torch.randn((num_tokens, (shape.group + 2) * shape.num_kv_heads, shape.head_dim), generator=generator)
    query = wide.to(device, shape.dtype)[:, : shape.group * shape.num_kv_heads]
    offsets = [sum(widths[:number]) for number in range(len(widths))]
    pairs = list(zip(*(each.tolist() for each in tiles(np.array(widths), shape.tile_len)), strict=True))
    random.shuffle(pairs)
    tile_segments, tile_offsets = zip(*pairs, strict=True)
    small = {"offsets": offsets, "query_lens": widths, "tile_segments": tile_segments, "tile_offsets": tile_offsets}
    segments = Segments(
        rows=torch.tensor(rows, device=device),
        start_positions=torch.tensor(starts, device=device),
        **{name: torch.tensor(column, dtype=torch.int32, device=device) for name, column in small.items()},
        tile_len=shape.tile_len,
        **(_trees(widths, trees, random, device) if trees else {}),
        **({} if shifts is None else _branches(shifts, device)),
    )
    keys, values = kv.to(device, shape.dtype)
    return Batch(query=query, keys=keys, values=values, table=table.to(device), segments=segments)


def padded(segments: Segments, num_tiles: int) -> Segments:
    """The same with tiles of nothing at the end."""
    more = torch.full((num_tiles,), -1, dtype=torch.int32, device=segments.rows.device)
    return replace(
        segments,
        tile_segments=torch.cat([segments.tile_segments, more]),
        tile_offsets=torch.cat([segments.tile_offsets, more * 0]),
    )


def _trees(widths: list[int], trees: tuple[int, ...], random: Random, device: torch.device) -> dict[str, Tensor]:
    num_nodes = max(widths[number] for number in trees) + 2  # trees are padded
    depths = torch.full((len(trees), num_nodes), 10**9)
    mask = torch.ones((len(trees), num_nodes, num_nodes), dtype=torch.bool)
    tree_of = torch.full((len(widths),), -1, dtype=torch.int32)
    for tree, number in enumerate(trees):
        width = widths[number]
        own_depths, own_mask = random_tree(width, random)
        tree_of[number] = tree
        depths[tree, :width] = torch.tensor(own_depths)
        mask[tree, :width, :width] = torch.tensor(own_mask)
    columns = {"tree_of": tree_of, "tree_depths": depths, "tree_mask": mask}
    return {name: column.to(device) for name, column in columns.items()}


def _branches(shifts: list[tuple[int, int]], device: torch.device) -> dict[str, Tensor]:
    bases, by = (torch.tensor(column, device=device) for column in zip(*shifts, strict=True))
    return {"branch_bases": bases, "branch_shifts": by}
