"""Shelf: a flat reference model of the prefix cache, without a tree.

One entry per cached page, by name space and the whole key up to the page's end; and when each such prefix was last
used. Predicts matches by scanning, publishing by looking up, and eviction by always picking the oldest.
"""

from dataclasses import dataclass

from roost.kv.lease import Lease
from roost.kv.node import Node, NodeId
from roost.kv.pages import NULL_PAGE, Book, BookId, PageId
from roost.kv.radix import PrefixTree

Prefix = tuple[str, tuple[int, ...]]  # name space, key entries


@dataclass(slots=True, kw_only=True)
class Place:
    """A node of the tree as eviction sees it."""

    parent: NodeId
    prefixes: list[Prefix]
    used: int
    pinned: bool
    num_pages: int


def key_to(node: Node) -> tuple[int, ...]:
    """The whole key from the root to a node's end."""
    runs, walk = [], node
    while walk.parent is not None:
        runs.append(walk.key.tolist())
        walk = walk.parent
    return tuple(entry for run in reversed(runs) for entry in run)


class Shelf:
    """What the tree must hold."""

    def __init__(self, page_size: int, books: tuple[Book, ...]) -> None:
        self._page_size = page_size
        self._books = books
        self.held: list[dict[Prefix, PageId]] = [{} for _ in books]
        self.used: dict[Prefix, int] = {}

    def _whole_pages(self, key: tuple[int, ...]) -> int:
        return len(key) // self._page_size

    def _prefix(self, cache_salt: str, key: tuple[int, ...], index: int) -> Prefix:
        return cache_salt, key[: (index + 1) * self._page_size]

    def prefixes(self, cache_salt: str, key: tuple[int, ...]) -> list[Prefix]:
        """One prefix per whole page of a key."""
        return [self._prefix(cache_salt, key, index) for index in range(self._whole_pages(key))]

    def _needed(self, book: BookId, num_pages: int) -> range:
        """Page indexes that a continuation from `num_pages` whole pages reads."""
        window = self._books[book].window
        first = 0 if window is None else max(0, num_pages * self._page_size - window) // self._page_size
        return range(first, num_pages)

    def longest(self, cache_salt: str, key: tuple[int, ...]) -> tuple[int, list[list[PageId]]]:
        """Slots of the longest usable prefix, and the pages it needs in each book (NULL_PAGE before its window)."""
        for num_pages in range(self._whole_pages(key), 0, -1):
            pages = []
            for book, held in enumerate(self.held):
                needed = self._needed(book, num_pages)
                found = [held.get(self._prefix(cache_salt, key, index), NULL_PAGE) for index in needed]
                pages.append([NULL_PAGE] * needed.start + found)
                if NULL_PAGE in found:
                    break
            else:
                return num_pages * self._page_size, pages
        return 0, [[] for _ in self._books]

    def publish(self, cache_salt: str, key: tuple[int, ...], first: int, rows: list[list[PageId]], now: int) -> None:
        """Take pages of `rows` from index `first` on, in place; where the shelf has one, it enters the row."""
        for index in range(first, self._whole_pages(key)):
            prefix = self._prefix(cache_salt, key, index)
            self.used[prefix] = max(self.used.get(prefix, 0), now)
            for held, row in zip(self.held, rows, strict=True):
                if row[index] != NULL_PAGE:
                    row[index] = held.setdefault(prefix, row[index])

    def touch(self, cache_salt: str, key: tuple[int, ...], now: int) -> None:
        """A lease on this prefix went away."""
        for prefix in self.prefixes(cache_salt, key):
            self.used[prefix] = max(self.used[prefix], now)

    def forget(self, shared: list[Prefix]) -> None:
        """Drop the times of prefixes that lead to no held page and to no lease's shared end."""
        ends = {prefix for held in self.held for prefix in held} | set(shared)
        alive = {prefix for end in ends for prefix in self.prefixes(*end)}
        self.used = {prefix: used for prefix, used in self.used.items() if prefix in alive}

    # --- eviction ----------------------------------------------------------------------------------------------

    def places(self, tree: PrefixTree, leases: list[Lease], book: BookId) -> dict[NodeId, Place]:
        """Every node, with the model's idea of its age and of who pins it."""
        pinned: set[NodeId] = set()
        for lease in leases:
            first = lease.pinned_from if self._books[book].window is not None else 0
            walk: Node | None = lease.node
            while walk is not None and walk.end > first:
                pinned.add(walk.id)
                walk = walk.parent
        return {node.id: self._place(node, book, node.id in pinned) for node in tree.nodes.values()}

    def _place(self, node: Node, book: BookId, pinned: bool) -> Place:
        assert node.parent is not None
        prefixes = self.prefixes(node.scoped_salt, key_to(node))[node.start // self._page_size :]
        ages = {self.used[prefix] for prefix in prefixes}
        assert len(ages) == 1, (node, ages)
        num_pages = sum(prefix in self.held[book] for prefix in prefixes)
        return Place(parent=node.parent.id, prefixes=prefixes, used=ages.pop(), pinned=pinned, num_pages=num_pages)

    def evict(self, places: dict[NodeId, Place], book: BookId, count: int, gone: set[NodeId]) -> None:
        """Take the oldest unpinned nodes (leaves, in a full book) until `count` pages are out: exactly `gone`."""
        left, taken, freed = dict(places), set(), 0
        wanted = min(count, sum(place.num_pages for place in places.values() if not place.pinned))
        while freed < wanted:
            parents = set() if self._books[book].window is not None else {place.parent for place in left.values()}
            free_to_go = {
                number: place
                for number, place in left.items()
                if not place.pinned and place.num_pages and number not in parents
            }
            oldest = min(place.used for place in free_to_go.values())
            ties = [number for number, place in free_to_go.items() if place.used == oldest]
            victim = next((number for number in ties if number in gone), None)
            assert victim is not None, f"the oldest, {ties}, stay; {gone} go"
            freed += left[victim].num_pages
            taken.add(victim)
            self._take_away(left.pop(victim), book)
        assert taken == gone

    def _take_away(self, place: Place, book: BookId) -> None:
        books = [book] if self._books[book].window is not None else range(len(self._books))
        for number in books:
            for prefix in place.prefixes:
                self.held[number].pop(prefix, None)
