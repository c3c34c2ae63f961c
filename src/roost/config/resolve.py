"""From options to `Resolved`: a configuration is checked once, for a model and an attention backend.

Every refusal names the flag and what is allowed. Called at start-up, and by tests and benchmarks that make an engine.
"""

from dataclasses import replace

from roost.attention.registry import BACKENDS, KV_CACHE_DTYPES, TORCH, Backend
from roost.config.options import (
    CHUNK_CAPTURED,
    CHUNK_DEFAULT,
    CONTEXT_DEFAULT,
    STATE_SPACING,
    STATE_TURNS,
    STATES_KEPT,
    STRICT_MEMORY,
    EngineConfig,
    MemoryConfig,
    SchedConfig,
    SessionConfig,
    at_least,
)
from roost.config.resolved import ModelTraits, Resolved
from roost.config.speculation import drafter_of, lookup_of, spec_shape, spec_widths
from roost.errors import ConfigError
from roost.graph_sizes import mixed_sizes, step_tokens_max
from roost.kv.pages import Book, StatePool
from roost.spec_shape import DraftKv, SpecShape

_CONTEXTS_IN_POOL = 4  # sequences of full length that the pool holds, if its size is not given
# tokens between the states of a running sequence; so many, at most, are run through the recurrence again in each step
_STATE_INTERVAL = 8


def _check_sessions(config: SessionConfig) -> None:
    at_least("--max-sessions", config.max_sessions, 1)
    if config.max_session_tokens is not None:
        at_least("--max-session-tokens", config.max_session_tokens, 1)
    if config.max_resident_tokens is not None:
        at_least("--max-resident-tokens", config.max_resident_tokens, 0)
    if config.session_ttl_s is not None:
        at_least("--session-ttl-s", config.session_ttl_s, 1)
    if config.journal_fsync and config.journal is None:
        raise ConfigError("--journal-fsync is for --journal, which is not given")


def _replay_max(states: StatePool, spec: SpecShape, depth: int) -> int:
    """Tokens since the last state, at most: an interval, and what rounds add before the next one is kept."""
    return states.interval + (1 + 2 * depth) * spec.accept_max


def _states(memory: MemoryConfig, traits: ModelTraits) -> StatePool | None:
    """The states of a model with recurrent layers; options about them are refused for any other."""
    given = {"--state-pool": memory.state_pool, "--state-spacing": memory.state_spacing}
    given["--state-turns"] = memory.state_turns
    if not traits.recurrent_state:
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(f"{flag} is for models with recurrent layers, which this one has none of")
        return None
    if traits.window is not None:
        raise ConfigError("a model with recurrent layers and others with a sliding window is not supported")
    return StatePool(
        num_pages=0 if memory.state_pool is None else memory.state_pool,
        interval=StatePool.interval_of(memory.page_size, _STATE_INTERVAL),
        spacing=STATE_SPACING if memory.state_spacing is None else memory.state_spacing,
        num_turns=STATE_TURNS if memory.state_turns is None else memory.state_turns,
    )


def _with_states(resolved: Resolved) -> Resolved:
    """The same with as many states, and slots of their inputs, as the requests that may run need, where not told."""
    states, memory, running = resolved.states, resolved.memory, resolved.sched.max_running
    if states is None:
        return resolved
    at_least("--state-spacing", states.spacing, 1)
    at_least("--state-turns", states.num_turns, 0)
    if memory.state_pool is None:
        states = replace(states, num_pages=running * resolved.states_to_hold + STATES_KEPT + 1)
    at_least("--state-pool", states.num_pages, resolved.states_to_hold + 1)
    books = list(resolved.books)
    if memory.window_pool_tokens is None:
        length = resolved.length_to_fit(len(books) - 1, resolved.context)
        held = running * resolved.pages_to_hold(len(books) - 1, length)
        books[-1] = replace(books[-1], num_pages=held + 1)
    return replace(resolved, states=states, books=tuple(books))


def _books(
    memory: MemoryConfig, context: int, spec: SpecShape, traits: ModelTraits, replay_max: int | None
) -> tuple[Book, ...]:
    """The books this model and drafter need: draft layers live in the full book, whatever the target has.

    `replay_max`: how many inputs of its recurrent layers a sequence needs at most; None: it has no such layers.
    """
    pool_tokens = memory.pool_tokens if memory.pool_tokens is not None else _CONTEXTS_IN_POOL * context
    window_tokens = memory.window_pool_tokens if memory.window_pool_tokens is not None else pool_tokens
    at_least("--pool-tokens", pool_tokens, 1)
    at_least("--window-pool-tokens", window_tokens, 1)
    books = []
    if traits.has_full_layers or spec.draft_kv is not DraftKv.NONE:
        books.append(Book(num_pages=pool_tokens // memory.page_size))
    if traits.window is not None:
        books.append(Book(num_pages=window_tokens // memory.page_size, window=traits.window))
    if replay_max is not None:
        books.append(Book(num_pages=window_tokens // memory.page_size, window=replay_max, is_replayed=True))
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


def chunk_of(sched: SchedConfig, backend: Backend) -> int:
    """Most prompt tokens of a step."""
    if sched.chunk is None:
        return CHUNK_CAPTURED if backend.graphs else CHUNK_DEFAULT
    at_least("--chunk", sched.chunk, 1)
    return sched.chunk


def _check_itl_target(target_ms: float | None) -> None:
    if target_ms is not None and not 0 < target_ms < float("inf"):  # nan is neither
        raise ConfigError(f"--itl-target-ms must be a number of milliseconds above 0, got {target_ms}")


def _check_copies(spec: SpecShape, backend: Backend) -> None:
    """Refuse a tree whose branches, or accepted paths, are more than a backend moves at once."""
    most = backend.copied_max
    if spec.topk == 1 or most is None:
        return
    moved = max(spec.accept_max, spec.topk * (spec.accept_max - 3))  # an accepted path; those of all branches so far
    if moved > most:
        raise ConfigError(
            f"--spec-steps {spec.steps} with --spec-topk {spec.topk} moves {moved} tokens of a round at once, the "
            f"{backend.name} backend at most {most}; lower one of them, or --spec-tokens"
        )


def _check_backend(
    memory: MemoryConfig, sched: SchedConfig, spec: SpecShape, traits: ModelTraits, backend: Backend
) -> None:
    """Refuse what the model needs, or the options ask for, and the backend does not declare."""
    if traits.window is not None and not backend.windows:
        able = ", ".join(each.name for each in BACKENDS if each.windows)
        raise ConfigError(
            f"--backend {backend.name} does not read sliding windows, and the model has layers with one; these do: "
            f"{able}"
        )
    if traits.sinks and not backend.sinks:
        able = ", ".join(each.name for each in BACKENDS if each.sinks)
        raise ConfigError(
            f"--backend {backend.name} does not read attention sinks, and the model's heads have them; these do: {able}"
        )
    if memory.kv_cache_dtype not in backend.kv_cache_dtypes:
        able = ", ".join(each.name for each in BACKENDS if memory.kv_cache_dtype in each.kv_cache_dtypes)
        raise ConfigError(
            f"--kv-cache-dtype {memory.kv_cache_dtype}: the {backend.name} backend does not read such KV, these do: "
            f"{able}; or use {' or '.join(backend.kv_cache_dtypes)}"
        )
    if spec.topk > 1 and not backend.trees:
        able = ", ".join(each.name for each in BACKENDS if each.trees)
        raise ConfigError(
            f"--spec-topk {spec.topk} needs an attention backend that reads trees: {backend.name} does not, these do: "
            f"{able}; or use --spec-topk 1"
        )
    _check_copies(spec, backend)
    if sched.graphs and not backend.graphs:
        able = ", ".join(each.name for each in BACKENDS if each.graphs)
        raise ConfigError(f"--graphs: steps of the {backend.name} backend cannot be captured, only those of: {able}")


def resolve(config: EngineConfig, traits: ModelTraits, backend: Backend = TORCH, *, on_host: bool = True) -> Resolved:
    """Check a configuration for a model and a backend, once, and derive what follows from it.

    `on_host`: whether the host computes, and so knows what was drafted before the target runs.
    """
    memory, sched = config.memory, config.sched
    at_least("--page-size", memory.page_size, 1)
    if memory.strict_memory not in STRICT_MEMORY:
        raise ConfigError(f"--strict-memory must be 0, 1 or 2, got {memory.strict_memory}")
    if memory.kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ConfigError(f"--kv-cache-dtype must be one of {', '.join(KV_CACHE_DTYPES)}, got {memory.kv_cache_dtype}")
    context = _context(sched, traits)
    at_least("--max-running", sched.max_running, 1)
    at_least("--max-queued", sched.max_queued, 1)
    _check_itl_target(sched.itl_target_ms)
    _check_sessions(config.session)
    spec = spec_shape(config.spec)
    _check_backend(memory, sched, spec, traits, backend)
    if traits.vocab_size < 1:
        raise ConfigError(f"the model's vocabulary must hold at least 1 token, got {traits.vocab_size}")
    if traits.window is not None and traits.window < 1:
        raise ConfigError(f"the model's sliding window must be at least 1, got {traits.window}")
    if not traits.has_full_layers and traits.window is None:
        raise ConfigError("the model declares neither full-attention nor sliding-window layers")
    states = _states(memory, traits)
    replay_max = None if states is None else _replay_max(states, spec, depth=1 if sched.overlap else 0)
    books = _books(memory, context, spec, traits, replay_max)
    chunk, widths, graphs = (
        chunk_of(sched, backend),
        spec_widths(config.spec, narrows=on_host and not backend.graphs),
        sched.graphs is not False and backend.graphs,
    )
    step_tokens = step_tokens_max(chunk, widths, sched.max_running) if sched.mixed else chunk
    reserves = tuple(spec.alloc_len_per_decode if book.window is None else spec.tokens for book in books)
    resolved = Resolved(
        backend=backend,
        memory=memory,
        sched=sched,
        session=config.session,
        clients={each.name: each for each in config.clients},
        drafter=drafter_of(config.spec),
        spec=spec,
        lookup=lookup_of(config.spec),
        widths=widths,
        vocab_size=traits.vocab_size,
        context=context,
        chunk=chunk,
        books=books,
        states=states,
        reserves=reserves,
        graphs=graphs,
        step_sizes=tuple(mixed_sizes(min(step_tokens, sched.max_running * context))) if graphs else (),
    )
    resolved = _with_states(resolved)
    for number, book in enumerate(resolved.books):
        flag = "--pool-tokens" if book.window is None else "--window-pool-tokens"
        # the smallest request there is: one prompt token, one new token
        least = resolved.pages_to_hold(number, resolved.length_to_fit(number, 2)) + 1
        if book.num_pages < least:
            raise ConfigError(
                f"{flag} must be at least {least * memory.page_size}: one request's reserve and the null page are "
                f"{least} pages of --page-size {memory.page_size}, got {book.num_pages} pages"
            )
    return resolved
