"""State cache: states of recurrent layers at the ends of the prefix tree's nodes.

A state that a lease may go on from is pinned; of the others the least recently used are evicted first. Moves them only
through the ledger. Called by the tree, which says when a node was used or goes, and by the states of leases.
"""

import heapq
from collections.abc import Mapping

from roost.kv.lease import Lease
from roost.kv.ledger import Ledger, cached, leased
from roost.kv.node import Node, NodeId
from roost.kv.pages import NULL_PAGE, BookId, PageId

HEAP_SLACK = 64  # entries of the eviction queue that may be out of date, beside two for each node of the tree


class StateCache:
    """The states that nodes of one tree hold."""

    def __init__(self, ledger: Ledger, book: BookId, nodes: Mapping[NodeId, Node]) -> None:
        """`book` is the ledger's number of the pool of states."""
        self.book = book
        self.num_evictable = 0
        self._ledger = ledger
        self._nodes = nodes
        self._heap: list[tuple[int, NodeId]] = []  # (last used, node); entries may be out of date

    def take(self, node: Node, page: PageId, lease: Lease) -> None:
        """A lease's state becomes that of a node which has none; nobody has it pinned yet."""
        assert node.state == NULL_PAGE, node
        self._ledger.move(self.book, [page], leased(lease.id), cached(node.id))
        node.state = page
        self.num_evictable += 1
        self.offer(node)

    def pin(self, node: Node) -> None:
        """A lease may go on from a node's state."""
        assert node.state != NULL_PAGE, node
        self.num_evictable -= node.state_pins == 0
        node.state_pins += 1

    def unpin(self, node: Node, lease: Lease) -> None:
        """A lease no longer needs a node's state."""
        assert node.state_pins > 0, node
        node.state_pins -= 1
        node.last_step = max(node.last_step, lease.last_step)  # a step in flight may still read it
        self.num_evictable += node.state_pins == 0
        self.offer(node)

    def offer(self, node: Node) -> None:
        """A node was used, or its state unpinned: note it for eviction, if it has one."""
        if node.state == NULL_PAGE or node.state_pins:
            return
        heapq.heappush(self._heap, (node.last_used, node.id))
        if len(self._heap) > HEAP_SLACK + 2 * len(self._nodes):  # by now most entries are out of date
            self._heap = [entry for entry in set(self._heap) if self._is_current(entry)]
            heapq.heapify(self._heap)

    def evict(self, count: int) -> None:
        """Evict at least `count` states, least recently used first, or all that are not pinned."""
        goal = max(0, self.num_evictable - count)
        while self.num_evictable > goal and self._heap:
            entry = heapq.heappop(self._heap)
            node = self._nodes.get(entry[1])
            if node is not None and self._is_current(entry) and not node.state_pins:
                self.drop(node)

    def drop(self, node: Node) -> None:
        """Let go of a node's state, if it has one."""
        if node.state == NULL_PAGE:
            return
        assert node.state_pins == 0, node
        self._ledger.release(self.book, [node.state], cached(node.id), node.last_step)
        self.num_evictable -= 1
        node.state = NULL_PAGE

    def _is_current(self, entry: tuple[int, NodeId]) -> bool:
        node = self._nodes.get(entry[1])
        return node is not None and node.last_used == entry[0]
