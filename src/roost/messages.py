"""Messages between the engine and whoever talks to it: frozen data, nothing else.

Clients post commands with a reply function; the engine answers with events. Every submitted request gets exactly one
terminal event: Finished or Refused. Imported by sched and by everything above it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from roost.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Ask for one generation, alone or as a turn of a session (then `tokens` are the new ones)."""

    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int | None = None  # absent: what context and pool allow
    min_new_tokens: int = 0  # nothing stops the output before
    sampling: SamplingParams = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()  # texts that end the output
    stop_in_special: bool = False  # whether special tokens count as text, for `stop`
    # alternatives to report with each output token's log-probability; None: neither
    num_top_logprobs: int | None = None
    prompt_logprobs_from: int | None = None  # first prompt position of interest; the tokens after it are scored
    priority: int = 0  # larger ones go first
    timeout_ms: int | None = None  # ended as "timeout" if it has not ended by itself
    shares_with: str | None = None  # starts when that request has its prompt in the prefix cache
    session_id: str | None = None
    queue: bool = False  # wait for a busy session instead of a 409
    turn: int | None = None  # the number it shall have: turns of its session that were committed before it
    cache_salt: str = ""  # prefixes are shared only under the same salt; a session has its own
    client: str = ""  # who asks, by the name of their key: whose sessions and cache, limits and share; '' without names


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Stop a request wherever it is; its session, if any, goes back to its last commit point."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Open an empty session; answered with its SessionState."""

    session_id: str
    cache_salt: str = ""
    ttl_ms: int | None = None  # closed when no turn has had it for so long; absent: --session-ttl-s
    max_tokens: int | None = None  # most tokens it may come to; absent: --max-session-tokens
    client: str = ""  # who opens it: whose it is, and whose limits count


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Close a session; a running turn ends as aborted first."""

    session_id: str
    client: str = ""  # whose session it is


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindSession:
    """Cut a session back; exactly one of `turn` and `length` is given. Refused while a turn has it or waits for it."""

    session_id: str
    turn: int | None = None  # committed turns to keep
    length: int | None = None  # tokens to keep
    client: str = ""  # whose session it is


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSession:
    """Open a session with another's tokens, turns and options; answered with the new one's SessionState."""

    session_id: str
    new_id: str
    client: str = ""  # whose session it is, and whose the new one


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSession:
    """Ask how a session stands."""

    session_id: str
    client: str = ""  # whose session it is


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSessions:
    """Ask how all sessions stand."""

    client: str | None = None  # only those of this one


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Drop everything that is cached; refused while any request has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStats:
    """Ask how things stand."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost."""

    prompt_tokens: int  # history included; the input alone for a turn that never got its session
    cached_tokens: int  # of those, found in place when the request first started
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecStats:
    """What speculation did for one request, or for all: live rows only."""

    rounds: int = 0  # that carried drafts
    drafts_offered: int = 0
    drafts_accepted: int = 0  # before the output was cut
    overshoot: int = 0  # accepted tokens past the end of the output
    histogram: tuple[int, ...] = ()  # rounds by accept_len - 1

    @property
    def draft_length(self) -> float:
        """Drafts that a round carried on average; 0.0 without rounds."""
        return self.drafts_offered / self.rounds if self.rounds else 0.0

    @property
    def accept_length(self) -> float:
        """Tokens a round added to the output on average, bonus included; 0.0 without rounds."""
        return (self.rounds + self.drafts_accepted) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    """A token's log-probability under the model itself (no option applied), and its best alternatives."""

    logprob: float
    top_logprobs: tuple[tuple[int, float], ...] = ()  # ids with their log-probabilities, best first


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprobs:
    """Log-probabilities of consecutive tokens as columns; whoever reads them makes a `TokenLogprob` of each.

    A chunk of a prompt can have 50,000 alternatives, and the engine's thread has other things to do.
    """

    num_top_logprobs: int = 0  # alternatives with each
    logprobs: bytes = b""  # float32 [len]
    top_ids: bytes = b""  # int32 [len, num_top_logprobs], best first
    top_logprobs: bytes = b""  # float32, the same

    def __len__(self) -> int:
        return len(self.logprobs) // _ITEM

    def __iter__(self) -> Iterator[TokenLogprob]:
        columns = memoryview(self.top_ids).cast("i"), memoryview(self.top_logprobs).cast("f")
        best = zip(*(column.tolist() for column in columns), strict=True)
        for logprob in memoryview(self.logprobs).cast("f").tolist():
            yield TokenLogprob(logprob=logprob, top_logprobs=tuple(islice(best, self.num_top_logprobs)))

    def first(self, number: int) -> "TokenLogprobs":
        """Those of the first tokens."""
        end = number * self.num_top_logprobs * _ITEM
        return TokenLogprobs(
            num_top_logprobs=self.num_top_logprobs,
            logprobs=self.logprobs[: number * _ITEM],
            top_ids=self.top_ids[:end],
            top_logprobs=self.top_logprobs[:end],
        )


_ITEM = 4  # bytes of a number in these columns
NO_LOGPROBS = TokenLogprobs()


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """More output."""

    request_id: str
    tokens: tuple[int, ...]
    logprobs: TokenLogprobs = NO_LOGPROBS  # one per token, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLogprobs:
    """Log-probabilities of prompt tokens `start`, `start + 1`, …; they come in order, each once, before the output."""

    request_id: str
    start: int
    logprobs: TokenLogprobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Terminal: the request ended after it was accepted."""

    request_id: str
    reason: str  # stop, length, abort, timeout, error
    usage: Usage
    max_new_tokens: int  # as resolved; as asked (0 if absent) for a turn that never got its session
    spec: SpecStats
    message: str = ""  # what went wrong, for an error or a timeout
    matched: int | str | None = None  # the stop id or stop string, for a stop
    prompt_logprobs_from: int | None = None  # where the prompt's log-probabilities really begin, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Terminal for a request, or the answer to a session command that was not carried out."""

    request_id: str
    status: int
    message: str
    param: str = ""  # which parameter is at fault, if one is
    usage: Usage | None = None  # of the turn that has this number already, if that is why


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """How a session stands."""

    session_id: str
    length: int  # tokens of its record, those of a running turn included
    resident: int  # of these, tokens whose KV its lease holds now
    turns: int  # committed
    state: str  # idle, waiting (its turn is queued), running, closing
    idle_ms: int  # since it was last used; 0 while a turn has it
    ttl_ms: int | None
    max_tokens: int | None
    cache_salt: str
    client: str = ""  # whose it is


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStates:
    """How all sessions stand, in the order they were opened."""

    sessions: tuple[SessionState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """The session is gone."""

    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """The cache is empty."""

    num_pages: int  # that became free, in all books


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Pages of one book by account."""

    window: int | None
    total: int
    free: int
    leased: int
    cached: int
    retiring: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """How things stand, and sums since the start."""

    queued: int
    running: int
    sessions: int
    waiting_for: str  # why the head of the queue is not running
    steps: int  # collected
    step_age_ms: int  # since the last one was collected, or since there was nothing to do
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    retractions: int  # preemptions, under the name that clients know
    failed_steps: int
    endings: tuple[tuple[str, int], ...]  # requests by finish reason
    pools: tuple[PoolStats, ...]
    spec: SpecStats
    draft_lengths: tuple[int, ...]  # rounds by the number of drafts they carried, none included
    sessions_resident: int  # with a lease of their own, or on a running turn
    session_tokens: int  # whose KV idle sessions keep
    sessions_opened: int  # forks included
    sessions_closed: int  # by command
    sessions_expired: int  # by their ttl
    sessions_reclaimed: int  # how often an idle one had to leave its KV to the cache
    step_rows_max: int | None = None  # what larger steps that broke have left a step; None: no limit
    step_tokens_max: int | None = None  # the same, of prompts and drafts together


SessionCommand = OpenSession | CloseSession | RewindSession | ForkSession | GetSession | GetSessions
Command = Submit | Abort | SessionCommand | FlushCache | GetStats
SessionEvent = SessionState | SessionStates | SessionClosed
Event = Tokens | PromptLogprobs | Finished | Refused | SessionEvent | Flushed | Stats
Reply = Callable[[Event], None]
