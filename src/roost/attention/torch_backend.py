"""The torch backend: reads are planned on the host, from lengths that it is told.

Runs anywhere, and is the default on CPUs; every other backend is checked against it. Called by the forward passes and
drafters.
"""

import numpy as np
from torch import Tensor

from roost.attention.kv_cache import KvCache, LayerKv, PageTable
from roost.attention.protocol import ReadKv
from roost.device.device import Device
from roost.errors import InvariantError
from roost.layers.attention import paged_attention, plan_reads
from roost.layers.quantised_kv import quantise
from roost.layers.rotary import CosSin, rotate
from roost.layers.segments import Segments
from roost.models.model import KvShape


class TorchAttention:
    """Attention in plain torch."""

    def __init__(self, device: Device) -> None:
        """Nothing to prepare: reads are planned step by step."""

    def read(self, table: PageTable, segments: Segments, kv: KvShape) -> ReadKv:
        """Row by row, or rows of like length together."""
        if segments.host is None:
            raise InvariantError("the torch backend needs the rows' lengths on the host")
        size, window, head_dim = table.page_size, table.window, kv.head_dim
        groups = plan_reads(table.pages, segments, page_size=size, window=window, head_dim=head_dim)

        def read(query: Tensor, layer: LayerKv, sinks: Tensor | None = None) -> Tensor:
            keys, values, scales = layer
            return paged_attention(query, keys, values, groups, scale=kv.scale, scales=scales, sinks=sinks)

        return read

    def write(self, cache: KvCache, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """Queries and keys rotated together."""
        num_kv_heads = value.shape[1]
        query, key = rotate(qk, cos_sin).split((qk.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        if cache.scales is not None:
            key, key_scales = quantise(key, cache.kv.dtype)
            value, value_scales = quantise(value, cache.kv.dtype)
            cache.scales[layer, :, 0, slots] = key_scales.t()
            cache.scales[layer, :, 1, slots] = value_scales.t()
        cache.keys[layer, slots] = key
        cache.values[layer, slots] = value
        return query

    def rotate(self, query: Tensor, cos_sin: CosSin) -> Tensor:
        """As a model's layers do."""
        return rotate(query, cos_sin)

    def copy(self, cache: KvCache, sources: Tensor, dests: Tensor) -> None:
        """All groups at once."""
        cache.copy(sources, dests)

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Never called: its steps are not captured."""
