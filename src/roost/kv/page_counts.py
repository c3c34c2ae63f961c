"""Page counts: how many KV pages a lease holds, and how many would become available if it were released.

Pure counts over leases and prefix-tree nodes; changes nothing. Called by admission, by the reservation of pages and by
the audit.
"""

from collections.abc import Sequence

from roost.kv.lease import Lease
from roost.kv.node import Node, NodeId
from roost.kv.pages import NULL_PAGE, BookId, PageId
from roost.kv.store import Store


def own_pages(store: Store, lease: Lease, book: BookId) -> list[PageId]:
    """Pages that the ledger accounts to the lease itself, not to the prefix tree."""
    if book == store.state_book:
        return [state.page for state in lease.states.values()]
    return [page for page in _own_entries(store, lease, book) if page != NULL_PAGE]


def num_own(store: Store, lease: Lease, book: BookId) -> int:
    """Number of own pages, counted without a Python loop: a turn must not cost more the longer its session is."""
    if book == store.state_book:
        return len(lease.states)
    entries = _own_entries(store, lease, book)
    return len(entries) - entries.count(NULL_PAGE)


def _own_entries(store: Store, lease: Lease, book: BookId) -> list[PageId]:
    first = lease.first_own(store.books[book], store.page_size)
    if book == store.window_book:  # before the window frontier only the anchor is held
        held_from = min(lease.evicted_len, lease.anchor[0]) if lease.anchor != (0, 0) else lease.evicted_len
        first = max(first, held_from // store.page_size)
    return lease.pages[book][first:]


def pinned_nodes(store: Store, lease: Lease, book: BookId) -> list[Node]:
    """Nodes of the prefix tree whose pages in a book this lease protects from eviction."""
    if book == store.state_book:
        return list(lease.tree_states.values())
    if store.states is not None and book == store.window_book:
        return []
    first = lease.pinned_from if book == store.window_book else 0
    nodes = []
    walk: Node | None = lease.node
    while walk is not None and walk.end > first:
        nodes.append(walk)
        walk = walk.parent
    return nodes


def num_held(store: Store, lease: Lease, book: BookId) -> int:
    """Pages that are unavailable to others because of this lease: its own and those it pins, but for spare ones."""
    if book == store.state_book:
        return len(lease.states) + len(lease.tree_states) - num_spare(store, lease, book)
    if book != store.window_book:
        return len(lease.pages[book])
    pinned = sum(node.num_held(book) for node in pinned_nodes(store, lease, book))
    return num_own(store, lease, book) + pinned


def num_spare(store: Store, lease: Lease, book: BookId) -> int:
    """Pages that a lease lets go of before anybody is preempted: states that are kept for later alone."""
    return len(store.states.spare(lease)) if store.states is not None and book == store.state_book else 0


def num_freed(store: Store, leases: Sequence[Lease], book: BookId) -> int:
    """Pages that would be free or evictable if these leases were released: their own, and those that only they pin."""
    pins: dict[NodeId, tuple[Node, int]] = {}
    for lease in leases:
        for node in pinned_nodes(store, lease, book):
            pins[node.id] = (node, pins.get(node.id, (node, 0))[1] + 1)
    own = sum(num_own(store, lease, book) for lease in leases)
    return own + sum(
        num_cached(store, node, book) for node, count in pins.values() if count == num_pins(store, node, book)
    )


def num_cached(store: Store, node: Node, book: BookId) -> int:
    """Pages of a book that a node of the tree holds."""
    return int(node.state != NULL_PAGE) if book == store.state_book else node.num_held(book)


def num_pins(store: Store, node: Node, book: BookId) -> int:
    """Leases that protect a node's pages of a book from eviction."""
    if book == store.state_book:
        return node.state_pins
    return node.window_pins if book == store.window_book else node.pins
