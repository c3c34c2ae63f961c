"""The torch backend: reads are planned on the host, from lengths that it is told.

Runs anywhere, and is the default on CPUs; every other backend is held against it. Called by the runner and drafters.
"""

import numpy as np
from torch import Tensor

from roost.attention.kv_cache import Pool, Table
from roost.attention.protocol import Branched, Read, Runs
from roost.device.device import Device
from roost.errors import InvariantError
from roost.layers.attention import Span, Tree, paged_attention, plan_branch_reads, plan_reads
from roost.layers.rotary import CosSin, rotate
from roost.models.model import KvShape


class TorchAttention:
    """Attention in plain torch."""

    def __init__(self, device: Device) -> None:
        """Nothing to prepare: reads are planned step by step."""

    def read(self, table: Table, runs: Runs, kv: KvShape) -> Read:
        """What is read, row by row, or rows of like length together."""
        size, window = table.page_size, table.window
        reads = plan_reads(table.pages, _spans(runs), page_size=size, window=window, head_dim=kv.head_dim)
        return lambda query, keys, values: paged_attention(query, keys, values, reads, scale=kv.scale)

    def read_branches(self, table: Table, branched: Branched, kv: KvShape) -> Read:
        """The prefix, and each branch's own pages."""
        if branched.starts_host is None:
            raise InvariantError("the torch backend needs the rows' lengths on the host")
        size, rows = table.page_size, branched.rows_host
        branches = [branched.shape.branches(start, size) for start in branched.starts_host]
        reads = plan_branch_reads(table.pages, rows, branches, branched.step, page_size=size, head_dim=kv.head_dim)
        return lambda query, keys, values: paged_attention(query, keys, values, reads, scale=kv.scale)

    def write(self, pool: Pool, layer: int, slots: Tensor, qk: Tensor, value: Tensor, cos_sin: CosSin) -> Tensor:
        """Queries and keys rotated together."""
        num_kv_heads = value.shape[1]
        query, key = rotate(qk, cos_sin).split((qk.shape[1] - num_kv_heads, num_kv_heads), dim=1)
        pool.keys[layer, slots] = key
        pool.values[layer, slots] = value
        return query

    def copy(self, pool: Pool, sources: Tensor, dests: Tensor) -> None:
        """All groups at once: every source is read before any slot is written."""
        for buffer in (pool.keys, pool.values):
            buffer[:, dests.flatten()] = buffer[:, sources.flatten()]

    def before_replay(
        self, graph: str, rows: np.ndarray, query_lens: np.ndarray, start_positions: np.ndarray | None
    ) -> None:
        """Never called: its steps are not captured."""


def _spans(runs: Runs) -> list[Span]:
    """The runs as the host plans them."""
    if runs.starts_host is None:
        raise InvariantError("the torch backend needs the rows' lengths on the host")
    cut, trees = runs.cut, runs.trees
    columns = np.stack([runs.rows_host, cut.offsets, cut.widths, runs.starts_host], axis=1).tolist()
    spans = []
    for (row, offset, width, start), is_round, number in zip(
        columns, cut.is_round.tolist(), cut.tree_of.tolist(), strict=True
    ):
        tree = None
        if is_round and width > 1 and trees is not None:
            tree = Tree(depths=trees.depths[number, :width], sees=trees.sees[number, :width, :width])
        spans.append(Span(row=row, offset=offset, width=width, start=start, is_round=is_round, tree=tree))
    return spans
