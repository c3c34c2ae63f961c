"""Options of the engine: one frozen tree of groups, each field with its default and its help.

The command line is made from these fields; choices that follow from a registry may be a function. Nothing is checked or
derived here: `config.speculation` and `config.resolve` do that, once, at start-up. The server's own options are in
`server.config`.
"""

from dataclasses import dataclass, field

from roost.attention.registry import AUTO_BACKEND, AUTO_KV, BACKENDS, KV_CACHE_DTYPES
from roost.clients import ClientLimits
from roost.drafters.registry import (
    LAYER_ID_SHIFTS,
    WITHOUT_HEAD,
    has_aux_hidden,
    has_head,
    has_lookup,
    has_trees,
    names_of,
    spec_names,
)
from roost.errors import ConfigError
from roost.spec_widths import AUTO_STEPS_MAX, LOOKUP_STEPS_MAX

CONTEXT_DEFAULT = 8192  # at most, where the model would allow more
CHUNK_DEFAULT = 512  # most prompt tokens of a step
CHUNK_CAPTURED = 2048  # the same, where steps can be captured as CUDA graphs
# time of a mixed step, unless it is given: so many milliseconds, or so many times what its rounds alone take
ITL_TARGET_MS, ITL_TARGET_ROUNDS = 25, 5
WEIGHTS = ("auto", "int8", "fp32", "bf16", "fp8", "int4", "gguf")
TRANSPORTS = NCCL, GLOO = "nccl", "gloo"  # of --tp
DEVICES = ("auto", "cpu", "cuda")
BACKEND_NAMES = (AUTO_BACKEND, *(backend.name for backend in BACKENDS))
_DEFAULTS = ", ".join(f"{backend.name} on {device}" for backend in BACKENDS for device in backend.default_for)
STRICT_MEMORY = (0, 1, 2)
# of recurrent layers, unless told: states for idle sessions and the prefix cache; tokens between those of a long
# prompt; turns of a session whose ends have one
STATES_KEPT, STATE_SPACING, STATE_TURNS = 64, 2048, 4


def _both(names: tuple[str, ...]) -> str:
    """The names as people list them: a, b and c."""
    return " and ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Which model, in which form, on which device."""

    model: str = field(default="default", metadata={"help": "a GGUF file, a Hugging Face folder, or 'default'"})
    weights: str = field(
        default="auto",
        metadata={"help": "their form; auto: the checkpoint's on cuda, int8 on a CPU", "choices": WEIGHTS},
    )
    device: str = field(default="auto", metadata={"help": "auto: cuda where there is one", "choices": DEVICES})
    backend: str = field(
        default=AUTO_BACKEND,
        metadata={"help": f"who computes attention; auto: {_DEFAULTS}", "choices": BACKEND_NAMES},
    )
    threads: int | None = field(
        default=None, metadata={"help": "CPU threads of each rank of the model; if absent, all cores together"}
    )
    tp: int = field(
        default=1, metadata={"help": "ranks that share the model (tensor parallelism), each with a GPU, or some cores"}
    )
    tp_transport: str | None = field(
        default=None,
        metadata={
            "help": "who moves what ranks exchange; if absent nccl on cuda, gloo on a CPU. gloo on cuda is slow, and "
            "lets ranks share a device",
            "choices": TRANSPORTS,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryConfig:
    """How much KV there is and how it is cut up."""

    page_size: int = field(default=16, metadata={"help": "tokens per page"})
    kv_cache_dtype: str = field(
        default=AUTO_KV,
        metadata={
            "help": "type of keys and values in the cache; auto: as they are computed, or int8 beside quantised "
            "weights on the numba backend; fp8 (e4m3) and int8 have a scale per token and KV head",
            "choices": KV_CACHE_DTYPES,
        },
    )
    pool_tokens: int | None = field(
        default=None,
        metadata={"help": "KV slots for full-attention and draft layers; if absent four contexts, on cuda what fits"},
    )
    window_pool_tokens: int | None = field(
        default=None, metadata={"help": "KV slots for sliding-window layers; as --pool-tokens if absent"}
    )
    state_pool: int | None = field(
        default=None,
        metadata={
            "help": "states of recurrent layers, for models that have some; if absent what --max-running requests "
            f"need, and {STATES_KEPT} to keep"
        },
    )
    state_spacing: int | None = field(
        default=None,
        metadata={
            "help": "tokens between the states of recurrent layers that a long prompt leaves in the prefix cache; "
            f"{STATE_SPACING} if absent"
        },
    )
    state_turns: int | None = field(
        default=None,
        metadata={
            "help": "last turns of a session whose ends it can be rewound to without running tokens again, with "
            f"recurrent layers; {STATE_TURNS} if absent"
        },
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
    chunk: int | None = field(
        default=None,
        metadata={
            "help": "most prompt tokens of a step; how many it has follows from --itl-target-ms. If absent "
            f"{CHUNK_CAPTURED} where steps can be captured as CUDA graphs, {CHUNK_DEFAULT} elsewhere"
        },
    )
    itl_target_ms: float | None = field(
        default=None,
        metadata={
            "help": "milliseconds that a step with prompt tokens beside decoding requests may take; if absent "
            f"{ITL_TARGET_MS}, or {ITL_TARGET_ROUNDS} times as long as without prompt tokens if that is more"
        },
    )
    mixed: bool = field(default=True, metadata={"help": "prefill chunks and decode rounds in one step"})
    overlap: bool = field(default=True, metadata={"help": "plan the next step while one runs (depth 1)"})
    graphs: bool | None = field(
        default=None, metadata={"help": "replay steps as CUDA graphs; if absent, on where the backend can"}
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
    journal: str | None = field(
        default=None,
        metadata={
            "help": "folder in which sessions are written down, so that they go on after the engine has ended; "
            "replicas may share it. If absent sessions end with the engine"
        },
    )
    journal_fsync: bool = field(
        default=False, metadata={"help": "with --journal: wait for the disk at the end of each turn"}
    )


AUTO = "auto"  # of --spec-steps: chosen step by step
SPEC_STEPS_DEFAULT = 4
# --spec-lookup: drafts are looked up in the text of the request, and in what others of its client say; in its own; not
LOOKUPS = SHARED_LOOKUP, OWN_LOOKUP, NO_LOOKUP = "shared", "own", "off"
TREE_TOKENS_DEFAULT = 16  # at most: a smaller tree is verified whole


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Speculative decoding: who drafts, and how much."""

    spec: str | None = field(
        default=None,
        metadata={
            "help": f"auto (also --spec alone): the head, {WITHOUT_HEAD.name} without one; if absent the head, none "
            "without one. A head is that of --draft, or one that comes with the model",
            "bare": "auto",
            "choices": spec_names,
        },
    )
    draft: str | None = field(
        default=None, metadata={"help": f"folder of the draft head, for {_both(names_of(has_head))}"}
    )
    spec_steps: int | str | None = field(
        default=None,
        metadata={
            "help": f"tokens drafted one after the other, or auto: 0 to {AUTO_STEPS_MAX}, fewer with many requests, "
            "step by step, by what drafts bring and cost; if absent auto for a chain, "
            f"{SPEC_STEPS_DEFAULT} with --spec-topk above 1 or --spec-tokens"
        },
    )
    spec_topk: int | None = field(
        default=None,
        metadata={"help": f"branches of the draft; 1, a chain, if absent; more is for {_both(names_of(has_trees))}"},
    )
    spec_tokens: int | None = field(
        default=None,
        metadata={
            "help": "tokens verified in a round, with the one before the drafts; if absent --spec-steps + 1 for a "
            f"chain, at most {TREE_TOKENS_DEFAULT} for a tree"
        },
    )
    spec_lookup: str | None = field(
        default=None,
        metadata={
            "help": f"where drafts are looked up, for {_both(names_of(has_lookup))}: {SHARED_LOOKUP} (if absent), in "
            "the request's own text and in what others of the same client and cache salt were given; "
            f"{OWN_LOOKUP}; {NO_LOOKUP}: the head drafts alone. Up to {LOOKUP_STEPS_MAX} with --spec-steps auto",
            "choices": LOOKUPS,
        },
    )
    spec_max_batch: int | None = field(
        default=None, metadata={"help": "no drafts in a step that decodes more requests than this; no limit if absent"}
    )
    draft_layer_ids: str | None = field(
        default=None,
        metadata={
            "help": f"how the layer ids of a head are counted, for {_both(names_of(has_aux_hidden))}; asked for where "
            "it has some",
            "choices": tuple(LAYER_ID_SHIFTS),
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine can be told."""

    model: ModelConfig = ModelConfig()
    memory: MemoryConfig = MemoryConfig()
    sched: SchedConfig = SchedConfig()
    session: SessionConfig = SessionConfig()
    spec: SpecConfig = SpecConfig()
    clients: tuple[ClientLimits, ...] = ()  # who has limits of its own; a server's keys


def at_least(flag: str, value: int, least: int) -> None:
    """Raise ConfigError for a value that is too small, in the name of its flag."""
    if value < least:
        raise ConfigError(f"{flag} must be at least {least}, got {value}")
