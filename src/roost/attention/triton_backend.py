"""The Triton backend: one kernel for decoding, chunks, trees and branches.

It reads lengths on the device, so nothing is planned on the host and nothing waits. Called by the forward passes and
drafters.
"""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from roost.attention.kv_cache import KvCache, LayerKv, PageTable
from roost.attention.protocol import ReadKv
from roost.device.device import Device
from roost.kernels.attention import ARRIVALS_MAX, num_splits, paged_attention
from roost.kernels.copy import copy_slots
from roost.kernels.rotary import rope, rope_write
from roost.layers.rotary import CosSin
from roost.layers.segments import Segments
from roost.models.model import KvShape


class TritonAttention:
    """Attention in Triton."""

    def __init__(self, device: Device) -> None:
        self._num_processors = device.num_processors
        self._arrivals = torch.zeros(ARRIVALS_MAX, dtype=torch.int32, device=device.torch)  # zero between launches

    def read(self, table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
        """One launch a layer for each length of tiles, in as many splits as fill the device."""
        keys_max = table.pages.shape[1] * table.page_size
        if table.window is not None:
            keys_max = min(keys_max, table.window)

        launches = _launches(segments)

        def read(query: Tensor, layer: LayerKv, sinks: Tensor | None = None) -> Tensor:
            output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
            for each in launches:
                paged_attention(
                    query,
                    layer.keys,
                    layer.values,
                    table.pages,
                    each,
                    page_size=table.page_size,
                    window=table.window,
                    scale=kv.scale,
                    num_splits=num_splits(each, query, kv.num_kv_heads, self._num_processors, keys_max),
                    arrivals=self._arrivals,
                    scales=layer.scales,
                    sinks=sinks,
                    out=output,
                )
            return output

        return read

    def write(self, cache: KvCache, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """In one kernel."""
        keys, values, scales = cache.layer(layer)
        return rope_write(qk, value, *cos_sin, slots, keys, values, scales)

    def rotate(self, query: Tensor, cos_sin: CosSin) -> Tensor:
        """In one kernel."""
        return rope(query, *cos_sin)

    def copy(self, cache: KvCache, sources: Tensor, dests: Tensor) -> None:
        """In one kernel, a group at a time."""
        copy_slots(cache.keys, cache.values, sources, dests, cache.scales)

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Nothing: a graph reads lengths from the device."""


def _launches(segments: Segments) -> list[Segments]:
    """The same once for each length of tiles, the wide ones first."""
    wide = segments.wide_tiles
    if wide is None:
        return [segments]
    as_tiles = replace(
        segments, tile_segments=wide.segments, tile_offsets=wide.offsets, tile_len=wide.tile_len, wide_tiles=None
    )
    return [as_tiles, segments] if len(segments.tile_segments) else [as_tiles]
