"""Store: the verbs on leases; the only code that changes a lease.

    open     a new lease on what the tree has of a prompt        reserve   room for the next step's worst case
    claim    a launched step will write                          settle    its result says what it wrote
    slide    the window moved on                                 publish   settled pages into the tree
    end_epoch  resolve claims, disown results in flight          trim      the one way to get shorter
    hand     change of holder                                    release   give everything back

It sees lengths and page ids, never tokens (a key is opaque to it), rows or requests. Called by session and sched.
"""

from collections.abc import Mapping, Sequence

from roost.kv.lease import Claim, Lease, LeaseId, StateKind, TurnId
from roost.kv.ledger import Ledger, OutOfPages, leased
from roost.kv.node import Key
from roost.kv.pages import NULL_PAGE, Book, BookId, PageId, StatePool, ceil_div, floor_to
from roost.kv.radix import PrefixTree
from roost.kv.states import States
from roost.step import StepId

_NOTHING: Mapping[int, StateKind] = {}


class Store:
    """All leases, over one ledger and one prefix tree."""

    def __init__(self, page_size: int, books: tuple[Book, ...], states: StatePool | None = None) -> None:
        self.page_size = page_size
        self.books = books
        # as the ledger numbers them
        self.pools: tuple[Book | StatePool, ...] = books if states is None else (*books, states)
        self.ledger = Ledger(self.pools)
        self.tree = PrefixTree(self.ledger, page_size, books, None if states is None else len(books))
        self.leases: dict[LeaseId, Lease] = {}
        # whose pages are let go as a sequence grows: sliding windows, or inputs behind the last state
        self.window_book = next((number for number, book in enumerate(books) if book.window is not None), None)
        self.states: States | None = None
        self.state_book = None if states is None else len(books)  # the number of the pool of states
        if states is not None:
            assert self.window_book is not None and books[self.window_book].is_replayed, books
            own = (len(books), self.window_book, books[self.window_book].window or 0)
            self.states = States(states, self.ledger, self.tree, page_size, *own)
        self._next_lease = 0

    # --- birth and growth --------------------------------------------------------------------------------------

    def open(self, holder: TurnId | str, scoped_salt: str, key: Key) -> Lease:
        """A new lease on the longest usable cached prefix of `key`."""
        match = self.tree.match(scoped_salt, key)
        node = self.tree.pin(scoped_salt, match)
        length = match.length if match else 0
        self._next_lease += 1
        lease = Lease(
            id=LeaseId(self._next_lease),
            holder=holder,
            scoped_salt=scoped_salt,
            pages=[node.path_pages(number) for number in range(len(self.books))],
            node=node,
            shared_len=length,
            settled_len=length,
            proven_len=length,
            row_synced=[0] * len(self.books),
        )
        if self.states is not None:
            lease.evicted_len = lease.pinned_from = length
            self.states.open(lease)
        elif self.window_book is not None:
            first = self.books[self.window_book].first_needed(length, self.page_size)
            window_pages = lease.pages[self.window_book]
            window_pages[: first // self.page_size] = [NULL_PAGE] * (first // self.page_size)
            lease.evicted_len = lease.pinned_from = first
            self.tree.pin_window(lease, first)
        self.leases[lease.id] = lease
        return lease

    def reserve(
        self,
        lease: Lease,
        length: int,
        reserves: Sequence[int],
        states: Mapping[int, StateKind] = _NOTHING,
    ) -> None:
        """Pages for `reserves[book]` positions past `length` in each book, and for the states that the step keeps.

        All of them, or OutOfPages with nothing moved. Of inputs in front of a state that the same step keeps, nobody
        will read any: they need no pages.
        """
        size = self.page_size
        for book, pages in enumerate(lease.pages):
            if length + reserves[book] > len(pages) * size:
                break
        else:  # most decode steps begin no page
            if not states:
                return
        ends = [ceil_div(length + reserve, size) for reserve in reserves]
        wants = [max(0, end - len(pages)) for end, pages in zip(ends, lease.pages, strict=True)]
        first, num_skipped = self._not_read_again(lease, ends, states)
        if self.window_book is not None:
            wants[self.window_book] -= num_skipped
        for book, want in enumerate(wants):
            if want > self.ledger.num_free(book):
                raise OutOfPages(book, want, self.ledger.num_free(book))
        if self.states is not None and states:
            self.states.reserve(lease, states)
        for book, want in enumerate(wants):
            if want > 0:
                lease.pages[book].extend(self.ledger.take(book, want, leased(lease.id)))
        if num_skipped:
            assert self.window_book is not None
            lease.pages[self.window_book][first:first] = [NULL_PAGE] * num_skipped

    def _not_read_again(self, lease: Lease, ends: Sequence[int], states: Mapping[int, StateKind]) -> tuple[int, int]:
        """New pages of inputs in front of a state that the same step keeps: the first one's index, and how many."""
        if self.window_book is None or not states:
            return 0, 0
        first = max(len(lease.pages[self.window_book]), ceil_div(lease.anchor[1], self.page_size))
        return first, max(0, min(ends[self.window_book], max(states) // self.page_size) - first)

    # --- lengths -----------------------------------------------------------------------------------------------

    def claim(self, lease: Lease, claim: Claim) -> None:
        """A step that writes to this lease, and brings its row up to date, is about to be launched."""
        if lease.last_step <= self.ledger.collected:
            lease.proven_len = lease.settled_len  # nothing was out: all of it has been written
        lease.claims.append(claim)
        lease.last_step = claim.step
        if self.states is not None:
            self.states.launched(lease, claim.step)
        for book, pages in enumerate(lease.pages):
            lease.row_synced[book] = len(pages)

    def settle(self, lease: Lease, step: StepId, written: int) -> None:
        """The result of a claimed step: it wrote `written` tokens."""
        claim = lease.claims.pop(0)
        assert claim.step == step and claim.size <= written <= claim.most, (claim, step, written)
        lease.settled_len += written
        lease.proven_len = lease.settled_len

    def end_epoch(self, lease: Lease, target_len: int, known_len: int) -> None:
        """Disown results in flight; what they are certain to write stays, up to `target_len`."""
        kept = min(lease.committed_len(known_len), target_len)
        lease.claims.clear()
        lease.settled_len = kept
        lease.proven_len = min(lease.proven_len, kept)
        lease.epoch += 1
        self.trim(lease, kept)

    def _publishable_len(self, lease: Lease) -> int:
        """What the tree may have: nothing that a step in flight has yet to write."""
        return lease.settled_len if lease.last_step <= self.ledger.collected else lease.proven_len

    def fall_back(self, lease: Lease) -> None:
        """A step that names this lease failed: keep only what results have proven."""
        if self.states is not None:
            self.states.forget_unproven(lease)
        self.end_epoch(lease, lease.proven_len, lease.proven_len)

    def trim(self, lease: Lease, length: int) -> None:
        """Shrink a lease to at most `length` tokens; the only way a lease gets shorter."""
        assert not lease.claims, lease
        length = self._point_to_go_on(lease, min(length, lease.settled_len))
        keep = ceil_div(length, self.page_size)  # the partly used page stays with the lease
        for book, pages in enumerate(lease.pages):
            first = max(keep, lease.first_own(self.books[book], self.page_size))
            self._release(lease, book, pages[first:])
            del pages[keep:]
            is_read_again = self.states is not None and book == self.window_book
            if is_read_again and length % self.page_size and len(pages) == keep and pages[-1] == NULL_PAGE:
                pages.pop()  # a state is in the midst of a page that was let go: the rest of it will be written again
            lease.row_synced[book] = min(lease.row_synced[book], len(pages))
        if self.states is not None:
            self.states.cut(lease, length)
        self.tree.unpin(lease, min(length, lease.shared_len), now=0)
        lease.settled_len = length
        lease.proven_len = min(lease.proven_len, length)
        self._lower_frontier(lease)

    def _point_to_go_on(self, lease: Lease, length: int) -> int:
        """The largest point up to `length` that can be continued.

        Without writing a shared page, or missing a window or the inputs behind a state.
        """
        if length < lease.shared_len:
            length = floor_to(length, self.page_size)
        if self.states is not None:
            while (reached := self.states.reach(lease, length)) < length:
                length = floor_to(reached, self.page_size) if reached < lease.shared_len else reached
        elif self.window_book is not None:
            while length > 0 and not self._window_held(lease, length):
                length = floor_to(length - 1, self.page_size)
        return length

    def _window_held(self, lease: Lease, length: int) -> bool:
        assert self.window_book is not None
        first = self.books[self.window_book].first_needed(length, self.page_size) // self.page_size
        held = lease.pages[self.window_book][first : ceil_div(length, self.page_size)]
        return NULL_PAGE not in held

    # --- window ------------------------------------------------------------------------------------------------

    def slide(self, lease: Lease) -> None:
        """Let go of window pages, and states, that no continuation from the settled length reads.

        A lease that has been released has none.
        """
        if self.window_book is None or lease.id not in self.leases:
            return
        if self.states is not None:
            self.states.slide(lease)
        first = self._first_kept(lease, lease.settled_len)
        if first <= lease.evicted_len:
            return
        pages, released = lease.pages[self.window_book], []
        for index in range(lease.evicted_len // self.page_size, first // self.page_size):
            if lease.anchor[0] <= index * self.page_size < lease.anchor[1]:
                continue
            if index >= lease.first_own(self.books[self.window_book], self.page_size):
                released.append(pages[index])
            pages[index] = NULL_PAGE
        lease.evicted_len = first
        self._release(lease, self.window_book, released)
        if lease.pinned_from < lease.shared_len <= self._window_needed_from(lease):
            self.tree.unpin_window(lease)

    def _first_kept(self, lease: Lease, length: int) -> int:
        """First window position kept at `length`: enough to go back by one token, or to the last whole page.

        Of inputs, those that may be run again by who goes on from `length`, or has to run its last token again.
        """
        assert self.window_book is not None
        if self.states is not None:
            return floor_to(self.states.last_at(lease, max(0, length - 1), proven=True), self.page_size)
        whole_len = floor_to(max(0, length - 1), self.page_size)
        return self.books[self.window_book].first_needed(whole_len, self.page_size)

    def _window_needed_from(self, lease: Lease) -> int:
        return min(lease.evicted_len, lease.anchor[0]) if lease.anchor != (0, 0) else lease.evicted_len

    def _lower_frontier(self, lease: Lease) -> None:
        """After a trim: the frontier follows the length down, and the anchor before it is let go."""
        if self.window_book is None:
            return
        pages, loose_from = lease.pages[self.window_book], self._window_needed_from(lease) // self.page_size
        first, first_kept = len(pages), self._first_kept(lease, lease.settled_len)
        while first * self.page_size > first_kept and pages[first - 1] != NULL_PAGE:
            first -= 1
        lease.evicted_len = min(lease.evicted_len, first * self.page_size)
        lease.anchor = (0, 0)
        for index in range(loose_from, lease.evicted_len // self.page_size):
            if index >= lease.first_own(self.books[self.window_book], self.page_size):
                self._release(lease, self.window_book, [pages[index]])
            pages[index] = NULL_PAGE
        if lease.pinned_from < lease.shared_len <= lease.evicted_len:
            self.tree.unpin_window(lease)

    # --- sharing and ending ------------------------------------------------------------------------------------

    def publish(self, lease: Lease, key: Key, now: int) -> None:
        """Move full pages of `key` that are proven into the tree; the lease shares them from then on."""
        until = floor_to(min(self._publishable_len(lease), len(key)), self.page_size)
        shared = lease.shared_len
        if self.states is not None:
            if until > shared:
                self.tree.publish(lease, key[:until], now)
                lease.pinned_from = lease.shared_len  # inputs are not in the tree
            self.states.publish(lease)  # perhaps a later one of what it shared before
            return
        if until <= shared:
            return
        needed_from = self._window_needed_from(lease)
        if self.window_book is not None and needed_from >= shared:
            self.tree.unpin_window(lease)
        self.tree.publish(lease, key[:until], now)
        if self.window_book is not None:
            if needed_from >= shared:
                lease.pinned_from = min(needed_from, until)
            self.tree.pin_window(lease, max(shared, lease.pinned_from))

    def hand(self, lease: Lease, holder: TurnId | str, anchor_len: int = 0, turn_end: int = 0) -> None:
        """Change of holder; pages are accounted to the lease, so nothing moves. A new holder has a new row.

        While this holder has it, the window behind `anchor_len` (a turn's commit point) stays, or the inputs behind it
        as far as they are there; the state at `turn_end` is kept for whoever goes back to it.
        """
        lease.holder = holder
        lease.row_synced = [0] * len(self.books)
        if self.states is not None and not isinstance(holder, str):
            anchor_len = min(anchor_len, lease.settled_len + 1)
            self.states.begin_turn(lease, turn_end, anchor_len)
        if self.window_book is not None and anchor_len >= lease.settled_len:
            lease.anchor = (self._first_kept(lease, anchor_len), ceil_div(anchor_len, self.page_size) * self.page_size)

    def release(self, lease: Lease, now: int) -> None:
        """Give every page back and forget the lease."""
        lease.claims.clear()
        lease.epoch += 1
        for book, pages in enumerate(lease.pages):
            self._release(lease, book, pages[lease.first_own(self.books[book], self.page_size) :])
            pages.clear()
        if self.states is not None:
            self.states.cut(lease, -1)
        self.tree.unpin(lease, 0, now)
        self.tree.leave(lease, now)
        del self.leases[lease.id]

    def collected(self, step: StepId) -> None:
        """A step was collected: pages that only it could touch become free."""
        self.ledger.reclaim(step)

    def _release(self, lease: Lease, book: BookId, pages: Sequence[PageId]) -> None:
        self.ledger.release(book, [page for page in pages if page != NULL_PAGE], leased(lease.id), lease.last_step)
