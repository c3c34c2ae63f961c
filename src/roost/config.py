"""Configuration: one frozen tree, validated once, and the numbers derived from it.

Everything after start-up sees `Resolved`, never raw options. Each field carries its help; the command line is made from
them. The server's own options are in `server.config`.
"""

from dataclasses import asdict, dataclass, field, replace

from roost.backend import BACKENDS, TORCH, Backend
from roost.clients import ClientLimits
from roost.errors import ConfigError
from roost.kv.pages import Book, ceil_div, ceil_to
from roost.spec.shape import PLAIN, DraftKv, SpecShape, num_candidates
from roost.spec.widths import AUTO_STEPS_MAX, Widths

CONTEXT_DEFAULT = 8192  # at most, where the model would allow more
WEIGHTS = ("auto", "int8", "fp32", "bf16")
DEVICES = ("auto", "cpu", "cuda")
BACKEND_NAMES = ("auto", *(backend.name for backend in BACKENDS))
STRICT_MEMORY = (0, 1, 2)
SPECS = ("none", "ngram", "eagle", "eagle3", "auto")
DRAFT_LAYER_IDS = ("sglang", "vllm")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which form, on which device."""

    model: str = field(default="default", metadata={"help": "a GGUF file, a Hugging Face folder, or 'default'"})
    weights: str = field(
        default="auto", metadata={"help": "their form; auto: int8 on a CPU, bf16 on cuda", "choices": WEIGHTS}
    )
    device: str = field(default="auto", metadata={"help": "auto: cuda where there is one", "choices": DEVICES})
    backend: str = field(
        default="auto",
        metadata={"help": "attention by it; auto: triton on cuda, torch on a CPU", "choices": BACKEND_NAMES},
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads of the model; all cores if absent"})


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How much KV there is and how it is cut up."""

    page_size: int = field(default=16, metadata={"help": "tokens per page"})
    pool_tokens: int | None = field(
        default=None,
        metadata={"help": "KV slots for full-attention and draft layers; if absent four contexts, on cuda what fits"},
    )
    window_pool_tokens: int | None = field(
        default=None, metadata={"help": "KV slots for sliding-window layers; as --pool-tokens if absent"}
    )
    memory_fraction: float | None = field(
        default=None, metadata={"help": "share of a GPU's memory to use for weights, KV and the rest; 0.9 if absent"}
    )
    strict_memory: int = field(
        default=0, metadata={"help": "audit: 0 at idle, 1 every tick, 2 page by page", "choices": STRICT_MEMORY}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedConfig:
    """How much runs at once."""

    context: int | None = field(
        default=None,
        metadata={"help": f"most tokens in a sequence; the model's, at most {CONTEXT_DEFAULT}, if absent"},
    )
    max_running: int = field(default=64, metadata={"help": "requests decoded or prefilled at once"})
    max_queued: int = field(default=1024, metadata={"help": "requests waiting; one more is refused"})
    chunk: int = field(
        default=512,
        metadata={
            "help": "token budget of a step with prefill; drafts of a length chosen step by step are not counted"
        },
    )
    mixed: bool = field(default=True, metadata={"help": "prefill chunks and decode rounds in one step"})
    overlap: bool = field(default=True, metadata={"help": "plan the next step while one runs (depth 1)"})
    graphs: bool | None = field(
        default=None, metadata={"help": "replay steps as CUDA graphs; on with the triton backend if absent"}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionConfig:
    """How many sessions there may be, how large, and for how long."""

    max_sessions: int = field(default=1024, metadata={"help": "open sessions; one more is refused"})
    max_session_tokens: int | None = field(
        default=None, metadata={"help": "most tokens of a session; what --context allows if absent"}
    )
    max_resident_tokens: int | None = field(
        default=None, metadata={"help": "tokens whose KV idle sessions keep for themselves; no limit if absent"}
    )
    session_ttl_s: int | None = field(
        default=None, metadata={"help": "seconds after its last turn that a session is closed; never if absent"}
    )


AUTO = "auto"  # of --spec-steps: chosen step by step
SPEC_STEPS_DEFAULT = 4
TREE_TOKENS_DEFAULT = 16  # at most: a smaller tree is verified whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Speculative decoding: who drafts, and how much."""

    spec: str | None = field(
        default=None,
        metadata={
            "help": "auto (also --spec alone): the head, ngram without one; if absent the head, none without one. "
            "A head is that of --draft, or one that comes with the model",
            "bare": "auto",
            "choices": SPECS,
        },
    )
    draft: str | None = field(default=None, metadata={"help": "folder of the draft head, for eagle and eagle3"})
    spec_steps: int | str | None = field(
        default=None,
        metadata={
            "help": f"tokens drafted one after the other, or auto: 0 to {AUTO_STEPS_MAX}, fewer with many requests, "
            "step by step, by what drafts bring and cost; if absent auto for a chain, "
            f"{SPEC_STEPS_DEFAULT} with --spec-topk above 1 or --spec-tokens"
        },
    )
    spec_topk: int | None = field(
        default=None, metadata={"help": "branches of the draft; 1, a chain, if absent; more is for eagle and eagle3"}
    )
    spec_tokens: int | None = field(
        default=None,
        metadata={
            "help": "tokens verified in a round, with the one before the drafts; if absent --spec-steps + 1 for a "
            f"chain, at most {TREE_TOKENS_DEFAULT} for a tree"
        },
    )
    spec_max_batch: int | None = field(
        default=None, metadata={"help": "no drafts in a step that decodes more requests than this; no limit if absent"}
    )
    draft_layer_ids: str | None = field(
        default=None,
        metadata={
            "help": "how the layer ids of an eagle3 head are counted; asked for where it has some",
            "choices": DRAFT_LAYER_IDS,
        },
    )


def spec_shape(config: SpecConfig) -> SpecShape:
    """The shape of the rounds that are asked for; raises ConfigError for what cannot work or would be ignored."""
    kind = drafter_of(config)
    if kind == "none":
        return PLAIN
    steps = _spec_steps(config)
    topk = config.spec_topk if config.spec_topk is not None else 1
    tokens = config.spec_tokens
    if tokens is None:
        tokens = steps + 1 if topk == 1 else min(TREE_TOKENS_DEFAULT, 1 + num_candidates(steps, topk))
    draft_kv = DraftKv.NONE if kind == "ngram" else DraftKv.PAIR
    shape = SpecShape(steps=steps, topk=topk, tokens=tokens, draft_kv=draft_kv)
    shape.check()
    if kind == "ngram" and steps == 0:
        raise ConfigError("--spec-steps must be at least 1 for --spec ngram, got 0")
    if config.spec_max_batch is not None:
        at_least("--spec-max-batch", config.spec_max_batch, 1)
        if not shape.speculates:
            raise ConfigError("--spec-max-batch needs --spec-steps of at least 1: without drafts it says nothing")
    return shape


def _spec_steps(config: SpecConfig) -> int:
    """Draft steps of a round, at most."""
    if is_auto(config):
        for flag, value, others in (
            ("--spec-topk", config.spec_topk, (None, 1)),
            ("--spec-tokens", config.spec_tokens, (None,)),
        ):
            if value not in others:
                raise ConfigError(f"--spec-steps auto is for chains of any length, got {flag} {value}: give a number")
        return AUTO_STEPS_MAX
    return config.spec_steps if isinstance(config.spec_steps, int) else SPEC_STEPS_DEFAULT


def is_auto(config: SpecConfig) -> bool:
    """Whether the length of drafts is chosen step by step: asked for, or a chain whose length nobody states."""
    if isinstance(config.spec_steps, str):
        if config.spec_steps != AUTO:
            raise ConfigError(f"--spec-steps must be a number or {AUTO}, got {config.spec_steps}")
        return True
    states_length = config.spec_steps is not None or config.spec_tokens is not None
    return drafter_of(config) != "none" and not states_length and config.spec_topk in (None, 1)


def spec_widths(config: SpecConfig) -> Widths:
    """How many nodes the rounds that are asked for may verify."""
    return Widths(shape=spec_shape(config), is_auto=is_auto(config), limit=config.spec_max_batch)


def drafter_of(config: SpecConfig) -> str:
    """Who drafts: none, ngram, eagle or eagle3; without a head `auto` is ngram. Refuses what does not belong to it."""
    if config.spec is not None and config.spec not in SPECS:
        raise ConfigError(f"--spec must be one of {', '.join(SPECS)}, got {config.spec}")
    if config.spec in (None, "auto") and config.draft is not None:  # start-up reads the head and says which
        raise ConfigError(f"what the head in --draft {config.draft} is, is not known; give --spec eagle or eagle3")
    asked = config.spec or "none"
    kind = "ngram" if asked == "auto" else asked
    has_head = kind in ("eagle", "eagle3")
    if has_head and config.draft is None:
        raise ConfigError(f"--spec {kind} needs --draft, the folder of its head")
    if config.draft is not None and not has_head:
        raise ConfigError(f"--draft is for --spec eagle, eagle3 or auto, got --spec {kind}")
    if config.draft_layer_ids is not None and config.draft_layer_ids not in DRAFT_LAYER_IDS:
        raise ConfigError(f"--draft-layer-ids must be sglang or vllm, got {config.draft_layer_ids}")
    if config.draft_layer_ids is not None and kind != "eagle3":
        raise ConfigError(f"--draft-layer-ids is for --spec eagle3, got --spec {kind}")
    if kind == "none":
        for name, value in asdict(config).items():
            if name != "spec" and value is not None:
                flag = "--" + name.replace("_", "-")
                raise ConfigError(f"{flag} is for --spec ngram, eagle, eagle3 or auto, got --spec none")
    return kind


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelTraits:
    """What a model's layers need of the KV plane, declared by the model."""

    vocab_size: int
    window: int | None = None  # sliding window of its window layers, None without any
    has_full_layers: bool = True
    context_max: int | None = None  # positions it was made for, None if it does not say
    recurrent_state: bool = False  # some layers keep a state that cannot be cut back to an earlier token


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    sched: SchedConfig = SchedConfig()
    session: SessionConfig = SessionConfig()
    spec: SpecConfig = SpecConfig()
    clients: tuple[ClientLimits, ...] = ()  # who has limits of its own; a server's keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    """The configuration as the engine uses it: checked, with every derived number in one place."""

    backend: Backend
    memory: MemoryConfig
    sched: SchedConfig
    session: SessionConfig
    clients: dict[str, ClientLimits]  # by name; those without limits of their own need not be there
    spec: SpecShape
    widths: Widths  # of rounds, by how many a step decodes
    vocab_size: int
    context: int
    books: tuple[Book, ...]  # full first, then window; at least one
    reserves: tuple[int, ...]  # per book: positions a round may need past the device length
    graphs: bool  # whether steps are captured, where the device can
    warnings: tuple[str, ...]  # what was chosen otherwise than asked, for people

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


def at_least(flag: str, value: int, least: int) -> None:
    """Raise ConfigError for a value that is too small, in the name of its flag."""
    if value < least:
        raise ConfigError(f"{flag} must be at least {least}, got {value}")


def _check_sessions(config: SessionConfig) -> None:
    at_least("--max-sessions", config.max_sessions, 1)
    if config.max_session_tokens is not None:
        at_least("--max-session-tokens", config.max_session_tokens, 1)
    if config.max_resident_tokens is not None:
        at_least("--max-resident-tokens", config.max_resident_tokens, 0)
    if config.session_ttl_s is not None:
        at_least("--session-ttl-s", config.session_ttl_s, 1)


def _books(memory: MemoryConfig, context: int, spec: SpecShape, traits: ModelTraits) -> tuple[Book, ...]:
    """The books this model and drafter need: draft layers live in the full book, whatever the target has."""
    pool_tokens = memory.pool_tokens if memory.pool_tokens is not None else _CONTEXTS_IN_POOL * context
    window_tokens = memory.window_pool_tokens if memory.window_pool_tokens is not None else pool_tokens
    at_least("--pool-tokens", pool_tokens, 1)
    at_least("--window-pool-tokens", window_tokens, 1)
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
    at_least("--context", sched.context, 2)
    if traits.context_max is not None and sched.context > traits.context_max:
        raise ConfigError(f"--context must be at most {most}, what the model was made for, got {sched.context}")
    return sched.context


def _check_copies(page_size: int, spec: SpecShape, backend: Backend) -> None:
    """Refuse a tree whose branches, or accepted paths, are more than a backend moves at once."""
    most = backend.copied_max
    if spec.topk == 1 or most is None:
        return
    if page_size > most:
        raise ConfigError(
            f"--page-size must be at most {most} with --spec-topk {spec.topk} on the {backend.name} backend, which "
            f"copies a page for each branch at once, got {page_size}"
        )
    moved = max(spec.accept_max, spec.topk * (spec.accept_max - 3))  # an accepted path; those of all branches so far
    if moved > most:
        raise ConfigError(
            f"--spec-steps {spec.steps} with --spec-topk {spec.topk} moves {moved} tokens of a round at once, the "
            f"{backend.name} backend at most {most}; lower one of them, or --spec-tokens"
        )


def _route(
    memory: MemoryConfig, sched: SchedConfig, spec: SpecShape, traits: ModelTraits, backend: Backend
) -> tuple[SchedConfig, tuple[str, ...]]:
    """What model and backend declare, turned into a choice with its warnings, or into an error."""
    if spec.topk > 1 and memory.page_size > 1 and not backend.branch_pages:
        able = ", ".join(each.name for each in BACKENDS if each.branch_pages)
        raise ConfigError(
            f"--spec-topk {spec.topk} with --page-size {memory.page_size} needs an attention backend with branch "
            f"pages: {backend.name} has none, these have: {able}; or use --spec-topk 1 or --page-size 1"
        )
    _check_copies(memory.page_size, spec, backend)
    if sched.graphs and backend.needs_host_lengths:
        raise ConfigError(f"--graphs: the {backend.name} backend plans on the host, which cannot be captured")
    if traits.recurrent_state and sched.overlap:
        warning = "--overlap: a model with recurrent state runs one step at a time, as with --no-overlap"
        return replace(sched, overlap=False), (warning,)
    return sched, ()


def resolve(config: EngineConfig, traits: ModelTraits, backend: Backend = TORCH) -> Resolved:
    """Check a configuration for a model and a backend, once, and derive what follows from it."""
    memory, sched = config.memory, config.sched
    at_least("--page-size", memory.page_size, 1)
    if memory.strict_memory not in STRICT_MEMORY:
        raise ConfigError(f"--strict-memory must be 0, 1 or 2, got {memory.strict_memory}")
    context = _context(sched, traits)
    at_least("--max-running", sched.max_running, 1)
    at_least("--max-queued", sched.max_queued, 1)
    at_least("--chunk", sched.chunk, 1)
    _check_sessions(config.session)
    spec = spec_shape(config.spec)
    sched, warnings = _route(memory, sched, spec, traits, backend)
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
        backend=backend,
        memory=memory,
        sched=sched,
        session=config.session,
        clients={each.name: each for each in config.clients},
        spec=spec,
        widths=spec_widths(config.spec),
        vocab_size=traits.vocab_size,
        context=context,
        books=books,
        reserves=reserves,
        graphs=sched.graphs is not False and not backend.needs_host_lengths,
        warnings=warnings,
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
