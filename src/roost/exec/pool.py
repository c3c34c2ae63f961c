"""Page tables and KV buffers of a book.

Positions become slots here and nowhere else. Entries of a row change only by a plan's deltas. The target's layers of a
book and a drafter's have buffers of their own behind one table. Never knows who owns a page. Called by the runner and
by drafters, on the worker thread.
"""

import numpy as np
import torch
from torch import Tensor

from roost.config import Resolved
from roost.models.model import KvShape
from roost.step import TableDelta


class Table:
    """The page table of one book: for each row the pages of its positions."""

    def __init__(self, resolved: Resolved, book: int, device: torch.device) -> None:
        self.page_size = resolved.page_size
        self.window = resolved.books[book].window
        self.num_slots = resolved.books[book].num_pages * self.page_size
        pages_per_row = resolved.row_width // self.page_size
        self.pages = torch.zeros((resolved.num_rows, pages_per_row), dtype=torch.int32, device=device)

    def apply(self, delta: TableDelta) -> None:
        """Change the entries that a plan says have changed."""
        lengths = np.diff(delta.offsets)
        rows = np.repeat(delta.rows, lengths)
        indices = np.arange(len(delta.pages)) + np.repeat(delta.firsts - delta.offsets[:-1], lengths)
        device = self.pages.device
        entries = (torch.tensor(rows, device=device), torch.tensor(indices, device=device))
        self.pages[entries] = torch.tensor(delta.pages, device=device)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of some positions, each in its row."""
        pages = self.pages[rows, positions // self.page_size].to(torch.int64)
        return pages * self.page_size + positions % self.page_size


class Pool:
    """KV of some layers whose slots one table gives out."""

    def __init__(self, table: Table, num_layers: int, kv: KvShape) -> None:
        self.table = table
        shape = (num_layers, table.num_slots, kv.num_kv_heads, kv.head_dim)
        device = table.pages.device
        self.keys = torch.empty(shape, dtype=kv.dtype, device=device)  # a slot is written before it is read
        self.values = torch.empty(shape, dtype=kv.dtype, device=device)

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put a layer's KV [num_tokens, num_kv_heads, head_dim] into slots."""
        self.keys[layer, slots] = key
        self.values[layer, slots] = value

    def copy(self, sources: Tensor, dests: Tensor) -> None:
        """Copy whole slots, all layers; every source is read before any slot is written."""
        for buffer in (self.keys, self.values):
            buffer[:, dests] = buffer[:, sources]
