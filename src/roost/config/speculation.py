"""The speculation that is asked for: who drafts, the shape of a round, and the widths it may have.

Refuses what cannot work, or would be ignored, in the name of its flag. Called by `config.resolve` and at start-up.
"""

from dataclasses import asdict

from roost.config.options import (
    AUTO,
    DRAFT_LAYER_IDS,
    SPEC_STEPS_DEFAULT,
    SPECS,
    TREE_TOKENS_DEFAULT,
    SpecConfig,
    at_least,
)
from roost.errors import ConfigError
from roost.spec_shape import PLAIN, DraftKv, SpecShape, num_candidates
from roost.spec_widths import AUTO_STEPS_MAX, Widths


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
