"""Pages of the KV cache (PagedAttention blocks): ids, arithmetic, and the books they are pooled in.

A book is one KV pool with its own page ids: one for full-attention and draft layers, another for sliding-window layers.
Imported by everything in kv; imports nothing of Roost.
"""

from dataclasses import dataclass
from typing import NewType

PageId = NewType("PageId", int)
BookId = int

NULL_PAGE = PageId(0)  # padding writes go here; in a block table it marks an entry that is not held


def ceil_div(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def ceil_to(length: int, page_size: int) -> int:
    """`length` rounded up to whole pages."""
    return -(-length // page_size) * page_size


def floor_to(length: int, page_size: int) -> int:
    """`length` rounded down to whole pages."""
    return length // page_size * page_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Book:
    """One KV pool: its size, and the sliding window of its layers (None: full attention)."""

    num_pages: int  # the null page included
    window: int | None = None

    def first_needed(self, length: int, page_size: int) -> int:
        """First position whose KV a sequence of `length` tokens needs to continue, rounded down to its page."""
        if self.window is None:
            return 0
        return floor_to(max(0, length - self.window), page_size)
