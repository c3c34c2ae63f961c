"""Node of the prefix tree (radix tree): a run of whole cached pages.

Plain data; only the tree changes it. The run covers positions [start, end) of every sequence that goes through it.
"""

from dataclasses import dataclass, field
from typing import NewType

import numpy as np
from numpy.typing import NDArray

from roost.kv.pages import NULL_PAGE, BookId, PageId
from roost.step import StepId

NodeId = NewType("NodeId", int)
Key = NDArray[np.int64]  # one entry per KV slot: the token, or the pair (token, next token)


@dataclass(slots=True, kw_only=True, eq=False)
class Node:
    """One run of cached pages. A root has no pages and no parent."""

    id: NodeId
    scoped_salt: str
    parent: "Node | None" = field(repr=False)
    start: int
    key: Key = field(repr=False)
    pages: list[list[PageId]]  # per book; NULL_PAGE where a window page has been evicted
    children: dict[bytes, "Node"] = field(default_factory=dict, repr=False)  # by the key of their first page
    pins: int = 0  # leases that share this node
    window_pins: int = 0  # leases that still read its window pages
    state: PageId = NULL_PAGE  # of recurrent layers, at its end; the null page: none
    state_pins: int = 0  # leases that may go on from that state
    last_used: int = 0
    last_step: StepId = StepId(-1)  # last step of any lease that pinned it: it may still read the pages

    @property
    def end(self) -> int:
        """First position past the run."""
        return self.start + len(self.key)

    def held(self, book: BookId) -> list[PageId]:
        """The pages it still holds in a book."""
        return [page for page in self.pages[book] if page != NULL_PAGE]

    def num_held(self, book: BookId) -> int:
        """Number of pages it still holds in a book."""
        return len(self.pages[book]) - self.pages[book].count(NULL_PAGE)

    def path_pages(self, book: BookId) -> list[PageId]:
        """Pages of a book along the path that ends here."""
        runs = []
        walk: Node | None = self
        while walk is not None:
            runs.append(walk.pages[book])
            walk = walk.parent
        return [page for run in reversed(runs) for page in run]

    def is_empty(self) -> bool:
        """Whether it holds no page of any book, and no state."""
        return self.state == NULL_PAGE and not any(page != NULL_PAGE for pages in self.pages for page in pages)
