"""States of recurrent layers on the device: by page what they are, by row where a step starts from and what it keeps.

Rows learn where they stand from the plans, applied in launch order, so that a step reads all of it from the device's
memory and can be captured. The inputs that are run again lie in a KV cache of their own. Never knows who owns a page.
Called by the runner and the forward passes.
"""

import numpy as np
import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache
from roost.device.device import Device
from roost.kv.pages import NULL_PAGE
from roost.layers.gated_delta import NOT_KEPT, Recurrence, Replay
from roost.layers.segments import Segments
from roost.step import KEPT_STATES, StateColumns


class RecurrentStates:
    """The states of all recurrent layers, which are of one shape."""

    def __init__(self, cache: KvCache, num_pages: int, num_rows: int, device: Device) -> None:
        """`cache` has the layers' inputs; `num_rows` counts the padding row, which starts from nothing."""
        shape = cache.kv.recurs
        assert shape is not None, cache.kv
        self._inputs, self._device, num_layers = cache, device, len(cache.keys)
        of_head = (shape.num_value_heads, shape.key_dim, shape.value_dim)
        self.matrices = torch.empty((num_layers, num_pages, *of_head), dtype=torch.float32, device=device.torch)
        tails = (num_layers, num_pages, shape.conv_len - 1, shape.num_channels)
        self.tails = torch.empty(tails, dtype=cache.kv.dtype, device=device.torch)
        self.matrices[:, NULL_PAGE], self.tails[:, NULL_PAGE] = 0, 0  # what comes before a text
        # of each row: its state's page and position, then at which positions it is kept, then the pages for those
        self._by_row = torch.zeros((num_rows, 2 + 2 * KEPT_STATES), dtype=torch.int64, device=device.torch)
        self._by_row[:, 2 : 2 + KEPT_STATES] = NOT_KEPT

    def apply(self, rows: np.ndarray, columns: StateColumns) -> None:
        """Where the rows of a step stand."""
        by_row = np.column_stack([columns.sources, columns.starts, columns.kept_at, columns.kept_in])
        sent = self._device.send({"rows": rows, "by_row": by_row})
        self._by_row[sent["rows"]] = sent["by_row"]

    def replay(self, segments: Segments, slots: Tensor) -> Replay:
        """What a pass over segments goes on from and keeps; the inputs of its tokens go to `slots`."""
        source, start, kept_at, kept_in = self._by_row[segments.rows].split((1, 1, KEPT_STATES, KEPT_STATES), dim=1)
        return Replay(
            segments=segments,
            slots=slots,
            pages=self._inputs.table.of_rounds,
            sources=source[:, 0],
            starts=start[:, 0],
            replayed_max=self._inputs.table.window or 0,
            kept_at=kept_at,
            kept_in=kept_in,
        )

    def recurrence(self, layer: int, replay: Replay) -> Recurrence:
        """That of one of its layers."""
        inputs = self._inputs.keys[layer].squeeze(1)
        return Recurrence(replay=replay, inputs=inputs, states=self.matrices[layer], tails=self.tails[layer])
