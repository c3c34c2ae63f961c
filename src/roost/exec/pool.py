"""Pool of one book: its KV buffers and its page table.

Positions become slots here and nowhere else. Entries of a row change only by a plan's deltas. Never knows who owns a
page. Called by the runner, on the worker thread.
"""

import numpy as np
import torch
from torch import Tensor

from roost.config import Resolved
from roost.models.model import KvShape
from roost.step import TableDelta


class Pool:
    """KV of one book's layers."""

    def __init__(self, resolved: Resolved, book: int, kv: KvShape, device: torch.device) -> None:
        self.page_size = resolved.page_size
        self.window = resolved.books[book].window
        num_slots = resolved.books[book].num_pages * self.page_size
        shape = (kv.windows.count(self.window), num_slots, kv.num_kv_heads, kv.head_dim)
        self.keys = torch.empty(shape, dtype=kv.dtype, device=device)  # a slot is written before it is read
        self.values = torch.empty(shape, dtype=kv.dtype, device=device)
        pages_per_row = resolved.row_width // self.page_size
        self.table = torch.zeros((resolved.num_rows, pages_per_row), dtype=torch.int32, device=device)

    def apply(self, delta: TableDelta) -> None:
        """Change the table entries that a plan says have changed."""
        lengths = np.diff(delta.offsets)
        rows = np.repeat(delta.rows, lengths)
        indices = np.arange(len(delta.pages)) + np.repeat(delta.firsts - delta.offsets[:-1], lengths)
        device = self.table.device
        entries = (torch.tensor(rows, device=device), torch.tensor(indices, device=device))
        self.table[entries] = torch.tensor(delta.pages, device=device)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of some positions, each in its row."""
        pages = self.table[rows, positions // self.page_size]
        return pages * self.page_size + positions % self.page_size

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Put a layer's KV [num_tokens, num_kv_heads, head_dim] into slots."""
        self.keys[layer, slots] = key
        self.values[layer, slots] = value
