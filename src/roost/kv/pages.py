"""Pages of the KV cache (PagedAttention blocks): ids, arithmetic, and the books they are pooled in.

A book is one KV pool with its own page ids: one for full-attention and draft layers, another for sliding-window layers
or for the inputs of recurrent ones, whose states are in a pool of their own. Imported by everything in kv; imports
nothing of Roost.
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
    # it keeps inputs of recurrent layers, of which a sequence needs those since its last state, `window` at most
    is_replayed: bool = False

    @property
    def name(self) -> str:
        """What it is called in statistics."""
        if self.is_replayed:
            return "inputs"
        return "full" if self.window is None else "window"

    @property
    def is_sliding(self) -> bool:
        """Whether it is of layers with a sliding window."""
        return self.window is not None and not self.is_replayed

    def first_needed(self, length: int, page_size: int) -> int:
        """First position whose KV a sequence of `length` tokens needs to continue, rounded down to its page."""
        if self.window is None:
            return 0
        return floor_to(max(0, length - self.window), page_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class StatePool:
    """The states of recurrent layers: a page is the state of all of them at one position, written once.

    The state at position p is what the tokens before p have left.
    """

    num_pages: int  # the null page included
    interval: int  # of tokens: a running sequence keeps its state at multiples of it
    spacing: int  # of tokens: so far apart, or more, are the states that a long prompt leaves in the prefix cache
    num_turns: int  # ends of its last turns whose states a session keeps

    @property
    def name(self) -> str:
        """What it is called in statistics."""
        return "states"

    @staticmethod
    def interval_of(page_size: int, wanted: int) -> int:
        """An interval of about so many tokens, so that every page's end, or every interval's, is one of the other's."""
        if page_size <= wanted:
            return ceil_to(wanted, page_size)
        return max(step for step in range(1, wanted + 1) if page_size % step == 0)
