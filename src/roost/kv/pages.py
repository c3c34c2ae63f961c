"""Page arithmetic and the books pages are kept in; the smallest words of the KV plane.

A book is one pool of pages with its own page ids: full-attention layers (and draft layers) in one, sliding-window
layers in another. Imported by everything in kv; imports nothing of Roost.
"""

from dataclasses import dataclass
from typing import NewType

PageId = NewType("PageId", int)
BookId = int

NULL_PAGE = PageId(0)  # padding writes go here; in a row it also marks "not held"


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
    """One pool: its size, and the window its layers see (None: everything)."""

    num_pages: int  # the null page included
    window: int | None = None

    def first_needed(self, length: int, page_size: int) -> int:
        """First position a sequence of `length` tokens still needs to go on, rounded down to its page."""
        if self.window is None:
            return 0
        return floor_to(max(0, length - self.window), page_size)
