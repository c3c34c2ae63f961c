"""Segments: how a flat batch is cut into runs of tokens, one for each row, and into tiles of work for attention.

Host arithmetic over the rows' widths; the same columns lie on the device once they are sent. Made by the layout of a
step, read by attention backends.
"""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from roost.layers.spans import tiles

Index = NDArray[np.int64]


class Cut:
    """How a flat batch is cut into runs of tokens, one for each row: on the host, and once sent on the device.

    Where their number is given, tiles are of one length and padded: what belongs to no run is nobody's.
    """

    def __init__(
        self,
        name: str,
        widths: Index,
        is_round: np.ndarray,
        tree_of: Index,
        tile_len_max: int,
        num_tiles: int | None = None,
    ) -> None:
        self.widths, self.is_round = widths, is_round
        self.offsets = np.cumsum(widths) - widths
        self.tree_of = tree_of  # [num_runs] which tree a run's tokens are; -1: none
        longest = tile_len_max if num_tiles is not None else int(widths.max(initial=1))
        self.tile_len = min(tile_len_max, 1 << (longest - 1).bit_length())
        spans, firsts = tiles(widths.tolist(), self.tile_len)
        if num_tiles is not None:
            missing = num_tiles - len(spans)
            spans, firsts = spans + [-1] * missing, firsts + [0] * missing
        columns = {"widths": widths, "offsets": self.offsets, "tree_of": tree_of}
        columns |= {"tile_spans": np.array(spans), "tile_firsts": np.array(firsts)}
        self.arrays = {f"{name}.{key}": column for key, column in columns.items()}  # to be sent with all others
        self.sent: dict[str, Tensor] = {}  # the same by their own names, int32

    def take(self, sent: Mapping[str, Tensor]) -> None:
        """Its columns have been sent."""
        self.sent = {name.split(".")[1]: sent[name].to(torch.int32) for name in self.arrays}
