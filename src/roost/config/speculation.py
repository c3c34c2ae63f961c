"""The speculation that is asked for: who drafts, the shape of a round, and the widths it may have.

What a drafter allows is what its entry in the registry declares. Options that cannot work, or would be ignored, are
refused by the name of their flag. Called by `config.resolve` and at start-up.
"""

from collections.abc import Sequence
from dataclasses import asdict

from roost.config.options import (
    AUTO,
    LOOKUPS,
    NO_LOOKUP,
    SHARED_LOOKUP,
    SPEC_STEPS_DEFAULT,
    TREE_TOKENS_DEFAULT,
    SpecConfig,
    at_least,
)
from roost.drafters.registry import (
    ANY_DRAFTER,
    LAYER_ID_SHIFTS,
    NO_DRAFTER,
    WITHOUT_HEAD,
    DrafterKind,
    find_drafter,
    has_aux_hidden,
    has_head,
    has_lookup,
    names_of,
    spec_names,
)
from roost.errors import ConfigError
from roost.spec_shape import PLAIN, DraftKv, SpecShape, num_candidates
from roost.spec_widths import AUTO_STEPS_MAX, LOOKUP_STEPS_MAX, Widths


def spec_shape(config: SpecConfig) -> SpecShape:
    """The shape of the rounds that are asked for; raises ConfigError for what cannot work or would be ignored."""
    kind = drafter_of(config)
    if kind is None:
        return PLAIN
    steps = _spec_steps(config)
    topk = config.spec_topk if config.spec_topk is not None else 1
    joins = kind.joins_lookup and steps > 0 and lookup_of(config) != NO_LOOKUP
    lookup_steps = (LOOKUP_STEPS_MAX if is_auto(config) else steps) if joins or _is_long(config, kind) else 0
    tokens = config.spec_tokens
    if tokens is None:
        deepest = max(steps, lookup_steps)
        tokens = deepest + 1 if topk == 1 else min(TREE_TOKENS_DEFAULT, 1 + num_candidates(steps, topk))
    if topk > 1 and not kind.trees:
        raise ConfigError(f"--spec-topk must be 1 for --spec {kind.name}, which drafts chains, got {topk}")
    shape = SpecShape(
        steps=steps,
        topk=topk,
        tokens=tokens,
        draft_kv=kind.draft_kv,
        reads_history=kind.reads_history or joins,
        lookup_steps=lookup_steps,
    )
    shape.check()
    lookup_of(config)
    if steps == 0 and kind.draft_kv is DraftKv.NONE:  # one with KV may only keep up with the target
        raise ConfigError(f"--spec-steps must be at least 1 for --spec {kind.name}, got 0")
    if config.spec_max_batch is not None:
        at_least("--spec-max-batch", config.spec_max_batch, 1)
        if not shape.speculates:
            raise ConfigError("--spec-max-batch needs --spec-steps of at least 1: without drafts it says nothing")
    return shape


def lookup_of(config: SpecConfig) -> str:
    """Where drafts are looked up, one of `LOOKUPS`; raises ConfigError where that says nothing, or cannot be."""
    kind, asked = drafter_of(config), config.spec_lookup
    if asked is not None and asked not in LOOKUPS:
        raise ConfigError(f"--spec-lookup must be one of {', '.join(LOOKUPS)}, got {asked}")
    if kind is None or not has_lookup(kind):
        if asked is not None:
            raise _not_for("--spec-lookup", names_of(has_lookup), kind.name if kind is not None else NO_DRAFTER)
        return NO_LOOKUP
    if kind.looks_up and asked == NO_LOOKUP:
        raise ConfigError(f"--spec-lookup {NO_LOOKUP} leaves --spec {kind.name} nothing to draft: use --spec none")
    if asked not in (None, NO_LOOKUP) and config.spec_steps == 0:
        raise ConfigError(f"--spec-lookup {asked} needs --spec-steps of at least 1: without drafts it says nothing")
    return asked or SHARED_LOOKUP


def _is_long(config: SpecConfig, kind: DrafterKind) -> bool:
    """Whether drafts that are all looked up may be longer than others."""
    return kind.looks_up and is_auto(config)


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
    return drafter_of(config) is not None and not states_length and config.spec_topk in (None, 1)


def spec_widths(config: SpecConfig, *, narrows: bool = False) -> Widths:
    """How many nodes the rounds that are asked for may verify; `narrows`: where they can be narrowed."""
    shape, is_any = spec_shape(config), is_auto(config)
    narrows = narrows and is_any and shape.lookup_steps > 0
    return Widths(shape=shape, is_auto=is_any, limit=config.spec_max_batch, narrows=narrows)


def drafter_of(config: SpecConfig) -> DrafterKind | None:
    """Who drafts, None if nobody does; without a head `auto` is `WITHOUT_HEAD`. Refuses what does not belong to it."""
    if config.spec is not None and config.spec not in spec_names():
        raise ConfigError(f"--spec must be one of {', '.join(spec_names())}, got {config.spec}")
    if config.spec in (None, ANY_DRAFTER) and config.draft is not None:  # start-up reads the head and says which
        known = _any_of(names_of(has_head))
        raise ConfigError(f"--draft {config.draft}: which drafter this head is for is not known; give --spec {known}")
    name = WITHOUT_HEAD.name if config.spec == ANY_DRAFTER else config.spec or NO_DRAFTER
    kind = None if name == NO_DRAFTER else find_drafter(name)
    is_headed = kind is not None and has_head(kind)
    if is_headed and config.draft is None:
        raise ConfigError(f"--spec {name} needs --draft, the folder of its head")
    if config.draft is not None and not is_headed:
        raise _not_for("--draft", (*names_of(has_head), ANY_DRAFTER), name)
    if config.draft_layer_ids is not None and config.draft_layer_ids not in LAYER_ID_SHIFTS:
        raise ConfigError(f"--draft-layer-ids must be {_any_of(tuple(LAYER_ID_SHIFTS))}, got {config.draft_layer_ids}")
    if config.draft_layer_ids is not None and (kind is None or not has_aux_hidden(kind)):
        raise _not_for("--draft-layer-ids", names_of(has_aux_hidden), name)
    if kind is None:
        for option, value in asdict(config).items():
            if option != "spec" and value is not None:
                raise _not_for("--" + option.replace("_", "-"), spec_names()[1:], name)
    return kind


def _not_for(flag: str, names: Sequence[str], name: str) -> ConfigError:
    return ConfigError(f"{flag} is for --spec {_any_of(names)}, got --spec {name}")


def _any_of(names: Sequence[str]) -> str:
    """The names as people list them: a, b or c."""
    return " or ".join((", ".join(names[:-1]), names[-1])) if len(names) > 1 else names[0]
