"""Segments made by hand: rows, where they start and how long they are, on the host and on a device.

Used by the tests of attention and of drafters.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from roost.layers.segments import HostSegments, Segments, tiles

CPU = torch.device("cpu")


def make_segments(
    rows: Sequence[int],
    start_positions: Sequence[int],
    query_lens: Sequence[int] | None = None,
    *,
    are_rounds: bool = True,
    trees: tuple[Tensor, Tensor] | None = None,
    tile_len: int = 16,
    device: torch.device = CPU,
) -> Segments:
    """Segments of one token each, unless told; `trees` are their depths and masks, one for each segment."""
    lens = np.array([1] * len(rows) if query_lens is None else query_lens, dtype=np.int64)
    host = HostSegments(
        rows=np.array(rows, dtype=np.int64),
        start_positions=np.array(start_positions, dtype=np.int64),
        query_lens=lens,
        is_round=np.full(len(rows), are_rounds),
        tree_of=np.full(len(rows), -1) if trees is None else np.arange(len(rows)),
    )
    small = [
        torch.tensor(each, dtype=torch.int32, device=device) for each in (host.offsets, lens, *tiles(lens, tile_len))
    ]
    offsets, lens_sent, tile_segments, tile_offsets = small
    return Segments(
        rows=torch.tensor(host.rows, device=device),
        start_positions=torch.tensor(host.start_positions, device=device),
        offsets=offsets,
        query_lens=lens_sent,
        tile_segments=tile_segments,
        tile_offsets=tile_offsets,
        tile_len=tile_len,
        tree_of=None if trees is None else torch.tensor(host.tree_of, dtype=torch.int32, device=device),
        tree_depths=None if trees is None else trees[0],
        tree_mask=None if trees is None else trees[1],
        host=host,
    )
