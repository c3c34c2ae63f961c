"""What holds of the store after every verb, whatever came before: the tree machine's invariants."""

from collections.abc import Iterable, Sequence

from roost.kv.audit import audit_pages
from roost.kv.ledger import FREE, Account, leased
from roost.kv.pages import NULL_PAGE, BookId, PageId
from roost.kv.store import Store
from tests.support.flat_prefix_cache import Shelf
from tests.support.paper_device import Launch, Paper, Talk


def accounts(store: Store) -> list[list[tuple[PageId, Account]]]:
    """Every page's account, by book."""
    return [list(store.ledger.accounts(book)) for book in range(len(store.books))]


def num_available(store: Store, book: BookId) -> int:
    """Pages that are free, will be, or can be evicted."""
    return store.ledger.num_free(book) + store.ledger.num_retiring(book) + store.tree.num_evictable(book)


def digest(store: Store) -> list[object]:
    """Everything the tree is made of."""
    nodes = [
        [
            (node.id, node.scoped_salt, node.start, node.key.tobytes(), sorted(node.children)),
            (node.pins, node.window_pins, node.last_used, node.last_step, [list(pages) for pages in node.pages]),
        ]
        for node in store.tree.nodes.values()
    ]
    counts = [store.tree.num_evictable(book) for book in range(len(store.books))]
    return [nodes, counts, accounts(store)]


def every_page_has_one_owner(store: Store, in_flight: Iterable[list[Launch]]) -> None:
    """Nothing is lost or owned twice, and what retires waits for a step that is out."""
    audit_pages(store)
    steps = {lines[0].step for lines in in_flight}
    for book, pages in enumerate(accounts(store)):
        kinds = [account for _, account in pages]
        waits_for = [account >> 2 for account in kinds if account & 3 == 3]
        assert set(waits_for) <= steps
        assert store.ledger.num_retiring(book) == len(waits_for)
        assert store.ledger.num_free(book) == kinds.count(FREE)
        assert len(pages) == store.books[book].num_pages


def the_tree_holds_what_was_published(store: Store, shelf: Shelf, paper: Paper) -> None:
    """Page for page, with the tokens it stands for written in it."""
    for book, held in enumerate(shelf.held):
        cached = [page for page, account in store.ledger.accounts(book) if account & 3 == 2]
        assert sorted(held.values()) == cached
        for (cache_salt, key), page in held.items():
            assert paper.stands_for(book, page, cache_salt, key), (book, page, key)


def evictable_is_what_no_lease_shares(store: Store, shelf: Shelf, talks: Sequence[Talk]) -> None:
    """In a full book; what a window book pins is the audit's to count."""
    prefixes = [talk.shared_prefix for talk in talks]
    shared = {(cache_salt, key[:end]) for cache_salt, key in prefixes for end in range(1, len(key) + 1)}
    for book, spec in enumerate(store.books):
        if spec.window is None:
            loose = [page for prefix, page in shelf.held[book].items() if prefix not in shared]
            assert store.tree.num_evictable(book) == len(loose)


def a_node_is_as_old_as_its_last_use(store: Store, shelf: Shelf, talks: Sequence[Talk]) -> None:
    """And none is kept that holds nothing for nobody."""
    places = shelf.places(store.tree, [talk.lease for talk in talks], 0)
    for node in store.tree.nodes.values():
        assert node.last_used == places[node.id].used
        assert node.children or node.pins or not node.is_empty(), node


def rows_name_the_pages_of_their_tokens(shelf: Shelf, talks: Sequence[Talk]) -> None:
    """What a lease shares is the tree's page for its own tokens, or let go."""
    for talk in talks:
        for held, row in zip(shelf.held, talk.lease.pages, strict=True):
            for prefix, page in zip(shelf.prefixes(*talk.shared_prefix), row, strict=False):
                assert page in (NULL_PAGE, held.get(prefix))


def no_page_of_a_step_in_flight_is_reused(store: Store, in_flight: Iterable[list[Launch]]) -> None:
    """It is still its lease's, the tree's, or retires until that step or a later one is collected."""
    for line in (line for lines in in_flight for line in lines):
        for book, pages in enumerate(line.pages):
            for account in store.ledger.accounts_of(book, [page for page in pages if page != NULL_PAGE]):
                kind, owner = account & 3, account >> 2
                assert kind == 2 or account == leased(line.talk.lease.id) or (kind == 3 and owner >= line.step)
