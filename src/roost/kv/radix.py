"""Prefix cache: a radix tree from token prefixes to the KV pages that hold them.

Nodes are runs of whole pages, under one root per cache salt. Tokens (or token pairs) are compared, never hashes alone.
Matching changes nothing. Pinning protects a path from eviction, and separately the window pages, and the states of
recurrent layers, that a lease still reads; eviction is least recently used first. A state is at the end of a node. Owns
the cached pages and moves them only through the ledger. Called by the store.
"""

import heapq
from dataclasses import dataclass

import numpy as np

from roost.kv.lease import Lease
from roost.kv.ledger import Ledger, cached, leased
from roost.kv.node import Key, Node, NodeId
from roost.kv.pages import NULL_PAGE, Book, BookId, PageId, floor_to
from roost.kv.state_cache import HEAP_SLACK, StateCache


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """A prefix cache hit: the usable cached prefix of a key."""

    node: Node  # the node in which it ends
    length: int  # tokens, whole pages


def common_prefix(a: Key, b: Key) -> int:
    """Number of leading entries two keys share."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class PrefixTree:
    """The radix tree of all scoped salts."""

    def __init__(
        self, ledger: Ledger, page_size: int, books: tuple[Book, ...], state_book: BookId | None = None
    ) -> None:
        """`state_book`: the ledger's number of the pool of states, for models with recurrent layers."""
        self._ledger = ledger
        self._page_size = page_size
        self._books = books
        self._window = next((number for number, book in enumerate(books) if book.is_sliding), None)
        self._replayed = next((number for number, book in enumerate(books) if book.is_replayed), None)
        self._roots: dict[str, Node] = {}
        self._nodes: dict[NodeId, Node] = {}  # roots excluded
        self._next_id = 0
        self.num_pinned = 0  # how often a node has got its first pin
        self._num_evictable = [0] * len(books)
        # (last used, node); entries may be out of date and are checked when popped
        self._leaf_heap: list[tuple[int, NodeId]] = []
        self._window_heap: list[tuple[int, NodeId]] = []
        self.state_cache = None if state_book is None else StateCache(ledger, state_book, self._nodes)

    @property
    def nodes(self) -> dict[NodeId, Node]:
        """Every node by id, except the roots."""
        return self._nodes

    def num_evictable(self, book: BookId) -> int:
        """Number of cached pages that can be evicted now."""
        if self.state_cache is not None and book == self.state_cache.book:
            return self.state_cache.num_evictable
        return self._num_evictable[book]

    # --- reading -----------------------------------------------------------------------------------------------

    def match(self, scoped_salt: str, key: Key) -> Match | None:
        """The longest usable cached prefix of `key`, or None. Changes nothing."""
        path: list[tuple[Node, int]] = []  # (node, how many of its entries match)
        node, pos = self._roots.get(scoped_salt), 0
        while node is not None and len(key) - pos >= self._page_size:
            child = node.children.get(self._first_page(key, pos))
            if child is None:
                break
            taken = floor_to(common_prefix(key[pos:], child.key), self._page_size)
            path.append((child, taken))
            pos += taken
            node = child if taken == len(child.key) else None
        length = self._usable(path)
        if length == 0:
            return None
        return Match(node=[node for node, _ in path if node.start < length][-1], length=length)

    def _usable(self, path: list[tuple[Node, int]]) -> int:
        """Length of the longest prefix of a path whose last sliding window, or state, is still cached."""
        if self.state_cache is not None:
            ends = [node.end for node, taken in path if taken == len(node.key) and node.state != NULL_PAGE]
            return max(ends, default=0)
        if self._window is None:
            return sum(taken for _, taken in path)
        book, best, run, pos = self._books[self._window], 0, 0, 0
        for node, taken in path:
            for page in node.pages[self._window][: taken // self._page_size]:
                run = run + self._page_size if page != NULL_PAGE else 0
                pos += self._page_size
                if run >= pos - book.first_needed(pos, self._page_size):
                    best = pos
        return best

    def _first_page(self, key: Key, pos: int) -> bytes:
        return key[pos : pos + self._page_size].tobytes()

    # --- pins --------------------------------------------------------------------------------------------------

    def pin(self, scoped_salt: str, match: Match | None) -> Node:
        """Protect the path of a match from eviction for one lease; returns the node where it ends."""
        if match is None:
            node = self._root(scoped_salt)
        elif match.length < match.node.end:
            node = self._split(match.node, match.length)
        else:
            node = match.node
        walk: Node | None = node
        while walk is not None:
            self._pin_one(walk)
            walk = walk.parent
        return node

    def pin_window(self, lease: Lease, first: int) -> None:
        """Protect the window pages of a lease's shared prefix in [first, shared_len)."""
        for node in self._window_nodes(lease, first):
            self._window_pin_one(node)

    def unpin_window(self, lease: Lease) -> None:
        """The lease no longer reads the window pages of its shared prefix."""
        for node in self._window_nodes(lease, lease.pinned_from):
            self._window_unpin_one(node, lease)
        lease.pinned_from = lease.shared_len

    def unpin(self, lease: Lease, length: int, now: int) -> None:
        """Unpin the shared prefix of a lease past `length` (whole pages)."""
        while lease.shared_len > length:
            node = lease.node
            if node.start < length:
                self._split(node, length)  # the lower part keeps the id, and is the one to unpin
            if self._window is not None and node.start >= lease.pinned_from:
                self._window_unpin_one(node, lease)
            self._unpin_one(node, lease, now)
            assert node.parent is not None, node
            lease.node = node.parent
            lease.shared_len = node.start
            self._drop_if_empty(node)
        lease.pinned_from = min(lease.pinned_from, length)

    def leave(self, lease: Lease, now: int) -> None:
        """Unpin the root for a lease that is released and shares nothing any more."""
        assert lease.shared_len == 0, lease
        self._unpin_one(lease.node, lease, now)
        self._drop_root(lease.node)

    def _pin_one(self, node: Node) -> None:
        if node.pins == 0:
            self.num_pinned += 1
            for number, book in enumerate(self._books):
                if book.window is None:
                    self._num_evictable[number] -= len(node.pages[number])
        node.pins += 1

    def _unpin_one(self, node: Node, lease: Lease, now: int) -> None:
        assert node.pins > 0, node
        node.pins -= 1
        node.last_step = max(node.last_step, lease.last_step)  # a step in flight may still read these pages
        if node.pins == 0:
            for number, book in enumerate(self._books):
                if book.window is None:
                    self._num_evictable[number] += len(node.pages[number])
        self._touch(node, now)

    def _window_nodes(self, lease: Lease, first: int) -> list[Node]:
        """The nodes of a lease's shared prefix in [first, shared_len), split so that one begins at `first`."""
        nodes, node = [], lease.node
        while node.end > first:
            if node.start < first:
                self._split(node, first)
            nodes.append(node)
            assert node.parent is not None, node
            node = node.parent
        return nodes

    def _window_pin_one(self, node: Node) -> None:
        assert self._window is not None
        if node.window_pins == 0:
            self._num_evictable[self._window] -= len(node.held(self._window))
        node.window_pins += 1

    def _window_unpin_one(self, node: Node, lease: Lease) -> None:
        assert self._window is not None and node.window_pins > 0, node
        node.window_pins -= 1
        node.last_step = max(node.last_step, lease.last_step)  # likewise for the window pages
        if node.window_pins == 0:
            self._num_evictable[self._window] += len(node.held(self._window))
            self._offer(node)

    # --- growing -----------------------------------------------------------------------------------------------

    def publish(self, lease: Lease, key: Key, now: int) -> None:
        """Insert a lease's own pages below len(key) into the tree; where it has the same tokens, its pages are used."""
        node, pos = lease.node, lease.shared_len
        while pos < len(key):
            child = node.children.get(self._first_page(key, pos))
            if child is None:
                child = self._grow(node, key[pos:], lease)
                self._pin_one(child)
            else:
                taken = floor_to(common_prefix(key[pos:], child.key), self._page_size)
                if taken < len(child.key):
                    child = self._split(child, pos + taken)
                self._pin_one(child)
                self._use_instead(child, lease)
            self._touch(child, now)
            node, pos = child, child.end
        lease.node, lease.shared_len = node, pos

    def _grow(self, parent: Node, key: Key, lease: Lease) -> Node:
        """A new leaf with pages taken over from the lease."""
        first, last = parent.end // self._page_size, (parent.end + len(key)) // self._page_size
        node = Node(
            id=self._new_id(),
            scoped_salt=parent.scoped_salt,
            parent=parent,
            start=parent.end,
            key=key.copy(),
            pages=[pages[first:last] for pages in lease.pages],
        )
        if self._replayed is not None:  # inputs stay with who runs them again
            node.pages[self._replayed] = [NULL_PAGE] * (last - first)
        for number in range(len(self._books)):
            self._ledger.move(number, node.held(number), leased(lease.id), cached(node.id))
            self._num_evictable[number] += len(node.held(number))
        parent.children[self._first_page(node.key, 0)] = node
        self._nodes[node.id] = node
        self._offer(node)
        return node

    def _use_instead(self, node: Node, lease: Lease) -> None:
        """Replace a lease's pages by a node's pages for the same tokens; the lease's own are released."""
        first = node.start // self._page_size
        for number in range(len(self._books)):
            if number == self._replayed:
                continue
            own, theirs, released = lease.pages[number], node.pages[number], []
            for index, page in enumerate(theirs, start=first):
                if own[index] == NULL_PAGE:  # the lease's window has slid past it
                    continue
                if page == NULL_PAGE:  # the node has lost its window page: the lease's page fills the gap
                    self._refill(node, index - first, own[index], lease)
                    continue
                released.append(own[index])
                own[index] = page
                lease.row_synced[number] = min(lease.row_synced[number], index)
            self._ledger.release(number, released, leased(lease.id), lease.last_step)

    def _refill(self, node: Node, offset: int, page: PageId, lease: Lease) -> None:
        assert self._window is not None
        self._ledger.move(self._window, [page], leased(lease.id), cached(node.id))
        node.pages[self._window][offset] = page
        if node.window_pins == 0:
            self._num_evictable[self._window] += 1
            self._offer(node)

    def _split(self, node: Node, at: int) -> Node:
        """Split a node at position `at`; returns the new upper part, the lower part keeps the id."""
        cut, parent = at - node.start, node.parent
        assert parent is not None and 0 < cut < len(node.key) and cut % self._page_size == 0, (at, node)
        num_pages = cut // self._page_size
        upper = Node(
            id=self._new_id(),
            scoped_salt=node.scoped_salt,
            parent=parent,
            start=node.start,
            key=node.key[:cut].copy(),  # a view would keep the whole former key alive
            pages=[pages[:num_pages] for pages in node.pages],
            pins=node.pins,
            window_pins=node.window_pins,
            last_used=node.last_used,
            last_step=node.last_step,
        )
        for number in range(len(self._books)):
            self._ledger.move(number, upper.held(number), cached(node.id), cached(upper.id))
            del node.pages[number][:num_pages]
        parent.children[self._first_page(node.key, 0)] = upper
        node.start, node.key, node.parent = at, node.key[cut:].copy(), upper
        upper.children[self._first_page(node.key, 0)] = node
        self._nodes[upper.id] = upper
        self._offer(upper)
        return upper

    def _root(self, scoped_salt: str) -> Node:
        if scoped_salt not in self._roots:
            self._roots[scoped_salt] = Node(
                id=self._new_id(),
                scoped_salt=scoped_salt,
                parent=None,
                start=0,
                key=np.empty(0, dtype=np.int64),
                pages=[[] for _ in self._books],
            )
        return self._roots[scoped_salt]

    def _new_id(self) -> NodeId:
        self._next_id += 1
        return NodeId(self._next_id)

    def node_ending_at(self, lease: Lease, position: int) -> Node:
        """The node of a lease's shared prefix that ends at a page's end, split off if need be."""
        node = lease.node
        while node.start >= position:
            assert node.parent is not None, (position, lease)
            node = node.parent
        return node if node.end == position else self._split(node, position)

    # --- eviction ----------------------------------------------------------------------------------------------

    def evict(self, book: BookId, count: int) -> None:
        """Evict at least `count` pages of a book, least recently used first, or all that are not pinned."""
        if self.state_cache is not None and book == self.state_cache.book:
            self.state_cache.evict(count)
            return
        goal = max(0, self._num_evictable[book] - count)
        heap = self._window_heap if book == self._window else self._leaf_heap
        while self._num_evictable[book] > goal and heap:
            entry = heapq.heappop(heap)
            if not self._is_current(entry):
                continue
            node = self._nodes[entry[1]]
            if book == self._window:
                if node.window_pins == 0:
                    self._evict_from(node, book)
                    self._drop_if_empty(node)
            elif node.pins == 0 and not node.children:
                for number in range(len(self._books)):
                    self._evict_from(node, number)
                if self.state_cache is not None:
                    self.state_cache.drop(node)
                self._drop_if_empty(node)

    def _evict_from(self, node: Node, book: BookId) -> None:
        """Release a node's pages of one book."""
        pages = node.held(book)
        self._ledger.release(book, pages, cached(node.id), node.last_step)
        self._num_evictable[book] -= len(pages)
        node.pages[book] = [NULL_PAGE] * len(node.pages[book])

    def _touch(self, node: Node, now: int) -> None:
        """A node was used: update its place in the eviction order."""
        node.last_used = max(node.last_used, now)
        self._offer(node)

    def _offer(self, node: Node) -> None:
        """Put a node that can be evicted into the eviction heaps."""
        if node.parent is None:
            return
        if node.pins == 0 and not node.children:
            heapq.heappush(self._leaf_heap, (node.last_used, node.id))
        if self._window is not None and node.window_pins == 0:
            heapq.heappush(self._window_heap, (node.last_used, node.id))
        if self.state_cache is not None:
            self.state_cache.offer(node)
        for heap in (self._leaf_heap, self._window_heap):
            if len(heap) > HEAP_SLACK + 2 * len(self._nodes):  # by now most entries are out of date
                heap[:] = [entry for entry in set(heap) if self._is_current(entry)]
                heapq.heapify(heap)

    def _is_current(self, entry: tuple[int, NodeId]) -> bool:
        node = self._nodes.get(entry[1])
        return node is not None and node.last_used == entry[0]

    def _drop_if_empty(self, node: Node) -> None:
        """Remove a leaf that holds no pages, and every ancestor that becomes such a leaf."""
        while node.parent is not None and not node.children and node.pins == 0 and node.is_empty():
            parent = node.parent
            del parent.children[self._first_page(node.key, 0)]
            del self._nodes[node.id]
            node = parent
            self._offer(node)
        self._drop_root(node)

    def _drop_root(self, node: Node) -> None:
        if node.parent is None and node.pins == 0 and not node.children:
            self._roots.pop(node.scoped_salt, None)
