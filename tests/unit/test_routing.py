"""Routing: what models and attention backends declare becomes a choice, with a warning, or an error with the flags."""

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
SIMPLE = replace(TORCH, name="simple", branch_pages=False)
TRAITS = ModelTraits(vocab_size=100)
RECURRENT = ModelTraits(vocab_size=100, recurrent_state=True)


def _config(spec: SpecShape, page_size: int, overlap: bool = True) -> EngineConfig:
    return EngineConfig(
        memory=MemoryConfig(page_size=page_size), sched=SchedConfig(overlap=overlap), spec=spec_config(spec)
    )


@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_large_pages_do_not_force_depth_0(page_size: int, spec: SpecShape) -> None:
    resolved = resolve(_config(spec, page_size), TRAITS, TORCH)
    assert (resolved.depth, resolved.warnings) == (1, ())


@pytest.mark.parametrize("spec", [PLAIN, TREE], ids=["plain", "tree"])
def test_a_model_with_recurrent_state_falls_back_to_depth_0_with_a_warning(spec: SpecShape) -> None:
    resolved = resolve(_config(spec, 16), RECURRENT)
    assert (resolved.depth, resolved.sched.overlap, resolved.num_rows) == (0, False, resolved.sched.max_running)
    assert resolved.warnings == (
        "--overlap: a model with recurrent state runs one step at a time, as with --no-overlap",
    )


def test_nobody_is_warned_of_what_was_asked_for() -> None:
    resolved = resolve(_config(PLAIN, 16, overlap=False), RECURRENT)
    assert (resolved.depth, resolved.warnings) == (0, ())


def test_a_tree_over_large_pages_needs_a_backend_with_branch_pages() -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(_config(TREE, 16), TRAITS, SIMPLE)
    assert str(refused.value) == (
        "--spec-topk 2 with --page-size 16 needs an attention backend with branch pages: simple has none, these have: "
        "torch, triton, numba; or use --spec-topk 1 or --page-size 1"
    )


@pytest.mark.parametrize(("spec", "page_size"), [(TREE, 1), (CHAIN, 16), (PLAIN, 16)])
def test_a_backend_without_branch_pages_does_what_needs_none(spec: SpecShape, page_size: int) -> None:
    assert resolve(_config(spec, page_size), TRAITS, SIMPLE).spec == spec


def _tree(steps: int, topk: int) -> SpecShape:
    return SpecShape(steps=steps, topk=topk, tokens=steps + 1, draft_kv=DraftKv.PAIR)


@pytest.mark.parametrize(
    ("spec", "page_size", "message"),
    [
        (_tree(3, 4), 1025, "--page-size must be at most 1024 with --spec-topk 4 on the triton backend"),
        (_tree(3, 4), 2048, "--page-size must be at most 1024 with --spec-topk 4 on the triton backend"),
        (_tree(19, 64), 16, "--spec-steps 19 with --spec-topk 64 moves 1088 tokens of a round at once"),
        (_tree(1024, 2), 1, "--spec-steps 1024 with --spec-topk 2 moves 2044 tokens of a round at once"),
    ],
)
def test_a_tree_that_a_backend_cannot_move_at_once_is_refused(spec: SpecShape, page_size: int, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve(_config(spec, page_size), TRAITS, TRITON)
    assert str(refused.value).startswith(message)
    assert resolve(_config(spec, page_size), TRAITS, TORCH).spec == spec


@pytest.mark.parametrize(("spec", "page_size"), [(TREE, 1024), (CHAIN, 2048), (PLAIN, 2048), (_tree(18, 64), 16)])
def test_what_a_backend_can_move_at_once_is_taken(spec: SpecShape, page_size: int) -> None:
    assert resolve(_config(spec, page_size), TRAITS, TRITON).spec == spec
