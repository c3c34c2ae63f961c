"""Routing: what models and attention backends declare becomes a choice, or an error with the flags."""

from dataclasses import replace

import pytest

from roost.attention.registry import TORCH, TRITON
from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits
from roost.errors import ConfigError
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from tests.support.spec_configs import spec_config

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=3, topk=2, tokens=6, draft_kv=DraftKv.PAIR)
SIMPLE = replace(TORCH, name="simple", trees=False)
TRAITS = ModelTraits(vocab_size=100)
RECURRENT = ModelTraits(vocab_size=100, recurrent_state=True)


def _config(spec: SpecShape, page_size: int, overlap: bool = True) -> EngineConfig:
    return EngineConfig(
        memory=MemoryConfig(page_size=page_size), sched=SchedConfig(overlap=overlap), spec=spec_config(spec)
    )


@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("traits", [TRAITS, RECURRENT], ids=["attention", "recurrent"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_neither_large_pages_nor_recurrent_layers_force_depth_0(
    page_size: int, traits: ModelTraits, spec: SpecShape
) -> None:
    assert resolve(_config(spec, page_size), traits, TORCH).depth == 1
    assert resolve(_config(spec, page_size, overlap=False), traits, TORCH).depth == 0


@pytest.mark.parametrize("option", ["state_pool", "state_spacing", "state_turns"])
def test_options_of_recurrent_layers_are_refused_where_there_are_none(option: str) -> None:
    config = EngineConfig(memory=replace(MemoryConfig(), **{option: 64}))
    assert resolve(config, RECURRENT).states is not None
    with pytest.raises(ConfigError, match=f"--{option.replace('_', '-')} is for models with recurrent layers"):
        resolve(config, TRAITS)


def test_a_pool_of_states_holds_what_one_request_needs() -> None:
    needed = resolve(EngineConfig(), RECURRENT).states_to_hold
    assert resolve(EngineConfig(memory=MemoryConfig(state_pool=needed + 1)), RECURRENT).states is not None
    with pytest.raises(ConfigError, match=f"--state-pool must be at least {needed + 1}, got {needed}"):
        resolve(EngineConfig(memory=MemoryConfig(state_pool=needed)), RECURRENT)


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_tree_needs_a_backend_that_reads_trees(page_size: int) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(_config(TREE, page_size), TRAITS, SIMPLE)
    assert str(refused.value) == (
        "--spec-topk 2 needs an attention backend that reads trees: simple does not, these do: torch, triton, numba; "
        "or use --spec-topk 1"
    )


@pytest.mark.parametrize("spec", [CHAIN, PLAIN], ids=["chain", "plain"])
def test_a_backend_that_reads_no_trees_does_what_needs_none(spec: SpecShape) -> None:
    assert resolve(_config(spec, 16), TRAITS, SIMPLE).spec == spec


def _tree(steps: int, topk: int) -> SpecShape:
    return SpecShape(steps=steps, topk=topk, tokens=steps + 1, draft_kv=DraftKv.PAIR)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (_tree(19, 64), "--spec-steps 19 with --spec-topk 64 moves 1088 tokens of a round at once"),
        (_tree(1024, 2), "--spec-steps 1024 with --spec-topk 2 moves 2044 tokens of a round at once"),
    ],
)
def test_a_tree_that_a_backend_cannot_move_at_once_is_refused(spec: SpecShape, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(_config(spec, 16), TRAITS, TRITON)
    assert str(refused.value).startswith(message)
    assert resolve(_config(spec, 16), TRAITS, TORCH).spec == spec


@pytest.mark.parametrize(("spec", "page_size"), [(TREE, 2048), (CHAIN, 2048), (PLAIN, 2048), (_tree(18, 64), 16)])
def test_what_a_backend_can_move_at_once_is_taken(spec: SpecShape, page_size: int) -> None:
    assert resolve(_config(spec, page_size), TRAITS, TRITON).spec == spec
