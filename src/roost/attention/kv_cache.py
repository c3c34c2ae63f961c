"""KV cache and page table of a book.

Positions become slots here and nowhere else. Entries of a row change only by a plan's deltas. The target's layers of a
book and a drafter's have KV caches of their own, indexed by one page table. Never knows who owns a page. Called by the
runner, the forward passes and drafters.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from roost.config.resolved import Resolved
from roost.device.device import Device
from roost.errors import InvariantError
from roost.kv.pages import Book
from roost.layers.quantised_kv import SCALE_DTYPE
from roost.layers.rounds import Pages
from roost.models.model import KvShape
from roost.step import TableDelta


def book_of(kv: KvShape, books: Sequence[Book]) -> int:
    """The book whose pages a layer's KV lies in."""
    is_replayed = kv.recurs is not None
    for number, book in enumerate(books):
        if book.is_replayed == is_replayed and (is_replayed or book.window == kv.window):
            return number
    raise InvariantError(f"books {books} do not serve a layer with KV like {kv}")


class PageTable:
    """The page table of one book: for each row the pages of its positions."""

    def __init__(self, resolved: Resolved, book: int, device: Device) -> None:
        self._device = device
        self.page_size = resolved.page_size
        self.window = resolved.books[book].window
        self.is_replayed = resolved.books[book].is_replayed
        self.num_slots = resolved.books[book].num_pages * self.page_size
        self.row_width = resolved.row_width
        pages_per_row = self.row_width // self.page_size
        num_rows = resolved.num_rows + 1  # the last is the padding row: all of it is the null page
        self.pages = torch.zeros((num_rows, pages_per_row), dtype=torch.int32, device=device.torch)

    def apply(self, delta: TableDelta) -> None:
        """Change the entries that a plan says have changed."""
        if not len(delta.pages):
            return
        lengths = np.diff(delta.offsets)
        rows = np.repeat(delta.rows, lengths)
        indices = np.arange(len(delta.pages)) + np.repeat(delta.firsts - delta.offsets[:-1], lengths)
        entries = rows.astype(np.int64) * self.pages.shape[1] + indices
        sent = self._device.send({"entries": entries, "pages": delta.pages})
        self.pages.view(-1)[sent["entries"]] = sent["pages"].to(torch.int32)

    @property
    def of_rounds(self) -> Pages:
        """The same as `Ops` take it."""
        return Pages(table=self.pages, size=self.page_size)

    def slots(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Slots of some positions, each in its row."""
        return self.of_rounds.slots(rows, positions)


class LayerKv(NamedTuple):
    """One layer of a KV cache."""

    keys: Tensor  # [num_slots, num_kv_heads, head_dim]; where there are no values, what is read in place of attention
    values: Tensor
    scales: Tensor | None  # [num_kv_heads, 2, num_slots], of keys and of values; None: they are not quantised


class KvCache:
    """Keys and values of some layers, in slots that one page table gives out; quantised ones with their scales."""

    def __init__(self, table: PageTable, layers: Sequence[KvShape]) -> None:
        if len(set(layers)) != 1:
            raise InvariantError(f"layers of one book must have KV of one shape, got {set(layers)}")
        self.table = table
        self.kv = kv = layers[0]
        shape = (len(layers), table.num_slots, kv.num_kv_heads, kv.head_dim)
        device = table.pages.device
        self.keys = torch.empty(shape, dtype=kv.dtype, device=device)  # a slot is written before it is read
        self.values = torch.empty((*shape[:-1], kv.head_dim * kv.has_values), dtype=kv.dtype, device=device)
        # Attention reads one head's scales of many slots: those lie side by side.
        lines = (len(layers), kv.num_kv_heads, 2, table.num_slots)
        self.scales = torch.empty(lines, dtype=SCALE_DTYPE, device=device) if kv.is_quantised else None

    def copy(self, sources: Tensor, dests: Tensor) -> None:
        """Copy slots, all layers, with their scales: every source is read before any slot is written."""
        for buffer in (self.keys, self.values):
            buffer[:, dests.flatten()] = buffer[:, sources.flatten()]
        if self.scales is not None:
            self.scales[..., dests.flatten()] = self.scales[..., sources.flatten()]

    def layer(self, index: int) -> LayerKv:
        """One of its layers."""
        return LayerKv(self.keys[index], self.values[index], None if self.scales is None else self.scales[index])
