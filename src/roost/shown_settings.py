"""Shown settings: the choices that an engine has made, for people: `/server_info`, and what is printed at the start.

Derived from the configuration and the model; nothing is chosen here. Called at start-up.
"""

from dataclasses import asdict

import torch

from roost.config.options import AUTO, EngineConfig
from roost.config.resolved import Resolved
from roost.drafters.registry import NO_DRAFTER
from roost.models.model import Model


def shown_settings(
    config: EngineConfig,
    resolved: Resolved,
    model: Model,
    device: torch.device,
    *,
    weights: str,
    warnings: tuple[str, ...],
) -> dict[str, object]:
    """The choices by name; `weights` is the form that they are kept in."""
    attends = [each for each in model.kv if each.has_values]
    kv = (attends or model.kv)[0].kept_as(resolved.memory.kv_cache_dtype)
    return {
        **{key: value for key, value in asdict(config.model).items() if value is not None},
        **_spec_settings(config, resolved),
        **{key: value for key, value in asdict(resolved.sched).items() if value is not None},
        "chunk": resolved.chunk,
        **{key: value for key, value in asdict(resolved.session).items() if value is not None},
        "weights": weights,
        "device": str(device),
        "backend": resolved.backend.name,
        "graphs": resolved.graphs,
        "threads": torch.get_num_threads(),
        "page_size": resolved.page_size,
        "pool_tokens": [book.num_pages * resolved.page_size for book in resolved.books],
        "windows": [book.window for book in resolved.books if not book.is_replayed],
        **({} if resolved.states is None else {"state_pool": resolved.states.num_pages}),
        "kv_cache_dtype": str(kv.dtype).removeprefix("torch."),
        "strict_memory": resolved.memory.strict_memory,
        "context": resolved.context,
        "num_layers": model.num_layers,
        "vocab_size": resolved.vocab_size,
        **({"warnings": warnings} if warnings else {}),
    }


def _spec_settings(config: EngineConfig, resolved: Resolved) -> dict[str, object]:
    """The resolved choices for speculation."""
    spec, shape = config.spec, resolved.spec
    if spec.spec == NO_DRAFTER:
        return {"spec": spec.spec}
    given = {name: value for name, value in asdict(spec).items() if value is not None}
    steps = AUTO if resolved.widths.is_auto else shape.steps
    return {
        **given,
        "spec_steps": steps,
        "spec_topk": shape.topk,
        "spec_tokens": shape.tokens,
        "spec_lookup": resolved.lookup,
    }
