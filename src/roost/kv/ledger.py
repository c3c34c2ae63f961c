"""Page ledger: the allocator of KV cache pages, and the one place that knows who owns each page.

Every page has one account. A move names the account it takes pages from; if that is wrong the call raises and nothing
has moved. Pages that a step in flight may still touch retire before they are free. Never sees tensors, tokens or time.
Called by the store and the prefix tree, on the engine thread.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from enum import IntEnum
from typing import NewType

from roost.errors import InvariantError, RoostError
from roost.kv.pages import NULL_PAGE, Book, BookId, PageId, StatePool
from roost.step import StepId

Account = NewType("Account", int)  # an owner's number and, in the low two bits, its kind


class Owner(IntEnum):
    """The kinds of owners a page may have."""

    LEASE = 1
    NODE = 2  # of the prefix tree
    STEP = 3  # that is in flight: the page retires


_LEASED, _CACHED, _RETIRING = Owner
_OWNERS = {int(owner): owner for owner in Owner}
FREE = Account(0)
NULL_ACCOUNT = Account(4)

_MOVES_KEPT = 64


def leased(lease_id: int) -> Account:
    """The account of a lease's own pages."""
    return Account(lease_id << 2 | _LEASED)


def cached(node_id: int) -> Account:
    """The account of a prefix-tree node's pages."""
    return Account(node_id << 2 | _CACHED)


def retiring(step: StepId) -> Account:
    """The account of released pages that a step in flight may still touch."""
    return Account(step << 2 | _RETIRING)


def owner_of(account: Account) -> tuple[Owner, int]:
    """The kind and number of the owner of a page that is not free."""
    return _OWNERS[account & 3], account >> 2


def describe(account: Account) -> str:
    """An account in words, for error messages."""
    if account in (FREE, NULL_ACCOUNT):
        return "free" if account == FREE else "null page"
    owner, number = owner_of(account)
    kind = {_LEASED: "leased by lease", _CACHED: "cached by node", _RETIRING: "retiring until step"}[owner]
    return f"{kind} {number}"


class OutOfPages(RoostError):
    """A book has fewer free pages than requested; nothing has moved."""

    def __init__(self, book: BookId, need: int, free: int) -> None:
        super().__init__(f"book {book}: {need} pages needed, {free} free")
        self.book = book
        self.need = need


class Ledger:
    """Accounts of every page of every book."""

    def __init__(self, books: Sequence[Book | StatePool]) -> None:
        self._accounts = [[NULL_ACCOUNT] + [FREE] * (book.num_pages - 1) for book in books]
        self._free = [[PageId(page) for page in range(book.num_pages - 1, NULL_PAGE, -1)] for book in books]
        self._retired: deque[tuple[StepId, BookId, list[PageId]]] = deque()
        self._num_retiring = [0] * len(books)
        self._collected = StepId(-1)
        self._touched: list[set[PageId]] | None = None  # per book, pages that have moved, while somebody watches
        self._moves: deque[tuple[BookId, Account, Account, tuple[PageId, ...]]] = deque(maxlen=_MOVES_KEPT)

    @property
    def collected(self) -> StepId:
        """The last collected step; later steps may still touch pages."""
        return self._collected

    def num_free(self, book: BookId) -> int:
        """Number of pages that can be taken now."""
        return len(self._free[book])

    def num_retiring(self, book: BookId) -> int:
        """Number of pages that become free once the steps in flight are collected."""
        return self._num_retiring[book]

    def accounts(self, book: BookId) -> Iterator[tuple[PageId, Account]]:
        """Every page of a book with its account."""
        return ((PageId(page), account) for page, account in enumerate(self._accounts[book]))

    def free_pages(self, book: BookId) -> list[PageId]:
        """The free pages, in no particular order."""
        return list(self._free[book])

    def accounts_of(self, book: BookId, pages: Sequence[PageId]) -> list[Account]:
        """The accounts of some pages."""
        return [self._accounts[book][page] for page in pages]

    def watch(self, *, is_on: bool = True) -> list[set[PageId]]:
        """Pages that move from now on, per book: the sets grow until the next call."""
        touched: list[set[PageId]] = [set() for _ in self._accounts]
        self._touched = touched if is_on else None
        return touched

    def take(self, book: BookId, count: int, dest: Account) -> list[PageId]:
        """Move `count` free pages to `dest`."""
        free = self._free[book]
        if count > len(free):
            raise OutOfPages(book, count, len(free))
        pages = free[len(free) - count :]
        self.move(book, pages, FREE, dest)
        del free[len(free) - count :]
        return pages

    def move(self, book: BookId, pages: Sequence[PageId], source: Account, dest: Account) -> None:
        """Change the account of pages that `source` holds; all of them or none."""
        accounts = self._accounts[book]
        for page in pages:
            if accounts[page] != source:
                raise InvariantError(self._complaint(book, page, source, dest))
        self._moves.append((book, source, dest, tuple(pages)))
        if self._touched is not None:
            self._touched[book].update(pages)
        for page in pages:
            accounts[page] = dest

    def release(self, book: BookId, pages: Sequence[PageId], source: Account, last_step: StepId) -> None:
        """Give pages back: free at once, or retiring while the last step that names them is in flight."""
        if not pages:
            return
        if len(set(pages)) != len(pages):
            raise InvariantError(
                f"a page is released twice in one call: {list(pages)}; last moves:\n{self.last_moves()}"
            )
        if last_step <= self._collected:
            self.move(book, pages, source, FREE)
            self._free[book].extend(pages)
            return
        self.move(book, pages, source, retiring(last_step))
        self._retired.append((last_step, book, list(pages)))
        self._num_retiring[book] += len(pages)

    def reclaim(self, step: StepId) -> None:
        """A step was collected: pages that were retiring until it, or until an earlier one, become free."""
        self._collected = step
        for _ in range(len(self._retired)):
            last_step, book, pages = self._retired.popleft()
            if last_step > step:
                self._retired.append((last_step, book, pages))
                continue
            self.move(book, pages, retiring(last_step), FREE)
            self._free[book].extend(pages)
            self._num_retiring[book] -= len(pages)

    def last_moves(self) -> str:
        """The last moves, oldest first, for error messages."""
        return "\n".join(
            f"  book {book}: {describe(source)} -> {describe(dest)}: {list(pages)}"
            for book, source, dest, pages in self._moves
        )

    def _complaint(self, book: BookId, page: PageId, source: Account, dest: Account) -> str:
        found = self._accounts[book][page]
        return (
            f"page {page} of book {book} cannot go to '{describe(dest)}': expected '{describe(source)}', "
            f"found '{describe(found)}'; last moves:\n{self.last_moves()}"
        )
