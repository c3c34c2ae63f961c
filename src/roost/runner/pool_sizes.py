"""Pool sizes: pages of KV and states of recurrent layers, as many as a device has room for beside what is loaded.

Where options tell the sizes, or nobody counts the device's memory, there is nothing to do. Called at start-up.
"""

from dataclasses import replace

import torch

from roost.attention.registry import Backend
from roost.config.options import EngineConfig
from roost.config.resolve import resolve
from roost.device.open import memory_of
from roost.errors import ConfigError
from roost.models.model import Head, Model
from roost.runner.memory import pool_tokens, state_pool, states_bytes, token_bytes, workspace_bytes


def with_pool(
    config: EngineConfig, model: Model, head: Head | None, device: torch.device, backend: Backend
) -> EngineConfig:
    """The configuration with its pool as large as the device allows, where that is not told and can be known."""
    memory, known = config.memory, memory_of(device)
    if known is None or memory.pool_tokens is not None:
        return config
    resolved = resolve(config, model.traits, backend, on_host=device.type == "cpu")
    if resolved.states is not None and memory.state_pool is None:
        memory = replace(memory, state_pool=state_pool(resolved, model, known[0]))
        config = replace(config, memory=memory)
        resolved = resolve(config, model.traits, backend, on_host=device.type == "cpu")
    taken = workspace_bytes(config, model, backend) + states_bytes(resolved, model)
    per_full, per_window = token_bytes(model, head, memory.kv_cache_dtype)
    if memory.window_pool_tokens is not None:
        if per_full == 0 and memory.memory_fraction is not None:
            raise ConfigError("--memory-fraction and --window-pool-tokens both say how large the pool is; give one")
        taken, per_window = taken + memory.window_pool_tokens * per_window, 0
    if per_full + per_window == 0:
        return config
    tokens = pool_tokens(memory.memory_fraction, *known, taken, per_full + per_window)
    return replace(config, memory=replace(memory, pool_tokens=tokens))
