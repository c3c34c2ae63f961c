"""The Triton backend: one kernel for decoding, chunks, trees and branches.

Led by lengths that only the device knows, so nothing is planned on the host and nothing waits. Called by the runner and
drafters.
"""

import numpy as np
import torch
from torch import Tensor

from roost.attention.kv_cache import Pool, Table
from roost.attention.protocol import Branched, Read, Runs
from roost.device.device import Device
from roost.kernels.attention import num_splits, paged_attention
from roost.kernels.copy import copy_slots
from roost.kernels.rope import rope_write
from roost.layers.rotary import CosSin
from roost.layers.spans import Masks, Shifts, Spans
from roost.models.model import KvShape


class TritonAttention:
    """Attention in Triton."""

    def __init__(self, device: Device) -> None:
        self._num_processors = device.num_processors

    def read(self, table: Table, runs: Runs, kv: KvShape) -> Read:
        """What runs read: what is before each token, or what its tree says."""
        sent, masks = runs.cut.sent, None
        if runs.trees is not None:
            masks = Masks(of_span=sent["tree_of"], depths=runs.trees.depths, sees=runs.trees.sees)
        spans = Spans(
            rows=runs.rows,
            offsets=sent["offsets"],
            widths=sent["widths"],
            starts=runs.starts,
            tile_spans=sent["tile_spans"],
            tile_firsts=sent["tile_firsts"],
            tile_len=runs.cut.tile_len,
            masks=masks,
        )
        return self._reading(table, spans, kv.scale)

    def read_branches(self, table: Table, branched: Branched, kv: KvShape) -> Read:
        """A branch is a token whose prefix lies at the row's start, and the rest at its own pages."""
        topk, size, device = branched.shape.topk, table.page_size, branched.rows.device
        last = branched.lengths % size
        stride = (last + branched.shape.steps + size - 1) // size * size
        branch = torch.arange(topk, device=device)
        number = torch.arange(len(branched.rows) * topk, dtype=torch.int32, device=device)
        spans = Spans(
            rows=_each(branched.rows, topk),
            offsets=number,
            widths=torch.ones_like(number),
            starts=_each(branched.lengths + branched.step, topk),
            tile_spans=number,
            tile_firsts=torch.zeros_like(number),
            tile_len=1,
            shifts=Shifts(bases=_each(branched.lengths - last, topk), shifts=(stride[:, None] * branch).flatten()),
        )
        return self._reading(table, spans, kv.scale)

    def write(self, pool: Pool, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """In one kernel."""
        return rope_write(qk, value, *cos_sin, slots, pool.keys[layer], pool.values[layer])

    def copy(self, pool: Pool, sources: Tensor, dests: Tensor) -> None:
        """In one kernel, a group at a time."""
        copy_slots(pool.keys, pool.values, sources, dests)

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Nothing: a graph reads lengths from the device."""

    def _reading(self, table: Table, spans: Spans, scale: float) -> Read:
        keys_max = table.pages.shape[1] * table.page_size
        if table.window is not None:
            keys_max = min(keys_max, table.window)

        def read(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            splits = num_splits(len(spans.tile_spans), keys.shape[1], self._num_processors, keys_max)
            return paged_attention(
                query,
                keys,
                values,
                table.pages,
                spans,
                page_size=table.page_size,
                window=table.window,
                scale=scale,
                num_splits=splits,
            )

        return read


def _each(values: Tensor, number: int) -> Tensor:
    """Every value so many times, one after the other."""
    return values[:, None].expand(-1, number).flatten().contiguous()  # of one value, it would have no stride
