"""Configuration: one frozen tree, validated once, and the numbers derived from it.

The only module that may read the environment. Everything after start-up sees `Resolved`, never raw options. Each field
carries its help; the command line is made from them.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path

from roost.errors import ConfigError
from roost.kv.pages import Book, ceil_div, ceil_to
from roost.spec.shape import PLAIN, DraftKv, SpecShape


def cache_folder() -> Path:
    """Where fetched models are kept: $ROOST_CACHE, or `roost` in the user's cache folder."""
    own = os.environ.get("ROOST_CACHE")
    if own:
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "roost"


CONTEXT_DEFAULT = 8192  # at most, where the model would allow more


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which form, on which device."""

    model: str = field(default="default", metadata={"help": "a GGUF file, a Hugging Face folder, or 'default'"})
    weights: str = field(default="auto", metadata={"help": "auto, int8, fp32 or bf16"})
    device: str = field(default="auto", metadata={"help": "auto, cpu or cuda"})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the model; all cores if absent"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How much KV there is and how it is cut up."""

    page_size: int = field(default=16, metadata={"help": "tokens per page"})
    pool_tokens: int | None = field(
        default=None, metadata={"help": "KV slots for full-attention and draft layers; four contexts if absent"}
    )
    window_pool_tokens: int | None = field(
        default=None, metadata={"help": "KV slots for sliding-window layers; as --pool-tokens if absent"}
    )
    strict_memory: int = field(default=0, metadata={"help": "audit: 0 at idle, 1 every tick, 2 page by page"})


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedConfig:
    """How much runs at once."""

    context: int | None = field(
        default=None,
        metadata={"help": f"most tokens in a sequence; the model's, at most {CONTEXT_DEFAULT}, if absent"},
    )
    max_running: int = field(default=64, metadata={"help": "requests decoded or prefilled at once"})
    max_queued: int = field(default=1024, metadata={"help": "requests waiting; one more is refused"})
    chunk: int = field(default=512, metadata={"help": "token budget of a step with prefill"})
    mixed: bool = field(default=True, metadata={"help": "prefill chunks and decode rounds in one step"})
    overlap: bool = field(default=True, metadata={"help": "plan the next step while one runs (depth 1)"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Where the server listens, and to whom."""

    host: str = field(default="127.0.0.1", metadata={"help": "address to listen at"})
    port: int = field(default=8000, metadata={"help": "port to listen at; 0: one that is free"})
    api_key: tuple[str, ...] = field(
        default=(), metadata={"help": "a key that callers must show; may be given several times; also $ROOST_API_KEY"}
    )
    drain_s: int = field(default=30, metadata={"help": "seconds that running requests get to end when stopped"})
    stall_s: int = field(default=60, metadata={"help": "seconds after which a reader that takes nothing is given up"})
    health_answer_s: int = field(
        default=10,
        metadata={"help": "seconds without an answer of the engine that are not healthy; it may be in a step"},
    )
    health_step_s: int = field(
        default=60, metadata={"help": "seconds without a completed step, while there is work, that are not healthy"}
    )
    log_level: str = field(default="warning", metadata={"help": "critical, error, warning, info or debug"})


LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def api_keys(given: tuple[str, ...]) -> tuple[str, ...]:
    """The keys of a server: those given, or the one in $ROOST_API_KEY."""
    own = os.environ.get("ROOST_API_KEY")
    return given or ((own,) if own else ())


def check_server(config: ServerConfig) -> None:
    """Raise ConfigError for the first option of a server that cannot work."""
    if not 0 <= config.port <= 65535:
        raise ConfigError(f"--port must be in [0, 65535], got {config.port}")
    if not all(key and key.isascii() and key.isprintable() and " " not in key for key in config.api_key):
        raise ConfigError("--api-key must have at least 1 character, all of them printable ASCII without spaces")
    _at_least("--drain-s", config.drain_s, 0)
    _at_least("--stall-s", config.stall_s, 1)
    _at_least("--health-answer-s", config.health_answer_s, 1)
    _at_least("--health-step-s", config.health_step_s, 1)
    if config.log_level not in LOG_LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(LOG_LEVELS)}, got {config.log_level}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What a model's layers need of the KV plane, declared by the model."""

    vocab_size: int
    window: int | None = None  # sliding window of its window layers, None without any
    has_full_layers: bool = True
    context_max: int | None = None  # positions it was made for, None if it does not say


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    sched: SchedConfig = SchedConfig()
    spec: SpecShape = PLAIN


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The configuration as the engine uses it: checked, with every derived number in one place."""

    memory: MemoryConfig
    sched: SchedConfig
    spec: SpecShape
    vocab_size: int
    context: int
    books: tuple[Book, ...]  # full first, then window; at least one
    reserves: tuple[int, ...]  # per book: positions a round may need past the device length

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

    def length_to_fit(self, book: int, length_max: int) -> int:
        """Positions that must fit a book for a request that can come to `length_max` tokens."""
        return length_max + self.reserves[book] + self.spec.accept_max

    def pages_to_hold(self, book: int, length: int) -> int:
        """Most pages of `book` that a sequence of up to `length` positions can need at one time."""
        pages = ceil_div(length, self.page_size)
        window = self.books[book].window
        if window is None:
            return pages
        # Three windows may be apart: behind the turn's start, behind its commit point and behind its end. Then what
        # the steps in flight write. A range can touch two pages more than its length says.
        in_flight = (1 + self.depth) * max(self.sched.chunk, self.spec.accept_max) + self.reserves[book]
        ranges = 3 * (ceil_div(window, self.page_size) + 2) + ceil_div(in_flight, self.page_size) + 2
        return min(pages, ranges)


_CONTEXTS_IN_POOL = 4  # sequences of full length that the pool holds, if its size is not given


def _at_least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} must be at least {least}, got {value}")


def _books(memory: MemoryConfig, context: int, spec: SpecShape, traits: ModelTraits) -> tuple[Book, ...]:
    """The books this model and drafter need: draft layers live in the full book, whatever the target has."""
    pool_tokens = memory.pool_tokens if memory.pool_tokens is not None else _CONTEXTS_IN_POOL * context
    window_tokens = memory.window_pool_tokens if memory.window_pool_tokens is not None else pool_tokens
    _at_least("--pool-tokens", pool_tokens, 1)
    _at_least("--window-pool-tokens", window_tokens, 1)
    books = []
    if traits.has_full_layers or spec.draft_kv is not DraftKv.NONE:
        books.append(Book(num_pages=pool_tokens // memory.page_size))
    if traits.window is not None:
        books.append(Book(num_pages=window_tokens // memory.page_size, window=traits.window))
    return tuple(books)


def _context(sched: SchedConfig, traits: ModelTraits) -> int:
    """Most tokens of a sequence."""
    most = traits.context_max if traits.context_max is not None else CONTEXT_DEFAULT
    if sched.context is None:
        return min(most, CONTEXT_DEFAULT)
    _at_least("--context", sched.context, 2)
    if traits.context_max is not None and sched.context > traits.context_max:
        raise ConfigError(f"--context must be at most {most}, what the model was made for, got {sched.context}")
    return sched.context


def resolve(config: EngineConfig, traits: ModelTraits) -> Resolved:
    """Check a configuration for a model, once, and derive what follows from it."""
    memory, sched, spec = config.memory, config.sched, config.spec
    _at_least("--page-size", memory.page_size, 1)
    if memory.strict_memory not in (0, 1, 2):
        raise ConfigError(f"--strict-memory must be 0, 1 or 2, got {memory.strict_memory}")
    context = _context(sched, traits)
    _at_least("--max-running", sched.max_running, 1)
    _at_least("--max-queued", sched.max_queued, 1)
    _at_least("--chunk", sched.chunk, 1)
    spec.check()
    if spec.draft_kv is DraftKv.TOKEN:
        raise ConfigError("--spec: a drafter whose KV stands for single tokens is not supported; pair and none are")
    if traits.vocab_size < 1:
        raise ConfigError(f"the model's vocabulary must hold at least 1 token, got {traits.vocab_size}")
    if traits.window is not None and traits.window < 1:
        raise ConfigError(f"the model's sliding window must be at least 1, got {traits.window}")
    if not traits.has_full_layers and traits.window is None:
        raise ConfigError("the model declares neither full-attention nor sliding-window layers")
    books = _books(memory, context, spec, traits)
    reserve = spec.alloc_len_per_decode(memory.page_size)
    reserves = tuple(reserve if book.window is None else spec.tokens for book in books)
    resolved = Resolved(
        memory=memory,
        sched=sched,
        spec=spec,
        vocab_size=traits.vocab_size,
        context=context,
        books=books,
        reserves=reserves,
    )
    for number, book in enumerate(books):
        flag = "--pool-tokens" if book.window is None else "--window-pool-tokens"
        # the smallest request there is: one prompt token, one new token
        least = resolved.pages_to_hold(number, resolved.length_to_fit(number, 2)) + 1
        if book.num_pages < least:
            raise ConfigError(
                f"{flag} must be at least {least * memory.page_size}: one request's reserve and the sink page are "
                f"{least} pages of --page-size {memory.page_size}, got {book.num_pages} pages"
            )
    return resolved
