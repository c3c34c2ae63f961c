"""Memory: how many tokens of KV fit beside everything else on a device that counts its bytes.

Weights and the draft head are loaded by then, so the free memory is known; the tensors of forward passes, of the
sampler and of CUDA graphs are bounded from above. Plain arithmetic. Called at start-up.
"""

from roost.attention.registry import Backend
from roost.config.options import EngineConfig
from roost.config.resolve import chunk_of
from roost.config.resolved import Resolved
from roost.config.speculation import spec_widths
from roost.errors import ConfigError
from roost.graph_sizes import graph_sizes, mixed_sizes, step_tokens_max
from roost.models.model import Head, Model
from roost.sampling.logprobs import LOGPROB_POSITIONS_MAX
from roost.sampling.sampler import CHUNK_ELEMENTS_MAX

MEMORY_FRACTION = 0.9  # of the device's memory, unless told
STATES_SHARE = 0.5  # of what is free beside weights: states of recurrent layers take no more, unless told
_SAMPLER_BYTES = CHUNK_ELEMENTS_MAX * 8 * 6  # sorting and drawing, several tensors of 8 bytes an element
_LOGPROB_BYTES = 32  # of a position and token: its logit, float32 and int64 tensors of several steps
_WIDE = 8  # tensors of a pass that are as wide as its widest projection, at one time
_KEPT = 4  # hidden states of a token that a graph of chunks and rounds keeps: the last, and those that a drafter wants


def token_bytes(model: Model, head: Head | None, kv_cache_dtype: str) -> tuple[int, int]:
    """Bytes of KV that one token takes in the full book, draft layers included, and in the window book."""
    kept = (*model.kv, *(() if head is None else head.kv))
    layers = [kv.kept_as(kv_cache_dtype) for kv in kept if kv.recurs is None]
    full = sum(kv.token_bytes for kv in layers if kv.window is None)
    return full, sum(kv.token_bytes for kv in layers) - full


def state_bytes(model: Model) -> int:
    """Bytes of one state, which is that of all recurrent layers."""
    return sum(kv.recurs.state_bytes(kv.dtype) for kv in model.kv if kv.recurs is not None)


def state_pool(resolved: Resolved, model: Model, free: int) -> int | None:
    """States of recurrent layers that a device has room for: as many as are wanted, within a share of what is free.

    Fewer than running requests could need make some of them wait. None: the model has no such layers.
    """
    if resolved.states is None:
        return None
    num_fit = int(free * STATES_SHARE) // state_bytes(model)
    return min(resolved.states.num_pages, max(resolved.states_to_hold + 1, num_fit))


def states_bytes(resolved: Resolved, model: Model) -> int:
    """Bytes of the states of recurrent layers and of their inputs, of which running requests need so many."""
    if resolved.states is None:
        return 0
    slots = sum(book.num_pages * resolved.page_size for book in resolved.books if book.is_replayed)
    inputs = sum(kv.token_bytes for kv in model.kv if kv.recurs is not None)
    return resolved.states.num_pages * state_bytes(model) + slots * inputs


def workspace_bytes(config: EngineConfig, model: Model, backend: Backend) -> int:
    """Bytes, at most, of everything that is neither weights nor KV."""
    sched, widths, itemsize = config.sched, spec_widths(config.spec), model.dtype.itemsize
    chunk = chunk_of(sched, backend)
    widest = model.activation_width
    shape, vocab_size, running = widths.shape, model.traits.vocab_size, sched.max_running
    nodes_max = widths.num_nodes_max(running)
    passes = _WIDE * (chunk + nodes_max) * widest * itemsize
    has_graphs = backend.graphs and sched.graphs is not False
    rounds = graph_sizes(widths, running) if has_graphs else []
    mixed = mixed_sizes(step_tokens_max(chunk, widths, running)) if has_graphs else []
    # those of a step that runs operation by operation or has chunks, and those that every graph of rounds keeps
    nodes = nodes_max + sum(batch * width for batch, width in rounds)
    logits = nodes * vocab_size * itemsize
    if has_graphs:
        largest = max(*mixed, nodes_max)  # graphs share their memory, but not with others
        passes += (_WIDE * largest * widest + _KEPT * sum(mixed) * model.hidden_size) * itemsize
    drafts = running * shape.topk * vocab_size * 8 if shape.pair else 0  # logits and log-probabilities, in float32
    counts = 2 * running * vocab_size * 5  # tokens of prompts and outputs, once somebody asks for a penalty
    # once somebody asks for log-probabilities; drawing is over then
    logprobs = LOGPROB_POSITIONS_MAX * vocab_size * _LOGPROB_BYTES
    return passes + logits + drafts + counts + max(logprobs, _SAMPLER_BYTES)


def pool_tokens(fraction: float | None, free: int, total: int, workspace: int, per_token: int) -> int:
    """Tokens of KV that fit into a share of the device's memory; `workspace` is what else must find room."""
    share = MEMORY_FRACTION if fraction is None else fraction
    budget = free - workspace - int((1 - share) * total)
    if budget < per_token:
        raise ConfigError(
            f"no memory is left for KV: {free / 2**30:.1f} GiB are free, {workspace / 2**30:.1f} are needed otherwise "
            f"and {(1 - share) * total / 2**30:.1f} are left alone; raise --memory-fraction ({share}), lower "
            "--max-running, --chunk, --state-pool or --spec-tokens, or use --no-graphs or a smaller model"
        )
    return budget // per_token
