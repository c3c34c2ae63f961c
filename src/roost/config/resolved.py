"""The configuration as the engine uses it: what a model declares, and every number derived from both.

Frozen; made by `config.resolve` alone. Everything after start-up sees `Resolved`, never raw options.
"""

from dataclasses import dataclass

from roost.attention.registry import Backend
from roost.clients import ClientLimits
from roost.config.options import MemoryConfig, SchedConfig, SessionConfig
from roost.drafters.registry import DrafterKind
from roost.kv.pages import Book, StatePool, ceil_div, ceil_to
from roost.spec_shape import SpecShape
from roost.spec_widths import Widths


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What a model's layers need of the KV plane, declared by the model."""

    vocab_size: int
    window: int | None = None  # sliding window of its window layers, None without any
    has_full_layers: bool = True
    context_max: int | None = None  # positions it was made for, None if it does not say
    recurrent_state: bool = False  # some layers keep a state that is not a list of tokens' KV
    sinks: bool = False  # its heads have attention sinks


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The configuration as the engine uses it: checked, with every derived number in one place."""

    backend: Backend
    memory: MemoryConfig
    sched: SchedConfig
    session: SessionConfig
    clients: dict[str, ClientLimits]  # by name; those without limits of their own need not be there
    drafter: DrafterKind | None  # who drafts; None: nobody
    spec: SpecShape
    lookup: str  # where drafts are looked up, as --spec-lookup says it
    widths: Widths  # of rounds, by how many a step decodes
    vocab_size: int
    context: int
    chunk: int  # most prompt tokens of a step
    books: tuple[Book, ...]  # full first, then window; at least one
    states: StatePool | None  # of recurrent layers, whose inputs the window book keeps; None: the model has none
    reserves: tuple[int, ...]  # per book: positions a round may need past the device length
    graphs: bool  # whether steps are captured as CUDA graphs, where the device can
    step_sizes: tuple[int, ...]  # tokens that a captured step with prefill chunks can have, in order; empty: none is

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.memory.page_size

    @property
    def depth(self) -> int:
        """Results that may be in flight while the next step is planned."""
        return 1 if self.sched.overlap else 0

    @property
    def num_rows(self) -> int:
        """Device rows: a finished row rests while a launched step may still touch it."""
        return self.sched.max_running * (1 + self.depth)

    @property
    def row_width(self) -> int:
        """Positions of a row: the context and both rounds' reserve, in whole pages."""
        return ceil_to(self.context + 2 * max(self.reserves), self.page_size)

    @property
    def pools(self) -> tuple[Book | StatePool, ...]:
        """The books, and last the states of recurrent layers if there are any: as the ledger numbers them."""
        return self.books if self.states is None else (*self.books, self.states)

    def length_to_fit(self, book: int, length_max: int) -> int:
        """Positions that must fit a book for a request that can come to `length_max` tokens."""
        return length_max + self.reserve_of(book) + self.spec.accept_max

    def reserve_of(self, book: int) -> int:
        """Positions that a round may need past the device length in a book; states are none."""
        return self.reserves[book] if book < len(self.books) else 0

    def pages_to_hold(self, book: int, length: int) -> int:
        """Most pages of `book`, or states, that a sequence of up to `length` positions can need at one time."""
        if book == len(self.books):
            return self.states_to_hold
        pages = ceil_div(length, self.page_size)
        window = self.books[book].window
        if window is None:
            return pages
        # Three windows may be apart: behind the turn's start, behind its commit point and behind its end. Then what
        # the steps in flight write. A range can touch two pages more than its length says.
        kept = self.chunk if self.states is None else self.states.interval  # of a chunk
        in_flight = (1 + self.depth) * max(kept, self.spec.accept_max) + self.reserves[book]
        ranges = 3 * (ceil_div(window, self.page_size) + 2) + ceil_div(in_flight, self.page_size) + 2
        return min(pages, ranges)

    @property
    def states_to_hold(self) -> int:
        """Most states that a running sequence can need at one time.

        One behind the turn's start; the last of all and, where intervals are shorter than pages, at a page's end; what
        the steps in flight keep of these; and at a turn's start the end of the turn before.
        """
        assert self.states is not None
        num_each = 1 if self.states.interval >= self.page_size else 2
        return 1 + num_each * (1 + 1 + self.depth) + 1
