"""Lease: the one object that owns a sequence's KV pages and lengths.

    0 ........ shared ........ settled ........ claimed ........ device max .... allocated ........ row width
      pages of the   own pages,      launched steps   launched steps   reserved
      prefix tree    KV is known     will write it    may write it     pages

Plain data and what derives from it; only the store changes it. A lease has a holder (a turn or a session), and its
pages are accounted to the lease id, so that a change of holder moves nothing. Of what is settled, results have
confirmed `proven`; a user is promised what is claimed, as far as its tokens are known (`committed_len`).

Where a model has recurrent layers, a lease has states of them, too: its own, and some of the tree's that it needs.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import NewType

from roost.kv.node import Node
from roost.kv.pages import Book, PageId
from roost.step import StepId

LeaseId = NewType("LeaseId", int)
TurnId = NewType("TurnId", int)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What one launched step is certain to write to a lease, and at most may write."""

    step: StepId
    size: int  # the chunk's tokens, or 1 (the root) for a round
    most: int  # the chunk's tokens, or what a round of its width can accept


PLANNED = StepId(1 << 62)  # in place of the step that writes a state: it has not been launched


class StateKind(Enum):
    """What a state of recurrent layers is kept for."""

    RUNNING = "running"  # the sequence goes on from it; let go once there is a later one
    PROMPT = "prompt"  # at a page's end, for the prefix cache
    TURN_END = "turn end"  # where a turn of a session ended, to be rewound to


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """A state of recurrent layers that a lease owns."""

    page: PageId
    step: StepId  # that writes it; no other step ever does
    kind: StateKind


@dataclass(slots=True, kw_only=True, eq=False)
class Lease:
    """Pages and lengths of one sequence."""

    id: LeaseId
    holder: TurnId | str  # the turn that runs on it, or the id of the session that keeps it
    scoped_salt: str  # only leases with the same one share pages of the prefix tree
    pages: list[list[PageId]]  # per book, by page index; the tree owns those below `shared_len`
    node: Node  # deepest pinned node of the tree: the end of the shared prefix
    shared_len: int
    settled_len: int
    proven_len: int  # settled by a result; past it, an ended epoch may have settled what a step is still writing
    evicted_len: int = 0  # window frontier: pages before it are not held (but for the anchor)
    anchor: tuple[int, int] = (0, 0)  # window positions kept for a rollback while a turn runs, page-aligned
    pinned_from: int = 0  # window pages of the tree are pinned in [pinned_from, shared_len)
    states: dict[int, KeptState] = field(default_factory=dict)  # of recurrent layers, by position
    turn_end: int = 0  # where the session's turn before ended, as a state is to be kept of it; 0: there is none
    rollback_state: int = 0  # position of the state that a rollback of its last turn goes on from, or a fork before it
    tree_states: dict[int, Node] = field(default_factory=dict)  # those of the tree that it has pinned, by position
    epoch: int = 0
    last_step: StepId = StepId(-1)  # last launched step that names this lease
    claims: list[Claim] = field(default_factory=list)
    row_synced: list[int] = field(default_factory=list)  # per book: leading entries that the device's page table has

    @property
    def claimed_len(self) -> int:
        """Length once every launched step has written what it is certain to write."""
        length = self.settled_len
        for claim in self.claims:
            length += claim.size
        return length

    @property
    def device_len_max(self) -> int:
        """Upper bound of the length on the device: every host size comes from it."""
        length = self.settled_len
        for claim in self.claims:
            length += claim.most
        return length

    def first_own(self, book: Book, page_size: int) -> int:
        """Index of its first page of a book that the tree does not own: inputs are never shared."""
        return 0 if book.is_replayed else self.shared_len // page_size

    def committed_len(self, known_len: int) -> int:
        """Length that may be promised to a user, given how many tokens are known."""
        return min(self.claimed_len, known_len)
