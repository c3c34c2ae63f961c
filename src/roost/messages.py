"""Messages between the engine and its clients (the server and the library): frozen data, nothing else.

Clients post commands with a reply function; the engine answers with events. Every submitted request gets exactly one
terminal event: Finished or Refused. Imported by sched and by everything above it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from roost.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0)
GRAMMAR_FAULT = "grammar: cannot be followed to its end: "  # begins the cause of an error that is the grammar's own


@dataclass(frozen=True, slots=True, kw_only=True)
class Submit:
    """Ask for one generation, alone or as a turn of a session (then `tokens` are the new ones)."""

    request_id: str
    tokens: tuple[int, ...]
    max_new_tokens: int | None = None  # absent: as many as context and KV pool allow
    min_new_tokens: int = 0  # no stop condition counts before
    sampling: SamplingParams = GREEDY
    stop_token_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()  # stop strings
    stop_in_special: bool = False  # whether stop strings are looked for in the text of special tokens too
    # report each output token's log-probability with so many alternatives; None: none of it
    num_top_logprobs: int | None = None
    prompt_logprobs_from: int | None = None  # report log-probabilities of the prompt tokens after this position
    priority: int = 0  # higher ones go first
    timeout_ms: int | None = None  # if it has not finished by then it ends with the reason "timeout"
    shares_with: str | None = None  # follow this request: start once its prompt is in the prefix cache
    session_id: str | None = None
    queue: bool = False  # wait for a busy session; otherwise it is refused with 409
    turn: int | None = None  # its number: how many turns of its session must be committed before it
    cache_salt: str = ""  # prefixes are shared only under the same salt; a session has its own
    grammar: str = ""  # what the output must match, as llguidance writes it: compiled before; '': anything
    client: str = ""  # name of the API key that asks, which has its own sessions, cache and limits; '' without names
    known_len: int | None = None  # tokens that its session has before it, as the sender knows; others: refused with 409
    note: str = ""  # kept beside the turn in the journal, for `GetHistory`


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort:
    """Abort a request, queued or running; its session, if any, goes back to its last commit point."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenSession:
    """Open an empty session; answered with its SessionState."""

    session_id: str
    cache_salt: str = ""
    ttl_ms: int | None = None  # closed when it has been idle for so long; absent: --session-ttl-s
    max_tokens: int | None = None  # maximum length of its history; absent: --max-session-tokens
    shares: bool = False  # the KV of each committed turn goes to the prefix cache at once, for forks to find
    client: str = ""  # its owner, whose limits apply
    journaled: bool = True  # whether it goes on after the engine has ended, where there is a journal; so do its forks


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """Close a session; a running turn is aborted first."""

    session_id: str
    client: str = ""  # whose session it is


@dataclass(frozen=True, slots=True, kw_only=True)
class RewindSession:
    """Cut a session back; exactly one of `turn` and `length` is given. Refused while a turn holds or awaits it."""

    session_id: str
    turn: int | None = None  # committed turns to keep
    length: int | None = None  # tokens to keep
    client: str = ""  # whose session it is


@dataclass(frozen=True, slots=True, kw_only=True)
class ForkSession:
    """Open a session with another's tokens, turns and options; answered with the new one's SessionState.

    With `turn` or `length`, at most one of them, the new session ends there; then a turn may hold the other one, of
    which only what is committed counts. Refused otherwise while a turn holds or awaits it.
    """

    session_id: str
    new_id: str
    turn: int | None = None  # committed turns to keep
    length: int | None = None  # tokens to keep
    client: str = ""  # owner of both sessions


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSession:
    """Ask for the state of a session."""

    session_id: str
    client: str = ""  # whose session it is


@dataclass(frozen=True, slots=True, kw_only=True)
class GetHistory:
    """Ask for the committed turns of a session, by somebody who has not seen them; answered with SessionHistory."""

    session_id: str
    client: str = ""  # whose session it is


@dataclass(frozen=True, slots=True, kw_only=True)
class GetSessions:
    """Ask for the states of all sessions."""

    client: str | None = None  # only those of this client


@dataclass(frozen=True, slots=True, kw_only=True)
class FlushCache:
    """Empty the KV cache; refused while any request has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetStats:
    """Ask for the engine's statistics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GetFrame:
    """Ask for what the engine is doing, for people who watch."""

    whole: bool = False  # everything, not only what has changed since the last frame
    watching: bool = True  # False: nobody watches any more


@dataclass(frozen=True, slots=True, kw_only=True)
class GetPages:
    """Ask who owns each page."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompileGrammar:
    """Compile a grammar that requests will name, beside the engine; answered when that is done, or refused."""

    grammar: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What a request cost."""

    prompt_tokens: int  # history included; for a turn that never got its session, its input alone
    cached_tokens: int  # of these, tokens whose KV was in place when the request first started
    completion_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecStats:
    """Speculation statistics of one request, or of all; results of ended epochs are not counted."""

    rounds: int = 0  # with drafts
    drafts_offered: int = 0
    drafts_accepted: int = 0  # overshoot included
    drafts_forced: int = 0  # of these, tokens that a grammar left no choice about
    overshoot: int = 0  # accepted tokens past the end of the output
    lookup_rounds: int = 0  # of the rounds, those in which looked-up drafts went before a head's; 0 without a head
    lookup_offered: int = 0  # of the drafts offered, those that were looked up in such rounds
    lookup_accepted: int = 0  # of these, accepted ones; overshoot included
    histogram: tuple[int, ...] = ()  # rounds by accept_len - 1

    @property
    def draft_length(self) -> float:
        """Average number of drafts of a round; 0.0 without rounds."""
        return self.drafts_offered / self.rounds if self.rounds else 0.0

    @property
    def accept_length(self) -> float:
        """Average number of tokens a round accepted, bonus included; 0.0 without rounds."""
        return (self.rounds + self.drafts_accepted) / self.rounds if self.rounds else 0.0

    @property
    def lookup_share(self) -> float:
        """Of the accepted drafts, how many were looked up beside a head, from 0 to 1; 0.0 if none was accepted."""
        return self.lookup_accepted / self.drafts_accepted if self.drafts_accepted else 0.0


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
class Begun:
    """The request has left the queue for the first time; sent once, before anything else it gets."""

    request_id: str
    prompt_tokens: int  # both as its usage will say
    cached_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tokens:
    """New output tokens."""

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
    max_new_tokens: int  # the limit that was in force; for a turn that never got its session as requested, 0 if absent
    spec: SpecStats
    message: str = ""  # the cause of an error or a timeout
    matched: int | str | None = None  # the stop token id or stop string, if the reason is "stop"
    prompt_logprobs_from: int | None = None  # where the prompt's log-probabilities really begin, if asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Terminal for a request; also the answer to any other command that was not carried out."""

    request_id: str
    status: int
    message: str
    param: str = ""  # the parameter at fault, if it is one
    usage: Usage | None = None  # of the committed turn that has this number, if that is the cause


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionState:
    """The state of a session."""

    session_id: str
    length: int  # tokens of its record, those of a running turn included
    resident: int  # of these, tokens whose KV it holds now
    turns: int  # committed
    state: str  # idle, waiting (its turn is queued), running, closing
    idle_ms: int  # since it was last used; 0 while a turn holds it
    ttl_ms: int | None
    max_tokens: int | None
    cache_salt: str
    client: str = ""  # its owner


@dataclass(frozen=True, slots=True, kw_only=True)
class PastTurn:
    """A committed turn of a session."""

    end_len: int  # tokens of the session after it
    last_token: int
    usage: Usage
    note: str  # what was submitted with it


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionHistory:
    """What a session consists of, without a turn that runs."""

    length: int
    turns: tuple[PastTurn, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionStates:
    """The states of all sessions, in the order they were opened."""

    sessions: tuple[SessionState, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionClosed:
    """The session is closed."""

    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Flushed:
    """The KV cache is empty."""

    num_pages: int  # pages that became free, in all books


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarCompiled:
    """Requests may name the grammar now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolStats:
    """Pages of one book (KV pool), or states of recurrent layers, by account."""

    book: str  # "full", "window", "inputs" (of recurrent layers) or "states"
    total: int
    free: int
    leased: int
    cached: int
    retiring: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats:
    """The present state of the engine, and sums since its start."""

    queued: int
    running: int
    sessions: int
    waiting_for: str  # why the head of the queue is not running
    steps: int  # collected steps
    step_age_ms: int  # since the last step was collected, or since the engine was last idle
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    retractions: int  # preemptions, under the name that clients know
    failed_steps: int
    endings: tuple[tuple[str, int], ...]  # requests by finish reason
    pools: tuple[PoolStats, ...]
    spec: SpecStats
    draft_lengths: tuple[int, ...]  # rounds by their number of drafts, from 0 on
    sessions_resident: int  # idle with KV of their own, or with a running turn
    session_tokens: int  # tokens whose KV idle sessions hold
    sessions_opened: int  # forks included
    sessions_closed: int  # by command
    sessions_expired: int  # by their ttl
    sessions_reclaimed: int  # how often an idle session lost its KV to the prefix cache
    step_rows_max: int | None = None  # limit learned from larger steps that failed; None: no limit
    step_tokens_max: int | None = None  # the same for tokens, of prefill and rounds together


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What the engine is doing, or who owns its pages: numbers and names that JSON can hold; see `sched.live`."""

    told: dict[str, Any]


SessionCommand = OpenSession | CloseSession | RewindSession | ForkSession | GetSession | GetHistory | GetSessions
Command = Submit | Abort | SessionCommand | FlushCache | GetStats | GetFrame | GetPages | CompileGrammar
SessionEvent = SessionState | SessionHistory | SessionStates | SessionClosed
Event = Begun | Tokens | PromptLogprobs | Finished | Refused | SessionEvent | Flushed | Stats | Frame | GrammarCompiled
Reply = Callable[[Event], None]
