"""Configuration: what cannot work is refused at start, with the flag and what it may be."""

from dataclasses import replace

import pytest

from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits, Resolved
from roost.errors import ConfigError
from roost.messages import Submit
from roost.sched.fit import resolve_max_new
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from tests.support.spec_configs import spec_config

TRAITS = ModelTraits(vocab_size=100)
TREE = SpecShape(steps=5, topk=8, tokens=32, draft_kv=DraftKv.PAIR)


def _config(**changes: float) -> EngineConfig:
    memory, sched = MemoryConfig(), SchedConfig()
    for name, value in changes.items():
        if name in MemoryConfig.__slots__:
            memory = replace(memory, **{name: value})
        else:
            sched = replace(sched, **{name: value})
    return EngineConfig(memory=memory, sched=sched)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("page_size", 0, "--page-size must be at least 1, got 0"),
        ("page_size", -4, "--page-size must be at least 1, got -4"),
        ("pool_tokens", 0, "--pool-tokens must be at least 1"),
        ("window_pool_tokens", -1, "--window-pool-tokens must be at least 1"),
        ("pool_tokens", 31, "--pool-tokens must be at least 32: one request's reserve and the null page are 2 pages"),
        ("strict_memory", 3, "--strict-memory must be 0, 1 or 2, got 3"),
        ("strict_memory", -1, "--strict-memory must be 0, 1 or 2, got -1"),
        ("context", 1, "--context must be at least 2"),
        ("max_running", 0, "--max-running must be at least 1"),
        ("max_queued", 0, "--max-queued must be at least 1"),
        ("chunk", 0, "--chunk must be at least 1, got 0"),
        ("itl_target_ms", 0.0, "--itl-target-ms must be a number of milliseconds above 0, got 0.0"),
        ("itl_target_ms", -5.0, "--itl-target-ms must be a number of milliseconds above 0, got -5.0"),
        ("itl_target_ms", float("nan"), "--itl-target-ms must be a number of milliseconds above 0, got nan"),
        ("itl_target_ms", float("inf"), "--itl-target-ms must be a number of milliseconds above 0, got inf"),
    ],
)
def test_an_impossible_option_is_refused_with_its_flag_and_range(name: str, value: float, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(_config(**{name: value}), TRAITS)


def test_a_pool_smaller_than_one_trees_reserve_is_refused_with_the_pages_it_needs() -> None:
    spec = spec_config(TREE)
    config = replace(_config(page_size=16, pool_tokens=48), spec=spec)
    with pytest.raises(ConfigError, match=r"--pool-tokens must be at least 64: .* 4 pages .* got 3 pages"):
        resolve(config, TRAITS)
    assert resolve(replace(_config(page_size=16, pool_tokens=64), spec=spec), TRAITS).reserves == (32,)


@pytest.mark.parametrize(
    ("traits", "message"),
    [
        (ModelTraits(vocab_size=100, window=0), "sliding window must be at least 1, got 0"),
        (ModelTraits(vocab_size=100, has_full_layers=False), "neither full-attention nor sliding-window layers"),
        (ModelTraits(vocab_size=0), "vocabulary must hold at least 1 token"),
    ],
)
def test_an_impossible_model_is_refused(traits: ModelTraits, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(_config(), traits)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (SpecShape(steps=3, topk=1, tokens=3), r"--spec-tokens must be --spec-steps \+ 1 = 4 .*, got 3"),
        (replace(TREE, tokens=8 + 4 * 64 + 2), r"--spec-tokens must be in \[2, 265\].*, got 266"),
        (SpecShape(steps=-1), "--spec-steps must be at least 0, got -1"),
    ],
)
def test_an_impossible_tree_is_refused(spec: SpecShape, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(replace(_config(), spec=spec_config(spec)), TRAITS)


def _with_pools(full_pages: int, window_pages: int, page_size: int, spec: SpecShape, window: int | None) -> Resolved:
    memory = MemoryConfig(
        page_size=page_size, pool_tokens=full_pages * page_size, window_pool_tokens=window_pages * page_size
    )
    traits = ModelTraits(vocab_size=100, window=window)
    return resolve(EngineConfig(memory=memory, sched=SchedConfig(chunk=8), spec=spec_config(spec)), traits)


@pytest.mark.parametrize("window", [None, 1, 20])
@pytest.mark.parametrize("spec", [PLAIN, SpecShape(steps=3, topk=1, tokens=4), TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 4, 64])
def test_the_smallest_pool_that_is_taken_serves_the_smallest_request(
    page_size: int, spec: SpecShape, window: int | None
) -> None:
    full, windowed = 1, 10**4
    while not _taken(full, windowed, page_size, spec, window):
        full += 1
    windowed = 1
    while not _taken(full, windowed, page_size, spec, window):
        windowed += 1
    resolved = _with_pools(full, windowed, page_size, spec, window)
    need = [resolved.pages_to_hold(book, resolved.length_to_fit(book, 2)) for book in range(len(resolved.books))]
    assert [book.num_pages for book in resolved.books] == [pages + 1 for pages in need]  # and the null page
    assert resolve_max_new(resolved, Submit(request_id="a", tokens=(1,), max_new_tokens=1), 1) == 1


def _taken(full_pages: int, window_pages: int, page_size: int, spec: SpecShape, window: int | None) -> bool:
    try:
        _with_pools(full_pages, window_pages, page_size, spec, window)
    except ConfigError as error:
        assert "pool-tokens must be at least" in str(error)
        return False
    return True


def test_a_window_pool_too_small_is_refused_by_its_own_flag() -> None:
    with pytest.raises(ConfigError, match=r"--window-pool-tokens must be at least 32: .* got 1 pages"):
        resolve(_config(window_pool_tokens=16), ModelTraits(vocab_size=100, window=8))


def test_draft_layers_live_in_the_full_book_even_if_the_target_is_all_window() -> None:
    traits = ModelTraits(vocab_size=100, window=128, has_full_layers=False)
    assert [book.window for book in resolve(_config(), traits).books] == [128]
    resolved = resolve(replace(_config(), spec=spec_config(TREE)), traits)
    assert [book.window for book in resolved.books] == [None, 128]
    assert resolved.reserves == (TREE.alloc_len_per_decode, TREE.tokens)


def test_rows_are_wide_enough_for_the_context_and_both_rounds() -> None:
    resolved = resolve(replace(_config(page_size=64, context=1000), spec=spec_config(TREE)), TRAITS)
    assert resolved.row_width == -(-(1000 + 2 * 32) // 64) * 64


def test_an_overlapped_engine_has_twice_the_rows() -> None:
    assert resolve(_config(max_running=5), TRAITS).num_rows == 10
    assert resolve(EngineConfig(sched=SchedConfig(max_running=5, overlap=False)), TRAITS).num_rows == 5


def test_a_window_book_needs_windows_not_the_whole_length() -> None:
    resolved = resolve(_config(chunk=64), ModelTraits(vocab_size=100, window=32))
    assert resolved.pages_to_hold(0, 100_000) == 6250
    assert resolved.pages_to_hold(1, 100_000) == resolved.pages_to_hold(1, 10_000) < 30
    assert resolved.pages_to_hold(1, 40) == 3
