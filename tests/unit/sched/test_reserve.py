"""Pages for a step are found at the least cost to others: no page too many, and from the right owner."""

import pytest

from roost.messages import Submit
from roost.sched.request import Mark
from roost.sched.reserve import reserve
from roost.sched.state_columns import NO_STATES
from tests.support.engine_client import EngineClientDouble, engine_client

PAGE = 4


def _running(num_pages: int, *lengths: int) -> EngineClientDouble:
    """An engine whose requests have just begun; each holds the pages of its prompt and of one token more."""
    at = engine_client(num_pages=num_pages, overlap=False, chunk=64, max_running=4)
    for number, length in enumerate(lengths):
        tokens = tuple((7 * number + i) % 50 for i in range(length))  # none shares a page with another
        at.engine.post(Submit(request_id=f"r{number}", tokens=tokens, max_new_tokens=20), at.events.append)
    at.tick()
    held = [len(request.lease.pages[0]) for request in at.engine.state.running]
    assert held == [-(-length // PAGE) for length in lengths]
    return at


def _marked(at: EngineClientDouble) -> list[str]:
    return [request.id for request in at.engine.state.running if request.mark is Mark.PREEMPT]


def _ask(at: EngineClientDouble, num_more: int) -> bool:
    """Room for the first request, of so many pages more than are free."""
    state = at.engine.state
    first = state.running[0]
    free = state.store.ledger.num_free(0)
    return reserve(state, first, (len(first.lease.pages[0]) + free) * PAGE, [num_more * PAGE], NO_STATES)


# r1 has 3 pages and r2, which came last, has 1
@pytest.mark.parametrize(
    ("num_missing", "victims"),
    [
        (0, []),
        (1, ["r2"]),  # the last in line does
        (2, ["r1"]),  # it does not, and the one before it does alone
        (3, ["r1"]),  # exactly
        (4, ["r1", "r2"]),  # both, exactly
        (5, []),  # not even both: nobody loses anything for nothing
    ],
)
def test_whoever_can_be_spared_is_not_preempted(num_missing: int, victims: list[str]) -> None:
    at = _running(10, 4, 12, 4)
    assert _ask(at, num_missing) == (num_missing == 0)
    assert _marked(at) == victims


def test_of_three_that_bring_more_than_is_missing_the_last_in_line_is_spared() -> None:
    at = _running(14, 4, 12, 4, 4)  # r1 has 3 pages, r2 and r3 have 1 each
    assert not _ask(at, 4)
    assert _marked(at) == ["r1", "r2"]


def test_pages_that_are_on_their_way_spare_everybody() -> None:
    at = _running(10, 4, 12, 4)
    at.engine.state.mark(at.engine.state.running[2], Mark.PREEMPT)
    assert not _ask(at, 1)
    assert _marked(at) == ["r2"], "it brings the one page that is missing"
    assert not _ask(at, 2)
    assert _marked(at) == ["r1", "r2"]


@pytest.mark.parametrize("num_missing", [1, 2, 3, 4])
def test_no_more_is_evicted_than_is_missing(num_missing: int) -> None:
    at = _running(12, 4)
    state = at.engine.state
    for number in range(4):  # what ended leaves one page each in the tree
        at.send(Submit(request_id=f"old{number}", tokens=(40 + number, 1, 2, 3), max_new_tokens=0))
    at.tick(2)
    (first,) = state.running
    cached, free = state.store.tree.num_evictable(0), state.store.ledger.num_free(0)
    assert cached == 4 and free > 0
    assert reserve(state, first, (len(first.lease.pages[0]) + free) * PAGE, [num_missing * PAGE], NO_STATES)
    assert state.store.tree.num_evictable(0) == cached - num_missing and state.store.ledger.num_free(0) == 0
