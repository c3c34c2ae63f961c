"""The seam between the control plane and the device: a plan goes in, a result comes out.

Both are frozen columns, one entry per row of the step; nothing in flight is ever changed. The executor learns page
tables only from the deltas in the plans, applied in launch order. Built by sched, run by the executor; kv takes its
ids.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType, Protocol

import numpy as np
from numpy.typing import NDArray

from roost.sampling.params import SamplingParams
from roost.spec_shape import SpecShape

StepId = NewType("StepId", int)
RowId = NewType("RowId", int)

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Bools = NDArray[np.bool_]

KEPT_STATES = 3  # states of a row that one step keeps, at most
SAMPLED = -1  # in `next_tokens`: the token after the chunk is the one this step samples


class _ReadOnly:
    """Makes the arrays of a frozen dataclass read-only."""

    __slots__: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:  # the dataclass's fields
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value.setflags(write=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableDelta(_ReadOnly):
    """Changed entries of one book's table: `pages[offsets[i]:offsets[i+1]]` go to `rows[i]` from `firsts[i]` on."""

    rows: Ints  # [num_deltas]
    firsts: Ints  # [num_deltas] first page index
    offsets: Ints  # [num_deltas + 1]
    pages: Ints  # [offsets[-1]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RowSetup(_ReadOnly):
    """What the device must know of a row that begins, to choose its tokens."""

    row: RowId
    sampling: SamplingParams
    prompt_len: int
    min_len: int  # no stop id at positions [prompt_len, min_len): prompt_len + min_new_tokens
    stop_ids: tuple[int, ...]
    # [prompt_len + output_len] prompt and output so far; empty unless the sampling penalises, drafts are looked up or
    # there is a grammar
    tokens: Ints
    grammar: str = ""  # what the output must match; '': anything
    # whose texts drafts may be looked up in besides the row's own: rows of one scope share what they say; None: nobody
    scope: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StateColumns(_ReadOnly):
    """Where the rows of a step find the state of recurrent layers, and where they keep it.

    The state at position p is what the tokens before p have left. Inputs in [start, device length) are run through the
    recurrence again, those of the step's own tokens after them.
    """

    sources: Ints  # [num_rows] page of the state that a row starts from; the null page: nothing came before, zeros
    starts: Ints  # [num_rows] its position
    # [num_rows, KEPT_STATES] positions at which the state is kept, past `starts` and at most the end of a chunk, or the
    # length when a round starts; -1: none
    kept_at: Ints
    kept_in: Ints  # [num_rows, KEPT_STATES] pages for them; no other step ever writes these while they are held


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(_ReadOnly):
    """One launch. A row is either a prefill chunk or one decode (verify) round."""

    step: StepId
    shape: SpecShape  # S, K, T of a round that carries drafts
    rows: Ints  # [num_rows]
    epochs: Ints  # [num_rows] lease epoch the result will belong to
    is_prefill: Bools  # [num_rows]
    query_lens: Ints  # [num_rows] tokens the target runs: the chunk, or the nodes of the round (its width)
    start_positions: Ints  # [num_rows] first position of the chunk; -1 for a round: the device knows its length
    device_lens_max: Ints  # [num_rows] upper bound of the device length when the step starts
    firsts: Ints  # [num_books, num_rows] first position still held (the window frontier; 0 in a full book)
    ends: Ints  # [num_books, num_rows] positions the row may touch end here
    is_final: Bools  # [num_rows] prefill only: the chunk ends the prompt, so a token is sampled
    next_tokens: Ints  # [num_rows] prefill only: the token after the chunk, for draft-extend, or SAMPLED
    tokens: Ints  # [token_offsets[-1]] the chunks' tokens
    token_offsets: Ints  # [num_rows + 1]
    num_top_logprobs: Ints  # [num_rows] alternatives to report with each log-probability; -1: report none
    prompt_logprob_starts: Ints  # [num_rows] first position of the chunk whose next token is scored; -1: none
    prompt_logprob_ends: Ints  # [num_rows] first position past those
    setups: tuple[RowSetup, ...]  # rows that begin here, or begin again
    deltas: tuple[TableDelta, ...]  # one per book
    # [num_rows, MATCH_MAX + 1] by how many tokens a lookup finds again: nodes of a round that takes what followed; 0:
    # it does not, and the head drafts. None: there is one way to draft
    lookup_widths: Ints | None = None
    # nodes of a round whose drafts are not looked up, at most its `query_lens`: where the host computes, it verifies
    # no more than that
    head_width: int = 1
    states: StateColumns | None = None  # None: the model has no recurrent layers
    shown_row: int = -1  # whose drafted tree is to be brought back, for people who watch; -1: none

    @property
    def has_chunks(self) -> bool:
        """Whether a row is a prefill chunk: without any, all are rounds."""
        return bool(np.count_nonzero(self.is_prefill))


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobColumns(_ReadOnly):
    """Log-probabilities under the model itself, row by row: entries `offsets[i]:offsets[i+1]` belong to row i."""

    offsets: Ints  # [num_rows + 1]
    logprobs: Floats  # [offsets[-1]]
    top_ids: Ints  # [offsets[-1], the most alternatives any row wants] best first
    top_logprobs: Floats  # the same


@dataclass(frozen=True, slots=True, kw_only=True)
class LookupColumns(_ReadOnly):
    """What was looked up for the rounds of a step, whether or not it was drafted; of no meaning for other rows."""

    match_lens: Ints  # [num_rows] tokens that were found again; 0: none
    is_used: Bools  # [num_rows] whether the round's first drafts are these, and not the head's
    num_nodes: Ints  # [num_rows] that were verified
    drafts: Ints  # [num_rows, lookup_steps] the tokens that followed there


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftTree(_ReadOnly):
    """The tree that was drafted for one row, and what of it was accepted."""

    place: int  # of the row in the plan
    tokens: Ints  # [num_nodes] the root's and the drafts'
    parents: Ints  # [num_nodes] the root's is -1
    accepted: Ints  # nodes of the accepted path, the root first


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult(_ReadOnly):
    """What a step did, row by row, in the plan's order."""

    step: StepId
    rows: Ints  # [num_rows]
    epochs: Ints  # [num_rows]
    accept_lens: Ints  # [num_rows] tokens added to the output: 0 after a chunk that is not final
    tokens: Ints  # [num_rows, accept_max] the accepted tokens, then padding
    lengths: Ints  # [num_rows] device length after the step
    logprobs: LogprobColumns | None = None  # of the accepted tokens of all rows, if one wants them
    prompt_logprobs: LogprobColumns | None = None  # of the tokens after those positions of prompts
    num_forced: Ints | None = None  # [num_rows] accepted drafts that a grammar left no choice about; None: none
    lookups: LookupColumns | None = None  # if drafts were looked up
    tree: DraftTree | None = None  # if the plan asks for one
    errors: Mapping[int, str] = field(default_factory=dict)  # by place: why a row cannot go on, although the step did


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """The receipt of a launch."""

    step: StepId


class Executor(Protocol):
    """Runs steps in launch order."""

    def launch(self, plan: StepPlan) -> Ticket:
        """Start a step and return at once."""
        ...

    def collect(self, ticket: Ticket) -> StepResult:
        """Wait for a step; raises StepFailure if it, or one before it, broke."""
        ...
