"""States of recurrent layers: at which positions a lease has one, and which it lets go.

    0 .. tokens that state p holds .. p .. inputs, run again from p .. settled

A state is written by one step, for one position, and never changed: leases and the prefix tree share its page as they
share KV. A sequence can go on from any length that a state and the inputs behind it reach; between two states nothing
can be had but by running its tokens again. Called by the store.
"""

from collections.abc import Mapping
from dataclasses import replace

from roost.kv.lease import PLANNED, KeptState, Lease, StateKind
from roost.kv.ledger import Ledger, leased
from roost.kv.pages import NULL_PAGE, BookId, StatePool, ceil_div
from roost.kv.radix import PrefixTree
from roost.step import StepId


class States:
    """The states of all leases."""

    def __init__(
        self,
        pool: StatePool,
        ledger: Ledger,
        tree: PrefixTree,
        page_size: int,
        book: BookId,
        input_book: BookId,
        replayed_max: int,
    ) -> None:
        """`book` is the ledger's number of the pool; `input_book` has the inputs that are run again, a few at most."""
        self.pool = pool
        self.book = book
        self.input_book = input_book
        self._ledger = ledger
        assert tree.state_cache is not None
        self._tree, self._cache = tree, tree.state_cache
        self.page_size = page_size
        self._replayed_max = replayed_max

    # --- which there are ---------------------------------------------------------------------------------------

    def last_at(self, lease: Lease, length: int, *, proven: bool = False) -> int:
        """The last position up to `length` that has a state; 0, where nothing has happened, always has one.

        `proven`: its step must have been collected.
        """
        most = self._ledger.collected if proven else PLANNED - 1
        own = (position for position, state in lease.states.items() if state.step <= most)
        return max((each for each in (*own, *lease.tree_states) if each <= length), default=0)

    def reach(self, lease: Lease, length: int) -> int:
        """The last length up to `length` that a state and the inputs behind it reach."""
        position = self.last_at(lease, length)
        is_near = length - position <= self._replayed_max
        return length if is_near and self._has_inputs(lease, position, length) else position

    def _has_inputs(self, lease: Lease, first: int, last: int) -> bool:
        """Whether a lease holds the inputs of positions [first, last)."""
        pages = lease.pages[self.input_book]
        end = ceil_div(last, self.page_size)
        return first == last or (end <= len(pages) and NULL_PAGE not in pages[first // self.page_size : end])

    # --- growing -----------------------------------------------------------------------------------------------

    def reserve(self, lease: Lease, wanted: Mapping[int, StateKind]) -> None:
        """Pages for what the next step keeps; OutOfPages, with nothing moved, where there are too few."""
        pages = self._ledger.take(self.book, len(wanted), leased(lease.id))
        for page, (position, kind) in zip(pages, wanted.items(), strict=True):
            assert position not in lease.states, (position, lease)
            lease.states[position] = KeptState(page=page, step=PLANNED, kind=kind)

    def launched(self, lease: Lease, step: StepId) -> None:
        """The step that writes what was reserved."""
        for position, state in lease.states.items():
            if state.step == PLANNED:
                lease.states[position] = replace(state, step=step)

    def begin_turn(self, lease: Lease, turn_end: int, rollback_len: int) -> None:
        """A turn begins behind one that ended there: its state is kept once it is passed, or if it is there already.

        So is the state from which a rollback to `rollback_len` goes on, and once the turn has ended a fork from before
        it, until the next one begins.
        """
        lease.turn_end, lease.rollback_state = turn_end, self.last_at(lease, max(0, rollback_len - 1), proven=True)
        if turn_end in lease.states:
            lease.states[turn_end] = replace(lease.states[turn_end], kind=StateKind.TURN_END)

    def open(self, lease: Lease) -> None:
        """A new lease goes on from the state at the end of what it shares."""
        if lease.shared_len:
            self._pin(lease, lease.shared_len)

    # --- letting go --------------------------------------------------------------------------------------------

    def slide(self, lease: Lease) -> None:
        """Let go of states that the settled length is past, but for what they are kept for."""
        last = self.last_at(lease, lease.settled_len - 1, proven=True)
        keep = {last, self._last_at_page(lease, lease.settled_len - 1), *self._lasting(lease)}
        for position in [each for each in (*lease.states, *lease.tree_states) if each < last]:
            if position != lease.rollback_state and (position not in keep or position in lease.tree_states):
                self._let_go(lease, position)

    def drop_lasting(self, lease: Lease) -> int:
        """Let go of what is kept for later alone, where states are short; returns how many there were."""
        spare = self.spare(lease)
        for position in spare:
            self._let_go(lease, position)
        return len(spare)

    def spare(self, lease: Lease) -> list[int]:
        """States that are kept for later alone, and let go of where states are short."""
        last = self.last_at(lease, lease.settled_len - 1, proven=True)
        return [each for each in self._lasting(lease) if each < last and each != lease.rollback_state]

    def cut(self, lease: Lease, length: int) -> None:
        """Let go of every state past a length."""
        lease.rollback_state = min(lease.rollback_state, max(0, length))
        for position in [each for each in (*lease.states, *lease.tree_states) if each > length]:
            self._let_go(lease, position)

    def forget_unproven(self, lease: Lease) -> None:
        """A step broke: what it, or one after it, was to write is not there."""
        for position in [each for each, state in lease.states.items() if state.step > self._ledger.collected]:
            self._let_go(lease, position)

    def _last_at_page(self, lease: Lease, length: int) -> int:
        """The last of its states up to `length` that the prefix tree could have."""
        collected, size = self._ledger.collected, self.page_size
        own = (each for each, state in lease.states.items() if state.step <= collected and each % size == 0)
        return max((each for each in own if each <= length), default=0)

    def _lasting(self, lease: Lease) -> list[int]:
        """States that are kept for later: the last ends of turns, and those of prompts that are apart, and the last."""
        ends = sorted(each for each, state in lease.states.items() if state.kind is StateKind.TURN_END)
        kept, before = ends[-self.pool.num_turns :] if self.pool.num_turns else [], lease.shared_len
        prompts = sorted(each for each, state in lease.states.items() if state.kind is StateKind.PROMPT)
        for position in prompts:
            if position - before >= self.pool.spacing or position == prompts[-1]:
                kept.append(position)
                before = position
        return kept

    def _let_go(self, lease: Lease, position: int) -> None:
        if position in lease.tree_states:
            self._cache.unpin(lease.tree_states.pop(position), lease)
        else:
            own = lease.states.pop(position)
            self._ledger.release(self.book, [own.page], leased(lease.id), lease.last_step)

    # --- sharing -----------------------------------------------------------------------------------------------

    def publish(self, lease: Lease) -> None:
        """Give the tree what it can have of a lease's states; the lease goes on from the tree's."""
        needed_from = self.last_at(lease, lease.settled_len - 1, proven=True)
        for position, own in sorted(lease.states.items()):
            is_whole = position % self.page_size == 0 and position <= lease.shared_len
            if not is_whole or own.step > self._ledger.collected:
                continue
            node = self._tree.node_ending_at(lease, position)
            if node.state == NULL_PAGE:
                del lease.states[position]
                self._cache.take(node, own.page, lease)
            else:
                self._let_go(lease, position)
            if position >= needed_from:
                self._pin(lease, position)

    def _pin(self, lease: Lease, position: int) -> None:
        node = self._tree.node_ending_at(lease, position)
        self._cache.pin(node)
        lease.tree_states[position] = node
