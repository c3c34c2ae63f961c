"""Request: one submission from acceptance to its terminal event, and the launched steps it is in.

Plain data. Lengths are not here: they live in the lease. Changed by intake, admission, planner and settle.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Protocol, Self

from roost.draft_length.lookups import RowDrafts
from roost.errors import CapacityError, RequestError
from roost.kv.lease import Lease
from roost.messages import Reply, Submit
from roost.sched.counters import SpecCounters
from roost.session.table import Turn
from roost.step import RowId, StepPlan, Ticket


class StopStringFinder(Protocol):
    """Looks for stop strings in one output."""

    def skip(self, tokens: Sequence[int]) -> None:
        """Take tokens that cannot stop the output."""
        ...

    def feed(self, tokens: Sequence[int]) -> tuple[int, str] | None:
        """Index of the token that completes a stop string, and which one, if any of these does."""
        ...


NewStopFinder = Callable[[tuple[str, ...], bool], StopStringFinder]  # (stop strings, special tokens are text)
# (grammar, who is told why it cannot be used, None if it can): returns at once
StartCompiling = Callable[[str, Callable[[RequestError | CapacityError | None], None]], None]


class Mark(IntEnum):
    """What settle shall do with a request when it next runs; a larger one overrides."""

    NONE = 0  # the one that is false
    PREEMPT = 1  # preempt: back to the queue without its pages
    ABORT = 2


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """An accepted request."""

    submit: Submit
    turn: Turn
    reply: Reply
    arrival: int  # order of acceptance; kept when it is preempted
    spec_counters: SpecCounters
    drafts: RowDrafts  # what drafts have brought it
    max_new_tokens: int = 0
    stop_finder: StopStringFinder | None = None  # if it has stop strings
    deadline: int | None = None  # of the clock, in nanoseconds
    leader: Self | None = None  # whose prompt it waits to share
    followers: list[Self] = field(default_factory=list)  # who waits for its prompt to be shared
    prompt_logprobs_next: int | None = None  # first prompt position whose next token is still to be scored
    prompt_logprobs_from: int | None = None  # the first of all: as asked, raised to what was inherited
    row: RowId | None = None  # its request slot on the device, while it runs
    row_begins: bool = False  # the device has not been told how this row is sampled
    mark: Mark = Mark.NONE
    num_overtaken: int = 0  # how often one behind it started first, for want of its pages
    cached_len: int = -1  # of the prompt, what it found in place when it first started
    num_failures: int = 0  # steps that broke under it, since it last got past `failed_len`
    failed_len: int = -1  # where: the length it would have had after the last one

    @property
    def id(self) -> str:
        """The client's name for it."""
        return self.submit.request_id

    @property
    def order(self) -> tuple[int, int]:
        """Its place in every line: by priority, then by arrival."""
        return -self.submit.priority, self.arrival

    @property
    def lease(self) -> Lease:
        """Its lease; only a running request has one."""
        assert self.turn.lease is not None, self.id
        return self.turn.lease

    @property
    def output_len(self) -> int:
        """Tokens returned so far."""
        return len(self.turn.record) - self.turn.prompt_len if self.turn.started else 0

    @property
    def length_max(self) -> int:
        """Tokens it can come to, prompt and output."""
        return self.turn.full_prompt_len + self.max_new_tokens

    @property
    def prompt_logprobs_pending(self) -> int | None:
        """First prompt position that has to run for its log-probability; None if none has."""
        has_any = self.prompt_logprobs_next is not None and self.prompt_logprobs_next < self.turn.full_prompt_len - 1
        return self.prompt_logprobs_next if has_any else None

    @property
    def in_prefill(self) -> bool:
        """Whether part of its prompt has not been launched."""
        return self.lease.claimed_len < self.turn.prefill_len


@dataclass(slots=True, kw_only=True, eq=False)
class LaunchedStep:
    """A launched step and whom its results belong to, in the plan's order."""

    plan: StepPlan
    ticket: Ticket | None = None  # None: it is not launched yet, or the launch itself failed
    requests: tuple[Request, ...]
    leases: tuple[Lease, ...]
    chunks: tuple[int, ...]  # tokens of a prefill chunk; 0 for a round
    round_width: int  # nodes of its rounds, but for those whose drafts are looked up
    planned_at: int = 0  # of the clock, when its planning began
    launched_at: int = 0
