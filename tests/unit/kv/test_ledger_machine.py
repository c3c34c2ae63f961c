"""The ledger against a dict of page → account: every verb moves what it says, and a wrong source moves nothing."""

from collections.abc import Callable

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from roost.errors import InvariantError
from roost.kv.ledger import FREE, NULL_ACCOUNT, Account, Ledger, OutOfPages, cached, describe, leased, retiring
from roost.kv.pages import NULL_PAGE, Book, BookId, PageId
from roost.step import StepId

BOOKS = (Book(num_pages=9), Book(num_pages=6, window=2))
OWNERS = (leased(1), leased(2), leased(3), cached(1), cached(2), cached(7))

books = st.integers(0, len(BOOKS) - 1)
owners = st.sampled_from(OWNERS)


class LedgerMachine(RuleBasedStateMachine):
    """Random verbs, right and wrong."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger(BOOKS)
        self.accounts: dict[tuple[BookId, PageId], Account] = {
            (book, PageId(page)): NULL_ACCOUNT if page == NULL_PAGE else FREE
            for book, spec in enumerate(BOOKS)
            for page in range(spec.num_pages)
        }
        self.collected = StepId(-1)

    def _pages(self, book: BookId, account: Account) -> list[PageId]:
        return [page for (number, page), found in self.accounts.items() if number == book and found == account]

    def _set(self, book: BookId, pages: list[PageId], account: Account) -> None:
        for page in pages:
            self.accounts[book, page] = account

    def _check_last_move(self, book: BookId, pages: list[PageId], source: Account, dest: Account) -> None:
        line = f"  book {book}: {describe(source)} -> {describe(dest)}: {pages}"
        assert self.ledger.last_moves().splitlines()[-1] == line

    def _draw_owned(self, data: st.DataObject) -> tuple[BookId, list[PageId], Account]:
        """Some pages of one owner, in any order."""
        held = sorted({(book, account) for (book, _), account in self.accounts.items() if account in OWNERS})
        book, source = data.draw(st.sampled_from(held))
        pages = data.draw(st.lists(st.sampled_from(self._pages(book, source)), min_size=1, unique=True))
        return book, pages, source

    def _owns_any(self) -> bool:
        return any(account in OWNERS for account in self.accounts.values())

    # --- right moves -------------------------------------------------------------------------------------------

    @rule(book=books, count=st.integers(0, 4), dest=owners)
    def take(self, book: BookId, count: int, dest: Account) -> None:
        free = self._pages(book, FREE)
        if count > len(free):
            with pytest.raises(OutOfPages, match=f"book {book}: {count} pages needed, {len(free)} free"):
                self.ledger.take(book, count, dest)
            return
        pages = self.ledger.take(book, count, dest)
        assert len(set(pages)) == count and set(pages) <= set(free)
        self._check_last_move(book, pages, FREE, dest)
        self._set(book, pages, dest)

    @precondition(_owns_any)
    @rule(data=st.data(), dest=owners)
    def move(self, data: st.DataObject, dest: Account) -> None:
        book, pages, source = self._draw_owned(data)
        self.ledger.move(book, pages, source, dest)
        self._check_last_move(book, pages, source, dest)
        self._set(book, pages, dest)

    @precondition(_owns_any)
    @rule(data=st.data(), ahead=st.integers(-2, 3))
    def release(self, data: st.DataObject, ahead: int) -> None:
        """Free at once if the last step that names the pages was collected, else retiring until it is."""
        book, pages, source = self._draw_owned(data)
        last_step = StepId(self.collected + ahead)
        self.ledger.release(book, pages, source, last_step)
        dest = FREE if last_step <= self.collected else retiring(last_step)
        self._check_last_move(book, pages, source, dest)
        self._set(book, pages, dest)

    @rule(ahead=st.integers(1, 2))
    def reclaim(self, ahead: int) -> None:
        self.collected = StepId(self.collected + ahead)
        self.ledger.reclaim(self.collected)
        for page, account in self.accounts.items():
            if account & 3 == 3 and account >> 2 <= self.collected:
                self.accounts[page] = FREE

    # --- wrong moves -------------------------------------------------------------------------------------------

    @rule(data=st.data(), book=books, dest=owners, ahead=st.integers(-1, 1), by_release=st.booleans())
    def name_a_wrong_source(
        self, data: st.DataObject, book: BookId, dest: Account, ahead: int, by_release: bool
    ) -> None:
        """Right pages before the guilty one stay where they are, too."""
        pages = data.draw(
            st.lists(
                st.sampled_from([page for number, page in self.accounts if number == book]), min_size=1, unique=True
            )
        )
        source = data.draw(st.sampled_from([*OWNERS, retiring(StepId(self.collected + 1))]))
        wrong = [page for page in pages if self.accounts[book, page] != source]
        if not wrong:
            return
        before = self.ledger.last_moves()
        step = StepId(self.collected + ahead)
        if by_release:
            dest = FREE if ahead <= 0 else retiring(step)
            self._refused(lambda: self.ledger.release(book, pages, source, step), book, wrong[0], source, dest)
        else:
            self._refused(lambda: self.ledger.move(book, pages, source, dest), book, wrong[0], source, dest)
        assert self.ledger.last_moves() == before

    def _refused(self, verb: Callable[[], None], book: BookId, page: PageId, source: Account, dest: Account) -> None:
        with pytest.raises(InvariantError) as refusal:
            verb()
        message = str(refusal.value)
        assert f"page {page} of book {book} cannot go to '{describe(dest)}'" in message
        assert f"expected '{describe(source)}', found '{describe(self.accounts[book, page])}'" in message
        assert self.ledger.last_moves() in message

    # --- what always holds -------------------------------------------------------------------------------------

    @invariant()
    def the_ledger_is_the_model(self) -> None:
        assert self.ledger.collected == self.collected
        for book, spec in enumerate(BOOKS):
            found = list(self.ledger.accounts(book))
            assert [page for page, _ in found] == list(range(spec.num_pages))
            assert {(book, page): account for page, account in found} == {
                key: account for key, account in self.accounts.items() if key[0] == book
            }
            assert self.ledger.accounts_of(book, [page for page, _ in found]) == [account for _, account in found]
            assert sorted(self.ledger.free_pages(book)) == self._pages(book, FREE)

    @invariant()
    def every_page_has_one_account(self) -> None:
        for book, spec in enumerate(BOOKS):
            accounts = [account for (number, _), account in self.accounts.items() if number == book]
            num_owned = sum(account in OWNERS for account in accounts)
            num_free, num_retiring = self.ledger.num_free(book), self.ledger.num_retiring(book)
            assert num_free == accounts.count(FREE)
            assert num_retiring == sum(account & 3 == 3 for account in accounts)
            assert num_free + num_owned + num_retiring + 1 == spec.num_pages


def test_the_ledger_conserves_pages_and_refuses_wrong_sources() -> None:
    run_state_machine_as_test(
        LedgerMachine,
        settings=settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True),
    )


def test_a_wrong_source_is_told_in_words_with_the_last_moves() -> None:
    ledger = Ledger(BOOKS)
    (page,) = ledger.take(0, 1, leased(3))
    ledger.move(0, [page], leased(3), cached(5))
    with pytest.raises(InvariantError) as refusal:
        ledger.release(0, [page], leased(3), StepId(8))
    assert str(refusal.value).splitlines() == [
        "page 1 of book 0 cannot go to 'retiring until step 8': "
        "expected 'leased by lease 3', found 'cached by node 5'; last moves:",
        "  book 0: free -> leased by lease 3: [1]",
        "  book 0: leased by lease 3 -> cached by node 5: [1]",
    ]


@pytest.mark.parametrize("last_step", [StepId(-1), StepId(0)], ids=["free", "retiring"])
def test_a_page_released_twice_in_one_call_is_refused_and_nothing_moves(last_step: StepId) -> None:
    ledger = Ledger(BOOKS)
    pages = ledger.take(0, 2, leased(1))
    with pytest.raises(InvariantError, match=r"twice .* last moves:\n  book 0: free -> leased by lease 1"):
        ledger.release(0, [*pages, pages[0]], leased(1), last_step)
    assert ledger.accounts_of(0, pages) == [leased(1), leased(1)]
    assert (ledger.num_free(0), ledger.num_retiring(0)) == (BOOKS[0].num_pages - 3, 0)


def test_the_null_page_never_moves() -> None:
    ledger = Ledger(BOOKS)
    taken = ledger.take(0, BOOKS[0].num_pages - 1, leased(1))
    assert NULL_PAGE not in taken
    for source in (FREE, leased(1)):
        with pytest.raises(InvariantError, match=r"page 0 of book 0 .* found 'null page'"):
            ledger.move(0, [NULL_PAGE], source, leased(2))
