"""Options of one simulated run: everything a seed decides before the first tick."""

import random
from dataclasses import dataclass, replace

from roost.clients import ClientLimits
from roost.config.options import OWN_LOOKUP, EngineConfig, MemoryConfig, SchedConfig, SessionConfig, SpecConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits, Resolved
from roost.kv.pages import StatePool
from roost.spec_shape import PLAIN, DraftKv, SpecShape, num_candidates
from tests.sim.model import Model
from tests.sim.visits import Habits, draw_habits, with_branches
from tests.sim.wishes import Wishes, draw_wishes
from tests.support.spec_configs import spec_config

TICKS = 90  # of most runs
RECURRENT_SHARE = 0.2  # of the runs have a model with a recurrent layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Probability of each kind of fault, per tick or per occasion."""

    abort: float
    preempt: float
    close: float
    allocation: float
    step: float
    poison: float  # requests that make every step fail past one of their positions
    slow: float
    early: float  # not a fault: steps that run at launch instead of as late as possible
    rows_max: int | None = None  # every step with more rows fails
    tokens_max: int | None = None  # every step with more tokens fails, except a single round


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """All options of one simulated run."""

    seed: int
    resolved: Resolved
    model: Model
    layer_books: tuple[int, int]
    faults: Faults
    num_sessions: int
    submit_rate: float
    num_stops: int
    shared_prompts: int
    wishes: Wishes
    habits: Habits
    draft_ns: int  # time of a step, and of each draft, where the draft length is chosen by cost
    step_ns: int  # time of every step, in some runs long enough for the loop to wait while one runs
    num_ticks: int  # with faults and new requests; then everything accepted must end


def draw(seed: int) -> Options:
    """The options of a seed."""
    rng = random.Random(f"options {seed}")
    page_size = rng.choice([1, 1, 1, 2, 2, 4, 4, 4, 4, 16, 16, 16, 64, 64, 256, 512])
    spec = _with_lookup(seed, _draw_spec(rng))
    vocab = rng.choice([2, 3, 5, 50])
    windows = [_window(rng, vocab, page_size, full=full) for full in (False, True)]
    traits = _or_recurrent(seed, rng.choice([_full(vocab), _full(vocab), *windows]))
    context = (
        rng.randint(24, 90) if page_size <= 4 else rng.randint(40, 140) if page_size < 256 else rng.randint(260, 420)
    )
    habits = draw_habits(random.Random(f"habits {seed}"))
    if traits.recurrent_state:
        context, habits = 2 * context, _or_talkative(seed, habits)
    sched = SchedConfig(
        context=context,
        max_running=rng.choice([1, 2, 3, 4, 6, 8]),
        max_queued=rng.choice([2, 8, 64]),
        chunk=rng.choice([1, 3, 8, 16, 64, 1024]) if page_size < 64 else rng.choice([16, 64, 1024]),
        mixed=rng.random() < 0.5,
        overlap=rng.random() < 0.6,
    )
    config = EngineConfig(
        memory=_draw_states(seed, MemoryConfig(page_size=page_size, strict_memory=2), traits),
        sched=sched,
        session=_draw_limits(seed, habits, context),
        spec=_draw_spec_config(seed, spec),
        clients=_draw_clients(seed),
    )
    lookup = random.Random(f"lookup {seed}")
    resolved = _draw_pool(seed, rng, config, traits, on_host=lookup.random() < 0.5)
    calm = rng.random() < 0.25  # some runs have no faults, so that exact predictions apply
    faults = Faults(
        abort=0 if calm else rng.choice([0, 0.05, 0.1, 0.3]),
        preempt=0 if calm else rng.choice([0, 0, 0.1, 0.35]),
        close=0 if calm else rng.choice([0, 0.05]),
        allocation=0 if calm else rng.choice([0, 0, 0.05]),
        step=0 if calm else rng.choice([0, 0, 0, 0.04, 0.15]),
        poison=0 if calm else rng.choice([0, 0, 0, 0.1]),
        slow=0 if calm else rng.choice([0, 0.1]),
        early=rng.choice([0, 0, 0.5, 1]),
    )
    full = traits.has_full_layers
    window_book = len(resolved.books) - 1  # of windows, or of inputs; the full one where there is no other
    options = Options(
        seed=seed,
        resolved=resolved,
        model=Model(
            vocab=vocab,
            window_1=None if full else traits.window,
            window_2=traits.window,
            recurrent=traits.recurrent_state,
            draft_skill=rng.choice([0, 0.3, 0.7, 0.9, 1]),
            lookup_skill=lookup.choice([0, 0.5, 0.8, 0.95, 1, 1]) if spec.pair else None,
        ),
        layer_books=(0 if full else window_book, window_book),
        faults=_draw_sizes(seed, faults, resolved),
        num_sessions=rng.choice([0, 1, 3, 3, 6]),
        submit_rate=rng.choice([0.1, 0.3, 0.8]),
        num_stops=rng.choice([0, 0, 1]),
        shared_prompts=rng.choice([1, 3]),
        wishes=draw_wishes(random.Random(f"wishes {seed}"), calm),
        habits=with_branches(seed, habits),
        draft_ns=random.Random(f"node {seed}").choice([0, 20_000, 200_000]) if resolved.widths.is_auto else 0,
        step_ns=random.Random(f"step time {seed}").choice([0, 0, 0, 8_000_000]),
        num_ticks=TICKS,
    )
    return _with_talks(options) if traits.recurrent_state else options


def _or_talkative(seed: int, habits: Habits) -> Habits:
    """Where a model has recurrent layers, clients rewind and fork more often: a state cannot be cut, as pages can."""
    return habits if habits != Habits() else draw_habits(random.Random(f"talkative {seed}"))


def _with_talks(options: Options) -> Options:
    """Where a model has recurrent layers, sessions have more turns, and more of the work."""
    rng = random.Random(f"talks {options.seed}")
    return replace(
        options,
        num_sessions=max(options.num_sessions, rng.choice([0, 1, 2, 3])),
        submit_rate=min(options.submit_rate, rng.choice([0.05, 0.1, 0.3])),
        num_ticks=3 * TICKS,
    )


def _draw_sizes(seed: int, faults: Faults, resolved: Resolved) -> Faults:
    """In some runs without other failing steps, the device is too small for large steps."""
    rng = random.Random(f"sizes {seed}")
    if faults.step or faults.poison or rng.random() > 0.2:
        return faults
    rows_max = rng.choice([None, rng.randint(1, max(1, resolved.sched.max_running // 2))])
    tokens_max = resolved.spec.tokens + rng.randint(0, resolved.chunk // 4) if rows_max is None else None
    return replace(faults, rows_max=rows_max, tokens_max=tokens_max)


def _draw_spec(rng: random.Random) -> SpecShape:
    kind = rng.choice(["plain", "chain", "chain", "tree", "tree", "ngram"])
    if kind == "plain":
        return rng.choice(
            [PLAIN, PLAIN, SpecShape(draft_kv=DraftKv.PAIR)]
        )  # or a drafter that stores KV but drafts nothing
    steps = rng.choice([1, 2, 3, 5])
    if kind == "ngram":
        return SpecShape(steps=steps, topk=1, tokens=steps + 1, reads_history=True)
    if kind == "chain":
        return SpecShape(steps=steps, topk=1, tokens=steps + 1, draft_kv=DraftKv.PAIR)
    topk = rng.choice([2, 4, 8])
    tokens = 1 + rng.randint(1, min(num_candidates(steps, topk), 32))
    return SpecShape(steps=steps, topk=topk, tokens=tokens, draft_kv=DraftKv.PAIR)


def _draw_max_batch(seed: int, spec: SpecShape) -> int | None:
    rng = random.Random(f"batch {seed}")  # a generator of its own, so that earlier draws of a seed stay the same
    return rng.choice([None, None, None, None, 1, 2, 3, 4]) if spec.speculates else None


def _with_lookup(seed: int, spec: SpecShape) -> SpecShape:
    """In some runs with a head, drafts are looked up beside it."""
    if not (spec.pair and spec.speculates) or random.Random(f"beside {seed}").random() > (
        0.25 if spec.topk > 1 else 0.5
    ):
        return spec
    return replace(spec, reads_history=True, lookup_steps=spec.steps)


def _draw_spec_config(seed: int, spec: SpecShape) -> SpecConfig:
    """In some runs with chains, the draft length is chosen by cost (auto); others' texts may not be looked up in."""
    share = 0.6 if spec.lookup_steps else 0.3
    is_auto = spec.speculates and spec.topk == 1 and random.Random(f"auto {seed}").random() <= share
    config = spec_config(spec, _draw_max_batch(seed, spec), auto=is_auto)
    is_own = spec.reads_history and random.Random(f"own {seed}").random() < 0.2
    return replace(config, spec_lookup=OWN_LOOKUP) if is_own else config


def _full(vocab: int) -> ModelTraits:
    return ModelTraits(vocab_size=vocab)


def _window(rng: random.Random, vocab: int, page_size: int, full: bool) -> ModelTraits:
    window = rng.choice([1, 2, 5, 9, 20]) if page_size < 64 else rng.choice([5, 40, 100])
    return ModelTraits(vocab_size=vocab, window=window, has_full_layers=full)


def _or_recurrent(seed: int, traits: ModelTraits) -> ModelTraits:
    """In some runs, a model with a recurrent layer."""
    if random.Random(f"recurrent {seed}").random() >= RECURRENT_SHARE:
        return traits
    return ModelTraits(vocab_size=traits.vocab_size, recurrent_state=True)


def _draw_states(seed: int, memory: MemoryConfig, traits: ModelTraits) -> MemoryConfig:
    """Where a model has recurrent layers: states that are kept for later, often and seldom; how many, comes last."""
    if not traits.recurrent_state:
        return memory
    rng = random.Random(f"states {seed}")
    return replace(memory, state_spacing=rng.choice([1, 8, 32, 10**6]), state_turns=rng.choice([0, 1, 2, 4]))


def _draw_limits(seed: int, habits: Habits, context: int) -> SessionConfig:
    """Session limits, in runs whose clients use session commands."""
    rng = random.Random(f"limits {seed}")
    if habits == Habits():
        return SessionConfig()
    return SessionConfig(
        max_sessions=rng.choice([1024, 1024, 1, 3, 5]),
        max_session_tokens=rng.choice([None, None, rng.randint(8, context)]),
        max_resident_tokens=rng.choice([None, None, 0, rng.randint(1, 2 * context)]),
    )


def _draw_clients(seed: int) -> tuple[ClientLimits, ...]:
    """In some runs, several clients with limits of their own."""
    rng = random.Random(f"who {seed}")
    if rng.random() < 0.7:
        return ()
    return tuple(
        ClientLimits(
            name=name,
            running=rng.choice([None, 1, 1, 2]),
            queued=rng.choice([None, 1, 2, 4]),
            sessions=rng.choice([None, 1, 2]),
            priority_min=rng.choice([None, 0]),
            priority_max=rng.choice([None, None, 1]),
        )
        for name in "abc"[: rng.randint(2, 3)]
    )


def _with_states(seed: int, resolved: Resolved, num_states: int | None) -> Resolved:
    """The same with states closer together, in most runs, so that short texts have many; and with so many in all."""
    states, inputs = resolved.states, resolved.books[-1]
    if states is None or inputs.window is None:
        return resolved
    wanted = random.Random(f"interval {seed}").choice([1, 2, 3, 4, 4, 8, 16])
    interval = StatePool.interval_of(resolved.page_size, wanted)
    inputs = replace(inputs, window=inputs.window + interval - states.interval)
    states = replace(states, interval=interval, num_pages=states.num_pages if num_states is None else num_states)
    return replace(resolved, states=states, books=(*resolved.books[:-1], inputs))


def _draw_pool(seed: int, rng: random.Random, config: EngineConfig, traits: ModelTraits, *, on_host: bool) -> Resolved:
    """KV pools between what one request of full context length needs and what all need together."""
    page_size, context = config.memory.page_size, config.sched.context
    assert context is not None

    def with_pools(full: int, window: int, states: int | None = None) -> Resolved:
        memory = replace(config.memory, pool_tokens=full, window_pool_tokens=window)
        return _with_states(seed, resolve(replace(config, memory=memory), traits, on_host=on_host), states)

    ample = with_pools(10**6 * page_size, 10**6 * page_size)
    sizes = []
    for book in range(len(ample.books)):
        pages = ample.pages_to_hold(book, ample.length_to_fit(book, context)) + 1
        factor = rng.choice([1, 1, 1.2, 1.5, 2, 4])
        if rng.random() < 0.1:
            factor = 0.7  # the longest requests are refused
        sizes.append(max(int(pages * factor), ample.pages_to_hold(book, ample.length_to_fit(book, 16)) + 1) * page_size)
    if ample.states is None:
        return with_pools(sizes[0], sizes[-1])
    factor = random.Random(f"pool of states {page_size} {context}").choice([1, 1, 1.2, 1.5, 2, 4])
    return with_pools(sizes[0], sizes[-1], int(ample.states_to_hold * factor) + 1)
