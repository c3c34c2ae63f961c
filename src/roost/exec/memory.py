"""Memory: how many tokens of KV fit beside everything else on a device that counts its bytes.

Weights and the draft head are loaded by then, so what is free is known; the passes' own tensors, the sampler's and
those of captured rounds are bounded from above. Plain arithmetic. Called at start-up.
"""

from roost.config import EngineConfig, ModelTraits, spec_shape
from roost.errors import ConfigError
from roost.exec.graphs import batch_sizes
from roost.exec.sampler import CHUNK_ELEMENTS_MAX
from roost.models.model import Head, Model

MEMORY_FRACTION = 0.9  # of the device's memory, unless told
_SAMPLER_BYTES = CHUNK_ELEMENTS_MAX * 8 * 6  # sorting and drawing, several tensors of 8 bytes an element
_WIDE = 8  # tensors of a pass that are as wide as its widest projection, at one time


def token_bytes(model: Model, head: Head | None) -> int:
    """Bytes of KV that one token takes in all pools together."""
    shapes = [model.kv] if head is None else [model.kv, head.kv]
    return sum(2 * len(kv.windows) * kv.num_kv_heads * kv.head_dim * kv.dtype.itemsize for kv in shapes)


def workspace_bytes(config: EngineConfig, model: Model, traits: ModelTraits, widest: int) -> int:
    """Bytes, at most, of everything that is neither weights nor KV."""
    sched, tokens, itemsize = config.sched, spec_shape(config.spec).tokens, model.kv.dtype.itemsize
    in_pass = max(sched.chunk, sched.max_running * tokens)
    passes = _WIDE * in_pass * widest * itemsize
    rounds = sum(batch_sizes(sched.max_running)) if sched.graphs is not False else sched.max_running
    logits = rounds * tokens * traits.vocab_size * itemsize
    return passes + logits + _SAMPLER_BYTES


def pool_tokens(fraction: float | None, free: int, total: int, workspace: int, per_token: int) -> int:
    """Tokens of KV that fit into a share of the device's memory."""
    share = MEMORY_FRACTION if fraction is None else fraction
    if not 0 < share <= 1:
        raise ConfigError(f"--memory-fraction must be above 0 and at most 1, got {share}")
    budget = free - workspace - int((1 - share) * total)
    if budget < per_token:
        raise ConfigError(
            f"no memory is left for KV: {free / 2**30:.1f} GiB are free, {workspace / 2**30:.1f} are kept for passes "
            f"and {(1 - share) * total / 2**30:.1f} are left alone; raise --memory-fraction ({share}), lower "
            "--max-running, --chunk or --spec-tokens, or use --no-graphs or a smaller model"
        )
    return budget // per_token
