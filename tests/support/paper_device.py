"""Paper device: a mock device that records what each KV slot of each page was last written with.

Runs launched steps in order, through the pages each row had at its launch, as a device would. A step that reads a slot
with the wrong tokens in it raises there. Knows nothing of leases but their pages, and nothing of the tree.
"""

from dataclasses import dataclass, field

import numpy as np

from roost.kv.lease import Lease
from roost.kv.pages import NULL_PAGE, Book, BookId, PageId
from roost.session.record import key_of
from roost.step import StepId

ACCEPT_MAX = 3  # most tokens a round adds
Written = tuple[str, tuple[int, ...], tuple[int, ...]]  # name space, tokens and key entries up to and with the slot
GARBAGE: Written = ("garbage", (), ())


@dataclass(slots=True, kw_only=True, eq=False)
class Talk:
    """One sequence: what the host knows of it, and what its row on the device has."""

    lease: Lease
    tokens: list[int]
    prefill_len: int
    shared_key: tuple[int, ...]  # what its shared pages stand for, if they were not cut off since
    commit_len: int = 0
    can_roll_back: bool = True  # it began at its commit point or before: the window there stays with it
    running: bool = True
    table: list[list[PageId]] = field(default_factory=list)  # on the device: its row, per book
    row: list[int] = field(default_factory=list)  # on the device: the tokens so far, the last one not written yet

    @property
    def shared_prefix(self) -> tuple[str, tuple[int, ...]]:
        """Cache salt and key of what it shares with the tree."""
        return self.lease.scoped_salt, self.shared_key[: self.lease.shared_len]

    @property
    def may_publish(self) -> bool:
        """A running turn of a session publishes nothing past its commit point."""
        return not self.running or self.commit_len == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """One row of one step."""

    step: StepId
    talk: Talk
    epoch: int
    pages: list[list[PageId]]  # per book, as the row had them at launch
    chunk: int  # tokens of a prefill chunk; 0 for a round
    tokens: tuple[int, ...]  # chunk: everything up to the token after it; round: what it accepts, bonus last

    @property
    def width(self) -> int:
        """Slots it may write."""
        return self.chunk or ACCEPT_MAX


def entries(tokens: list[int], pair: bool) -> tuple[int, ...]:
    """Key entries of some tokens, as plain numbers."""
    return tuple(key_of(np.array(tokens, dtype=np.int32), pair).tolist())


class Paper:
    """Slots of every book."""

    def __init__(self, page_size: int, books: tuple[Book, ...], pair: bool) -> None:
        self._page_size = page_size
        self._books = books
        self._pair = pair
        self._slots: dict[tuple[BookId, PageId, int], Written] = {}

    def run(self, launch: Launch) -> None:
        """Read what the row sees, then write its tokens; a round also leaves rejected drafts behind them."""
        row = launch.talk.row
        if launch.chunk:
            row[:] = launch.tokens
            first = len(row) - 1 - launch.chunk
        else:
            first = len(row) - 1
            row.extend(launch.tokens)
        self._check_reads(launch, first)
        keys, cache_salt = entries(row, self._pair), launch.talk.lease.scoped_salt
        for position in range(first, len(row) - 1):
            self._write(launch, position, (cache_salt, tuple(row[: position + 1]), keys[: position + 1]))
        for position in range(len(row) - 1, first + launch.width):
            self._write(launch, position, GARBAGE)

    def ruin(self, launch: Launch) -> None:
        """A step that breaks leaves garbage wherever it may have written."""
        first = len(launch.tokens) - 1 - launch.chunk if launch.chunk else len(launch.talk.row) - 1
        if launch.chunk:
            launch.talk.row[:] = launch.tokens
        for position in range(first, first + launch.width):
            self._write(launch, position, GARBAGE)

    def stands_for(self, book: BookId, page: PageId, cache_salt: str, key: tuple[int, ...]) -> bool:
        """Whether a page holds the last page of `key`, slot for slot."""
        start = len(key) - self._page_size
        for offset in range(self._page_size):
            written = self._slots.get((book, page, offset), GARBAGE)
            if written[0] != cache_salt or written[2] != key[: start + offset + 1]:
                return False
        return True

    def _write(self, launch: Launch, position: int, written: Written) -> None:
        for book, pages in enumerate(launch.pages):
            page = pages[position // self._page_size]
            assert page != NULL_PAGE, (launch, book, position)
            self._slots[book, page, position % self._page_size] = written

    def _check_reads(self, launch: Launch, length: int) -> None:
        """Every slot that the token at `length` sees holds this row's tokens."""
        row, cache_salt = launch.talk.row, launch.talk.lease.scoped_salt
        for number, book in enumerate(self._books):
            first = 0 if book.window is None else max(0, length - book.window + 1)
            for position in range(first, length):
                page = launch.pages[number][position // self._page_size]
                found = self._slots.get((number, page, position % self._page_size), GARBAGE)
                assert found[:2] == (cache_salt, tuple(row[: position + 1])), (launch, number, position, page, found)
