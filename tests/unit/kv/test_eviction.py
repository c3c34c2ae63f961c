"""What eviction takes: the oldest first and no more than is asked for, however often the order has changed."""

from random import Random

import numpy as np
import pytest

from roost.kv.lease import TurnId
from roost.kv.pages import Book
from roost.kv.state_cache import HEAP_SLACK
from roost.kv.store import Store

NUM_NODES = 10
PAGES = 3  # of each node


def _key(number: int) -> np.ndarray:
    return np.full(PAGES, number, dtype=np.int64)


def _filled(window: int | None = None) -> Store:
    """A tree of nodes that hang from the root, published one after the other; page size 1."""
    books = (Book(num_pages=1 + NUM_NODES * PAGES), Book(num_pages=1 + NUM_NODES * PAGES, window=window))
    store = Store(1, books[: 1 if window is None else 2])
    for number in range(NUM_NODES):
        lease = store.open(TurnId(number), "", _key(number))
        store.reserve(lease, 0, [PAGES] * len(store.books))
        lease.settled_len = lease.proven_len = PAGES
        store.publish(lease, _key(number), now=number)
        store.release(lease, now=number)
    return store


def _use(store: Store, number: int, now: int) -> None:
    """Somebody finds a node, and leaves it."""
    lease = store.open(TurnId(0), "", _key(number))
    assert lease.settled_len == PAGES
    store.release(lease, now)


def _held(store: Store, book: int = 0) -> set[int]:
    """Which nodes still have their pages."""
    return {int(node.key[0]) for node in store.tree.nodes.values() if node.num_held(book)}


def _used(store: Store, num_uses: int) -> list[int]:
    """Use nodes at random; all of them, the least recently used first."""
    order, rng = list(range(NUM_NODES)), Random(num_uses)
    for now in range(NUM_NODES, NUM_NODES + num_uses):
        number = rng.randrange(NUM_NODES)
        order.remove(number)
        order.append(number)
        _use(store, number, now)
    return order


# on both sides of where entries that are out of date are swept from the order of eviction
@pytest.mark.parametrize("num_uses", [0, 5, HEAP_SLACK, HEAP_SLACK + 2 * NUM_NODES + 1, 300, 1000])
@pytest.mark.parametrize("window", [None, PAGES])
def test_the_least_recently_used_goes_first_however_often_that_has_changed(num_uses: int, window: int | None) -> None:
    store = _filled(window)
    order = _used(store, num_uses)
    for number in order:
        assert number in _held(store)
        store.tree.evict(0, 1)
        assert number not in _held(store)
    assert not store.tree.nodes


@pytest.mark.parametrize("num_uses", [10, 300])
def test_window_pages_go_in_the_same_order(num_uses: int) -> None:
    store = _filled(PAGES)
    for number in _used(store, num_uses):
        store.tree.evict(1, 1)
        assert number not in _held(store, 1) and number in _held(store, 0)


def test_the_order_of_eviction_takes_no_more_memory_the_longer_a_server_runs() -> None:
    store = _filled(PAGES)
    most = 0
    for now in range(NUM_NODES, 2000):
        _use(store, now % NUM_NODES, now)
        most = max(most, len(store.tree._leaf_heap), len(store.tree._window_heap))
    assert NUM_NODES < most <= HEAP_SLACK + 2 * NUM_NODES + 1


@pytest.mark.parametrize("count", range(-1, 3 * PAGES + 2))
def test_an_eviction_takes_what_is_asked_for_in_whole_nodes_and_no_more(count: int) -> None:
    store = _filled()
    store.tree.evict(0, count)
    num_gone = max(0, -(-count // PAGES))
    assert _held(store) == set(range(num_gone, NUM_NODES))
    assert store.ledger.num_free(0) == num_gone * PAGES


def test_an_eviction_of_more_than_there_is_takes_all_that_nobody_pins() -> None:
    store = _filled()
    lease = store.open(TurnId(0), "", _key(4))
    store.tree.evict(0, 10**6)
    assert _held(store) == {4} and store.tree.num_evictable(0) == 0
    store.release(lease, now=99)
