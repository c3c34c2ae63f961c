"""The prefix tree, driven through the store, against a flat model and a paper device.

Every page that a match or a row names holds the tokens it should; matching changes nothing and finds the longest
usable prefix; eviction takes the oldest that nobody pins; every page has one owner after every verb.
"""

from collections import deque
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from roost.kv.lease import Claim, TurnId
from roost.kv.ledger import OutOfPages
from roost.kv.node import Key
from roost.kv.page_counts import num_freed
from roost.kv.pages import NULL_PAGE, Book, PageId, ceil_div, floor_to
from roost.kv.store import Store
from roost.session.record import key_of
from roost.step import StepId
from tests.support.flat_prefix_cache import Shelf
from tests.support.paper_device import ACCEPT_MAX, Launch, Paper, Talk, entries
from tests.support.store_invariants import (
    a_node_is_as_old_as_its_last_use,
    accounts,
    digest,
    every_page_has_one_owner,
    evictable_is_what_no_lease_shares,
    no_page_of_a_step_in_flight_is_reused,
    num_available,
    rows_name_the_pages_of_their_tokens,
    the_tree_holds_what_was_published,
)

TALKS_MAX, IN_FLIGHT_MAX = 4, 2
SPACES = ("", "", "", "salt")
SETTINGS = settings(max_examples=60, stateful_step_count=50, deadline=None, derandomize=True)

seeds = st.integers(0, 2**32 - 1)  # of what a rule decides; drawn whole, so that no choice is rare


def _has(running: bool) -> Callable[["TreeMachine"], bool]:
    return lambda machine: any(talk.running is running for talk in machine.talks)


CAN: dict[str, Callable[["TreeMachine"], bool]] = {
    "open": lambda machine: len(machine.talks) < TALKS_MAX,
    "run": _has(running=True),
    "collect": lambda machine: bool(machine.in_flight),
    "fail": lambda machine: bool(machine.in_flight),
    "finish": _has(running=True),
    "abort": _has(running=True),
    "rewind": _has(running=False),
    "resume": _has(running=False),
    "publish": lambda machine: any(talk.may_publish for talk in machine.talks),
    "leave": lambda machine: bool(machine.talks),
    "drop": lambda machine: bool(machine.talks),
    "evict": lambda machine: bool(machine.store.tree.nodes),
    "match": lambda machine: bool(machine.store.tree.nodes),
}
SHARES = (24, 30, 4, 1, 6, 3, 3, 10, 12, 10, 2, 6, 4)  # of each verb in a busy engine


class TreeMachine(RuleBasedStateMachine):
    """Sequences that are opened, run, published, cut, handed on and given up, with steps in flight."""

    def __init__(self, kinds: str, pair: bool) -> None:
        super().__init__()
        self.kinds, self.pair = kinds, pair
        self.talks: list[Talk] = []
        self.in_flight: deque[list[Launch]] = deque()
        self.next_step = 0
        self.now = 0
        self.known: list[list[int]] = [[]]  # tokens of earlier sequences, to share prefixes with

    @initialize(seed=seeds)
    def build(self, seed: int) -> None:
        """A pool that has been in use for a while, or is new."""
        rng = Random(seed)
        self.page_size, self.vocab = rng.choice([1, 2, 4]), rng.randint(2, 5)
        self.length_max = 8 + 4 * self.page_size
        num_pages = rng.randint(12, 26)
        full, windowed = Book(num_pages=num_pages), Book(num_pages=num_pages, window=rng.randint(1, 6))
        self.books = {"full": (full,), "window": (windowed,), "full + window": (full, windowed)}[self.kinds]
        self.store = Store(self.page_size, self.books)
        self.shelf = Shelf(self.page_size, self.books)
        self.paper = Paper(self.page_size, self.books, self.pair)
        self._bustle(rng, num_verbs=rng.choice([0, 40, 80]))

    # --- drawing -----------------------------------------------------------------------------------------------

    def _tokens(self, rng: Random, count: int) -> list[int]:
        return [rng.randrange(self.vocab) for _ in range(count)]

    def _prompt(self, rng: Random) -> list[int]:
        """Part of an earlier sequence, or of one that runs now, then perhaps something new."""
        base = rng.choice([*self.known[-8:], *(talk.tokens for talk in self.talks)])
        shared = base[: rng.choice([len(base), rng.randint(0, len(base))])]
        new = self._tokens(rng, rng.choice([0, 1, self.page_size, 3 * self.page_size]))
        return (shared + new)[: self.length_max - ACCEPT_MAX] or [0]

    def _pick(self, rng: Random, running: bool | None = None) -> Talk:
        return rng.choice([talk for talk in self.talks if running is None or talk.running is running])

    def _later(self) -> int:
        self.now += 1
        return self.now

    def _key(self, tokens: list[int]) -> Key:
        return key_of(np.array(tokens, dtype=np.int32), self.pair)

    @rule(seed=seeds)
    def bustle(self, seed: int) -> None:
        """A run of verbs, in the proportions of a busy engine."""
        self._bustle(Random(seed), num_verbs=10)

    def _bustle(self, rng: Random, num_verbs: int) -> None:
        for _ in range(num_verbs):
            verb = rng.choices(tuple(CAN), SHARES)[0]
            if CAN[verb](self):
                getattr(self, verb)(rng.getrandbits(32))
                self.everything_holds()

    # --- birth and growth --------------------------------------------------------------------------------------

    @precondition(CAN["open"])
    @rule(seed=seeds)
    def open(self, seed: int) -> None:
        """A new lease starts on the longest usable prefix, and never has the slot of the last token."""
        rng = Random(seed)
        prompt, cache_salt = self._prompt(rng), rng.choice(SPACES)
        looked_up = prompt if self.pair else prompt[:-1]
        key = entries(looked_up, self.pair)
        length, pages = self.shelf.longest(cache_salt, key)
        lease = self.store.open(TurnId(self.next_step), cache_salt, self._key(looked_up))
        assert (lease.settled_len, lease.shared_len, lease.proven_len) == (length, length, length)
        assert lease.settled_len < len(prompt)
        assert lease.pages == pages
        talk = Talk(lease=lease, tokens=prompt, prefill_len=len(prompt), shared_key=key[:length])
        talk.commit_len = rng.choice([0, rng.randrange(len(prompt))])  # a session that lost its lease has history
        self._hand_to_turn(talk)
        self.talks.append(talk)

    def _hand_to_turn(self, talk: Talk) -> None:
        before = accounts(self.store)
        self.store.hand(talk.lease, TurnId(self.next_step), anchor_len=talk.commit_len)
        talk.table = [[PageId(-1)] * len(row) for row in talk.lease.pages]  # another row, with another's entries
        assert talk.lease.holder == self.next_step and accounts(self.store) == before
        talk.can_roll_back = talk.commit_len >= talk.lease.settled_len

    @precondition(CAN["run"])
    @rule(seed=seeds)
    def run(self, seed: int) -> None:
        """The loop goes round a few times."""
        rng = Random(seed)
        for _ in range(rng.randint(1, 4)):
            self._tick(rng)

    def _tick(self, rng: Random) -> None:
        """Collect what is due, then launch chunks and rounds of some running sequences."""
        if len(self.in_flight) >= IN_FLIGHT_MAX:
            self.collect(0)
        running = [talk for talk in self.talks if talk.running and rng.random() < 0.8]
        lines = [line for talk in running if (line := self._line(rng, talk)) is not None]
        for line in lines:
            size, most = (line.chunk, line.chunk) if line.chunk else (1, ACCEPT_MAX)
            self.store.claim(line.talk.lease, Claim(step=line.step, size=size, most=most))
        if lines:
            self.in_flight.append(lines)
            self.next_step += 1

    def _line(self, rng: Random, talk: Talk) -> Launch | None:
        lease, rest = talk.lease, talk.prefill_len - talk.lease.claimed_len
        if rest > 0:
            chunk = rng.choice([rest, rng.randint(1, rest)])
            end = lease.claimed_len + chunk
            tokens = talk.tokens[:end] + (talk.tokens[end : end + 1] if chunk < rest else self._tokens(rng, 1))
        elif lease.device_len_max + ACCEPT_MAX <= self.length_max:
            chunk, tokens = 0, self._tokens(rng, rng.randint(1, ACCEPT_MAX))
        else:
            return None
        if not self._reserve(talk, lease.device_len_max + (chunk or ACCEPT_MAX)):
            return None
        pages = [list(pages) for pages in lease.pages]
        self._update_row(talk)
        step = StepId(self.next_step)
        return Launch(step=step, talk=talk, epoch=lease.epoch, pages=pages, chunk=chunk, tokens=tuple(tokens))

    def _update_row(self, talk: Talk) -> None:
        """The device's row gets the entries it is said to lack; after that it lacks none that is held."""
        for entries_on_device, known, pages in zip(talk.table, talk.lease.row_synced, talk.lease.pages, strict=True):
            entries_on_device[known:] = pages[known:]
            assert all(page in (NULL_PAGE, entry) for page, entry in zip(pages, entries_on_device, strict=True))

    def _reserve(self, talk: Talk, length: int) -> bool:
        """Room in every book or nowhere; eviction may help once for each book."""
        for _ in range(1 + len(self.books)):
            before = accounts(self.store)
            try:
                self.store.reserve(talk.lease, length, [0] * len(self.books))
            except OutOfPages as short:
                assert accounts(self.store) == before
                self._evict(short.book, short.need - self.store.ledger.num_free(short.book))
            else:
                return True
        return False

    # --- results -----------------------------------------------------------------------------------------------

    @precondition(CAN["collect"])
    @rule(seed=seeds)
    def collect(self, seed: int) -> None:
        """The oldest step ran; what it did counts for the epochs it was launched in."""
        lines = self.in_flight.popleft()
        for line in lines:
            self.paper.run(line)
        self.store.collected(lines[0].step)
        for line in lines:
            if line.talk in self.talks and line.talk.lease.epoch == line.epoch:
                self._settle(line)

    def _settle(self, line: Launch) -> None:
        talk, before = line.talk, line.talk.lease.settled_len
        written = line.chunk or len(line.tokens)
        self.store.settle(talk.lease, line.step, written)
        assert talk.lease.settled_len == talk.lease.proven_len == before + written
        if not line.chunk:
            talk.tokens.extend(line.tokens)
        elif len(line.tokens) > talk.prefill_len:
            talk.tokens.append(line.tokens[-1])
        self._slide(talk)

    def _slide(self, talk: Talk) -> None:
        """What no continuation reads is let go, but for the window behind the commit point."""
        self.store.slide(talk.lease)
        if self.store.window_book is None:
            return
        lease, row = talk.lease, talk.lease.pages[self.store.window_book]
        kept_from = self._first_needed(floor_to(max(0, lease.settled_len - 1), self.page_size))
        for index in range(kept_from // self.page_size):
            assert row[index] == NULL_PAGE or lease.anchor[0] <= index * self.page_size < lease.anchor[1]

    @precondition(CAN["fail"])
    @rule(seed=seeds)
    def fail(self, seed: int) -> None:
        """The oldest step broke, and those after it with it: leases they name keep what results have proven."""
        first, last = self.in_flight[0][0].step, self.in_flight[-1][0].step
        for lines in self.in_flight:
            for line in lines:
                self.paper.ruin(line)
        self.in_flight.clear()
        for talk in self.talks:
            lease, proven = talk.lease, talk.lease.proven_len
            if lease.last_step >= first:
                expected = self._point_to_go_on(talk, proven)
                self.store.fall_back(lease)
                assert lease.settled_len == lease.proven_len == expected and not lease.claims
                self._rest(talk)
        self.store.collected(last)

    # --- getting shorter ---------------------------------------------------------------------------------------

    def _first_needed(self, length: int) -> int:
        window = next(book.window for book in self.books if book.window is not None)
        return floor_to(max(0, length - window), self.page_size)

    def _point_to_go_on(self, talk: Talk, length: int) -> int:
        """The largest point up to `length` at which no shared page would be written and the window is held."""
        lease, size = talk.lease, self.page_size
        for point in range(length, 0, -1):
            if point < lease.shared_len and point % size:
                continue
            if self.store.window_book is None:
                return point
            row = lease.pages[self.store.window_book]
            if NULL_PAGE not in row[self._first_needed(point) // size : ceil_div(point, size)]:
                return point
        return 0

    def _check_cut(self, talk: Talk, point: int) -> None:
        lease = talk.lease
        assert (lease.settled_len, lease.claims) == (point, [])
        assert lease.shared_len <= lease.settled_len and lease.proven_len <= lease.settled_len
        for pages in lease.pages:
            assert len(pages) == ceil_div(point, self.page_size)

    def _rest(self, talk: Talk) -> None:
        """A turn is over: the lease changes hands, and no page moves."""
        before = accounts(self.store)
        self.store.hand(talk.lease, "session")
        assert talk.lease.holder == "session"
        assert accounts(self.store) == before
        talk.running = False

    def _end(self, talk: Talk, target: int) -> None:
        lease, epoch = talk.lease, talk.lease.epoch
        point = self._point_to_go_on(talk, min(lease.claimed_len, len(talk.tokens), target))
        self.store.end_epoch(lease, target, len(talk.tokens))
        assert lease.epoch == epoch + 1 and lease.anchor == (0, 0)
        self._check_cut(talk, point)
        del talk.tokens[target:]
        self._rest(talk)

    @precondition(CAN["finish"])
    @rule(seed=seeds)
    def finish(self, seed: int) -> None:
        """A turn ends, perhaps with a few tokens too many; a step of it may be in flight."""
        rng = Random(seed)
        talk = self._pick(rng, running=True)
        self._end(talk, max(0, len(talk.tokens) - rng.choice([0, 0, 1, 2])))
        self._slide(talk)

    @precondition(CAN["abort"])
    @rule(seed=seeds)
    def abort(self, seed: int) -> None:
        """Back to the commit point, with all its KV if the turn began there or before: its window stayed."""
        talk = self._pick(Random(seed), running=True)
        expected = min(talk.lease.claimed_len, talk.commit_len)
        self._end(talk, talk.commit_len)
        assert talk.lease.settled_len == expected or not talk.can_roll_back

    @precondition(CAN["rewind"])
    @rule(seed=seeds)
    def rewind(self, seed: int) -> None:
        """Trim is the single way to shrink."""
        rng = Random(seed)
        talk = self._pick(rng, running=False)
        length = max(0, len(talk.tokens) - rng.choice([0, 1, 2, self.page_size, 100]))
        self._trim(talk, length)
        del talk.tokens[length:]

    def _trim(self, talk: Talk, length: int) -> None:
        point = self._point_to_go_on(talk, min(length, talk.lease.settled_len))
        self.store.trim(talk.lease, length)
        self._check_cut(talk, point)

    @precondition(CAN["resume"])
    @rule(seed=seeds)
    def resume(self, seed: int) -> None:
        """A next turn on the same lease; its last token runs, and so does a pair slot whose successor is new."""
        rng = Random(seed)
        talk = self._pick(rng, running=False)
        if len(talk.tokens) > self.length_max - ACCEPT_MAX:
            return
        lease = talk.lease
        talk.commit_len = len(talk.tokens)
        talk.tokens += self._tokens(rng, rng.randint(0 if talk.tokens else 1, ACCEPT_MAX))
        talk.prefill_len, talk.running = len(talk.tokens), True
        is_stale = self.pair and 0 < lease.settled_len == talk.commit_len
        self._trim(talk, min(lease.settled_len - is_stale, talk.prefill_len - 1))
        self._hand_to_turn(talk)

    # --- sharing -----------------------------------------------------------------------------------------------

    @precondition(CAN["publish"])
    @rule(seed=seeds)
    def publish(self, seed: int) -> None:
        """Whole settled pages go to the tree; where it has the same, the row changes to the tree's page."""
        self._publish(Random(seed).choice([talk for talk in self.talks if talk.may_publish]))

    def _publish(self, talk: Talk) -> None:
        lease, rows = talk.lease, [list(pages) for pages in talk.lease.pages]
        in_flight = any(line.talk is talk for lines in self.in_flight for line in lines)
        proven = lease.proven_len if in_flight else lease.settled_len
        key, shared = entries(talk.tokens, self.pair), lease.shared_len
        until, now = floor_to(min(proven, len(key)), self.page_size), self._later()
        if until > shared:
            self.shelf.publish(lease.scoped_salt, key[:until], shared // self.page_size, rows, now)
            talk.shared_key = key[:until]
        self.store.publish(lease, self._key(talk.tokens), now)
        assert lease.shared_len == max(shared, until)
        assert lease.pages == rows
        self.known.append(list(talk.tokens))

    @precondition(CAN["leave"])
    @rule(seed=seeds)
    def leave(self, seed: int) -> None:
        """A sequence finishes or is suspended: what it has goes to the tree, the lease goes away."""
        talk = self._pick(Random(seed))
        if talk.running:
            self._end(talk, len(talk.tokens))
        self._publish(talk)
        self._release(talk)

    @precondition(CAN["drop"])
    @rule(seed=seeds)
    def drop(self, seed: int) -> None:
        """A lease goes away with all it has, whatever is in flight."""
        self._release(self._pick(Random(seed)))

    def _release(self, talk: Talk) -> None:
        """A lease that goes gives back its own pages, and makes evictable what only it pinned."""
        lease, books = talk.lease, range(len(self.books))
        expected = [num_available(self.store, book) + num_freed(self.store, [lease], book) for book in books]
        now = self._later()
        self.shelf.touch(*talk.shared_prefix, now)
        self.store.release(lease, now)
        assert [num_available(self.store, book) for book in books] == expected
        assert lease.id not in self.store.leases
        self.talks.remove(talk)
        self.shelf.forget([talk.shared_prefix for talk in self.talks])

    @precondition(CAN["evict"])
    @rule(seed=seeds)
    def evict(self, seed: int) -> None:
        """The oldest go first, whole nodes at a time, and nothing that a lease pins."""
        rng = Random(seed)
        self._evict(rng.randrange(len(self.books)), rng.choice([0, 1, 1, 2, 3, 5, 100]))

    def _evict(self, book: int, count: int) -> None:
        tree = self.store.tree
        self.shelf.forget([talk.shared_prefix for talk in self.talks])
        places = self.shelf.places(tree, [talk.lease for talk in self.talks], book)
        tree.evict(book, count)
        gone = {
            number
            for number, place in places.items()
            if place.num_pages and (number not in tree.nodes or not tree.nodes[number].held(book))
        }
        self.shelf.evict(places, book, count, gone)
        self.shelf.forget([talk.shared_prefix for talk in self.talks])

    @precondition(CAN["match"])
    @rule(seed=seeds)
    def match(self, seed: int) -> None:
        """A look into the tree changes nothing, finds the longest usable prefix, and finds its pages."""
        rng = Random(seed)
        tokens, cache_salt = self._prompt(rng), rng.choice(SPACES)
        length, pages = self.shelf.longest(cache_salt, entries(tokens, self.pair))
        before = digest(self.store)
        found = self.store.tree.match(cache_salt, self._key(tokens))
        assert digest(self.store) == before
        assert (found.length if found else 0) == length
        if found is None:
            return
        assert found.node.start < found.length <= found.node.end
        for book, expected in enumerate(pages):
            path = found.node.path_pages(book)[: length // self.page_size]
            assert [page for page, want in zip(path, expected, strict=True) if want != NULL_PAGE] == [
                page for page in expected if page != NULL_PAGE
            ]

    # --- what always holds -------------------------------------------------------------------------------------

    @invariant()
    def everything_holds(self) -> None:
        self.shelf.forget([talk.shared_prefix for talk in self.talks])
        every_page_has_one_owner(self.store, self.in_flight)
        the_tree_holds_what_was_published(self.store, self.shelf, self.paper)
        evictable_is_what_no_lease_shares(self.store, self.shelf, self.talks)
        a_node_is_as_old_as_its_last_use(self.store, self.shelf, self.talks)
        rows_name_the_pages_of_their_tokens(self.shelf, self.talks)
        no_page_of_a_step_in_flight_is_reused(self.store, self.in_flight)

    def teardown(self) -> None:
        """Everything given back: the pool is free again."""
        if not hasattr(self, "store"):
            return
        while self.in_flight:
            self.collect(0)
        while self.talks:
            self._release(self.talks[0])
        for book, spec in enumerate(self.books):
            self._evict(book, spec.num_pages)
            assert self.store.ledger.num_free(book) == spec.num_pages - 1
        assert not self.store.tree.nodes


@pytest.mark.parametrize("pair", [False, True], ids=["token keys", "pair keys"])
@pytest.mark.parametrize("kinds", ["full", "window", "full + window"])
def test_cached_pages_are_found_pinned_and_evicted_as_promised(kinds: str, pair: bool) -> None:
    run_state_machine_as_test(lambda: TreeMachine(kinds, pair), settings=SETTINGS)
