"""Audit: the leak check of the KV cache. Recounts every page from its owners and compares with the ledger.

Reads everything and changes nothing. Called by the engine loop as often as --strict-memory says, and by tests.
"""

from collections import Counter

from roost.errors import InvariantError
from roost.kv.lease import Lease
from roost.kv.ledger import FREE, NULL_ACCOUNT, Account, cached, describe, leased
from roost.kv.node import Node
from roost.kv.page_counts import num_cached, num_own, num_pins, own_pages
from roost.kv.pages import NULL_PAGE, BookId, PageId, ceil_div
from roost.kv.store import Store


def audit_sums(store: Store) -> None:
    """Check by counts that free, leased, cached and retiring pages and the null page make up the pool of every book."""
    for book, spec in enumerate(store.pools):
        leased_pages = sum(num_own(store, lease, book) for lease in store.leases.values())
        cached_pages = sum(num_cached(store, node, book) for node in store.tree.nodes.values())
        parts = (store.ledger.num_free(book), leased_pages, cached_pages, store.ledger.num_retiring(book), 1)
        if sum(parts) != spec.num_pages:
            raise _broken(
                store, f"book {book}: free, leased, cached, retiring, null = {parts} do not make {spec.num_pages}"
            )
    for lease in store.leases.values():
        _check_lengths(store, lease)


def audit_pages(store: Store) -> None:
    """Check page by page that exactly the owner named in the ledger lists the page."""
    audit_sums(store)
    for book in range(len(store.pools)):
        owners: dict[PageId, Account] = {NULL_PAGE: NULL_ACCOUNT}
        for lease in store.leases.values():
            for page in own_pages(store, lease, book):
                _claim_once(store, owners, book, page, leased(lease.id))
        for node in store.tree.nodes.values():
            for page in (node.state,) * num_cached(store, node, book) if book == store.state_book else node.held(book):
                _claim_once(store, owners, book, page, cached(node.id))
        for page in store.ledger.free_pages(book):
            _claim_once(store, owners, book, page, FREE)
        for page, account in store.ledger.accounts(book):
            is_retiring = account & 3 == 3
            if page not in owners and not is_retiring:
                raise _broken(store, f"book {book}: page {page} is '{describe(account)}' but no owner lists it")
            if page in owners and owners[page] != account:
                raise _broken(
                    store,
                    f"book {book}: page {page} is listed by '{describe(owners[page])}' but is '{describe(account)}'",
                )
    for lease in store.leases.values():
        _check_shared(store, lease)
    _check_tree(store)


def _claim_once(store: Store, owners: dict[PageId, Account], book: BookId, page: PageId, account: Account) -> None:
    if page in owners:
        raise _broken(
            store, f"book {book}: page {page} is listed by '{describe(owners[page])}' and '{describe(account)}'"
        )
    owners[page] = account


def _check_lengths(store: Store, lease: Lease) -> None:
    """0 ≤ evicted ≤ settled ≤ device maximum ≤ allocated, shared ≤ settled, and the last window is held."""
    size = store.page_size
    ok = 0 <= lease.proven_len <= lease.settled_len and 0 <= lease.shared_len <= lease.settled_len
    ok = ok and lease.shared_len % size == 0 and lease.node.end == lease.shared_len
    for book, pages in enumerate(lease.pages):
        is_read_again = store.states is not None and book == store.window_book and not lease.claims
        ok = ok and (is_read_again or lease.claimed_len <= lease.device_len_max <= len(pages) * size)
    if store.states is not None:
        ok = ok and store.states.reach(lease, lease.settled_len) == lease.settled_len
        ok = ok and all(node.end == position for position, node in lease.tree_states.items())
    elif store.window_book is not None:
        first = store.books[store.window_book].first_needed(lease.settled_len, size)
        pages = lease.pages[store.window_book]
        ok = ok and 0 <= lease.evicted_len <= first and lease.evicted_len % size == 0
        ok = ok and NULL_PAGE not in pages[lease.evicted_len // size : ceil_div(lease.settled_len, size)]
    if not ok:
        raise _broken(store, f"lengths of a lease disagree: {lease}")


def _check_shared(store: Store, lease: Lease) -> None:
    """The shared pages of a lease are those of its path in the prefix tree, except where its window has moved on."""
    for book in range(len(store.books)):
        if lease.first_own(store.books[book], store.page_size) == 0:
            continue
        path = lease.node.path_pages(book)
        for mine, theirs in zip(lease.pages[book], path, strict=False):
            if mine not in (theirs, NULL_PAGE):
                raise _broken(store, f"book {book}: {lease} shares page {mine}, the tree's path has {theirs}")


def _check_tree(store: Store) -> None:
    """Each node has a pin for every lease that goes through it, and the count of evictable pages is right."""
    pins: dict[int, int] = {}
    window_pins: dict[int, int] = {}
    state_pins = Counter(node.id for lease in store.leases.values() for node in lease.tree_states.values())
    for lease in store.leases.values():
        walk: Node | None = lease.node
        while walk is not None and walk.parent is not None:
            pins[walk.id] = pins.get(walk.id, 0) + 1
            if walk.start >= lease.pinned_from and store.window_book is not None and store.states is None:
                window_pins[walk.id] = window_pins.get(walk.id, 0) + 1
            walk = walk.parent
    for node in store.tree.nodes.values():
        if node.pins != pins.get(node.id, 0) or node.window_pins != window_pins.get(node.id, 0):
            raise _broken(
                store,
                f"node {node.id} has {node.pins} pins and {node.window_pins} window pins, "
                f"its leases make {pins.get(node.id, 0)} and {window_pins.get(node.id, 0)}",
            )
        if node.state_pins != state_pins[node.id] or (node.state_pins and node.state == NULL_PAGE):
            raise _broken(
                store,
                f"node {node.id} has {node.state_pins} pins on its state {node.state}, its leases make "
                f"{state_pins[node.id]}",
            )
    for number in range(len(store.pools)):
        free_to_go = [node for node in store.tree.nodes.values() if num_pins(store, node, number) == 0]
        count = sum(num_cached(store, node, number) for node in free_to_go)
        if count != store.tree.num_evictable(number):
            raise _broken(
                store, f"book {number}: {count} pages are evictable, the tree says {store.tree.num_evictable(number)}"
            )


def _broken(store: Store, message: str) -> InvariantError:
    return InvariantError(f"{message}; last moves:\n{store.ledger.last_moves()}")
