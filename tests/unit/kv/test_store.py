"""The store, verb by verb: what each does to lengths, pages and owners, and what it refuses."""

import numpy as np
import pytest

from roost.kv.audit import audit_pages
from roost.kv.lease import Claim, Lease, TurnId
from roost.kv.ledger import OutOfPages
from roost.kv.pages import NULL_PAGE, Book
from roost.kv.store import Store
from roost.step import StepId

PAGE = 4
FULL, WINDOW = 0, 1
KEY = np.arange(100, dtype=np.int64)


def store(num_pages: int = 20, window: int | None = None) -> Store:
    books = (Book(num_pages=num_pages), Book(num_pages=num_pages, window=window))
    return Store(PAGE, books[: 1 if window is None else 2])


def written(kept: Store, length: int, step: int = 0) -> Lease:
    """A lease of which one collected step has written so much."""
    lease = kept.open(TurnId(1), "", KEY[:0])
    write(kept, lease, length, step)
    kept.collected(StepId(step))
    return lease


def write(kept: Store, lease: Lease, length: int, step: int) -> None:
    kept.reserve(lease, lease.device_len_max, [length] * len(kept.books))
    kept.claim(lease, Claim(step=StepId(step), size=length, most=length))
    kept.settle(lease, StepId(step), length)
    kept.slide(lease)


def test_reserve_takes_pages_for_the_positions_and_none_twice() -> None:
    kept = store()
    lease = kept.open(TurnId(1), "", KEY[:0])
    kept.reserve(lease, 0, [5])
    pages = list(lease.pages[FULL])
    assert len(pages) == 2
    kept.reserve(lease, 3, [5])
    assert lease.pages[FULL] == pages  # 8 positions fit two pages
    kept.reserve(lease, 4, [5])
    assert lease.pages[FULL][:2] == pages and len(lease.pages[FULL]) == 3


def test_reserve_moves_nothing_if_a_single_book_has_too_few_pages() -> None:
    kept = store(num_pages=4, window=PAGE)
    other = kept.open(TurnId(1), "", KEY[:0])
    kept.reserve(other, 0, [0, 2 * PAGE])
    lease = kept.open(TurnId(2), "", KEY[:0])
    with pytest.raises(OutOfPages):
        kept.reserve(lease, 0, [PAGE, 2 * PAGE])
    assert lease.pages == [[], []] and kept.ledger.num_free(FULL) == 3
    audit_pages(kept)


def test_claims_say_what_is_certain_and_what_may_be_until_results_say_what_was() -> None:
    kept = store()
    lease = written(kept, 6)
    kept.reserve(lease, 6, [8])
    for step in (1, 2):
        kept.claim(lease, Claim(step=StepId(step), size=1, most=4))
    assert (lease.settled_len, lease.claimed_len, lease.device_len_max) == (6, 8, 14)
    kept.settle(lease, StepId(1), 3)
    assert (lease.settled_len, lease.claimed_len, lease.device_len_max) == (9, 10, 13)
    with pytest.raises(AssertionError):
        kept.settle(lease, StepId(2), 5)  # more than the step could write


def test_an_ended_epoch_keeps_what_launched_steps_are_certain_to_write() -> None:
    kept = store()
    lease = written(kept, 6)
    kept.reserve(lease, 6, [4])
    kept.claim(lease, Claim(step=StepId(1), size=1, most=4))
    epoch = lease.epoch
    kept.end_epoch(lease, target_len=9, known_len=9)
    assert (lease.settled_len, lease.proven_len, lease.epoch) == (7, 6, epoch + 1) and not lease.claims
    kept.fall_back(lease)  # the step failed after all
    assert lease.settled_len == 6


def test_trimmed_pages_are_free_once_no_step_in_flight_can_touch_them() -> None:
    kept = store()
    lease = written(kept, 6)
    kept.reserve(lease, 6, [10])
    kept.claim(lease, Claim(step=StepId(1), size=1, most=10))
    free = kept.ledger.num_free(FULL)
    kept.end_epoch(lease, target_len=5, known_len=5)
    assert lease.settled_len == 5 and len(lease.pages[FULL]) == 2  # the partly used page stays
    assert kept.ledger.num_free(FULL) == free and kept.ledger.num_retiring(FULL) == 2
    kept.collected(StepId(1))
    assert kept.ledger.num_free(FULL) == free + 2
    audit_pages(kept)


def test_published_pages_are_shared_and_a_shared_page_is_never_cut_in_the_middle() -> None:
    kept = store()
    lease = written(kept, 10)
    kept.publish(lease, KEY[:10], now=1)
    assert lease.shared_len == 8  # whole pages alone
    other = kept.open(TurnId(2), "", KEY[:9])
    assert other.settled_len == 8 and other.pages[FULL] == lease.pages[FULL][:2]
    assert kept.open(TurnId(3), "another salt", KEY[:9]).settled_len == 0
    kept.trim(other, 7)
    assert other.settled_len == 4  # writing position 7 would write a page that others read
    kept.release(lease, now=2)
    assert kept.open(TurnId(4), "", KEY[:9]).settled_len == 8  # the tree has them still
    audit_pages(kept)


def test_nothing_is_published_that_a_step_in_flight_has_yet_to_write() -> None:
    kept = store()
    lease = written(kept, 6)
    kept.reserve(lease, 6, [6])
    kept.claim(lease, Claim(step=StepId(1), size=2, most=2))
    kept.end_epoch(lease, target_len=8, known_len=8)  # counts as settled, and is not proven
    kept.publish(lease, KEY[:8], now=1)
    assert (lease.settled_len, lease.shared_len) == (8, 4)
    kept.collected(StepId(1))
    kept.publish(lease, KEY[:8], now=2)
    assert lease.shared_len == 8


def test_a_window_lets_go_of_what_no_continuation_reads_but_for_the_anchor() -> None:
    kept = store(window=PAGE)
    lease = written(kept, 10)
    assert lease.pages[WINDOW][0] == NULL_PAGE and NULL_PAGE not in lease.pages[FULL]
    kept.hand(lease, TurnId(2), anchor_len=10)
    write(kept, lease, 10, step=1)
    held = [index for index, page in enumerate(lease.pages[WINDOW]) if page != NULL_PAGE]
    assert held == [1, 2, 3, 4]  # the window behind 10, and the one behind 20
    kept.collected(StepId(1))
    kept.end_epoch(lease, target_len=10, known_len=10)
    assert lease.settled_len == 10  # a rollback is a pure truncation
    audit_pages(kept)


def test_a_change_of_holder_moves_no_page_and_starts_a_row_of_its_own() -> None:
    kept = store()
    lease = written(kept, 6)
    pages = list(lease.pages[FULL])
    kept.hand(lease, "session")
    assert lease.holder == "session" and lease.pages[FULL] == pages and lease.row_synced == [0]


def test_a_released_lease_gives_every_page_back() -> None:
    kept = store(window=PAGE)
    free = [kept.ledger.num_free(book) for book in (FULL, WINDOW)]
    lease = written(kept, 10)
    kept.release(lease, now=1)
    assert [kept.ledger.num_free(book) for book in (FULL, WINDOW)] == free and not kept.leases
    audit_pages(kept)
