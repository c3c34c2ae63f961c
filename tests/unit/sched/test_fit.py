"""Fit: a request that could never run, even alone, is refused with the numbers."""

import pytest

from roost.config.options import EngineConfig, MemoryConfig, SchedConfig
from roost.config.resolve import resolve
from roost.config.resolved import ModelTraits, Resolved
from roost.errors import RequestError
from roost.messages import Submit
from roost.sched.fit import resolve_max_new
from roost.spec_shape import PLAIN, DraftKv, SpecShape
from tests.support.spec_configs import spec_config

CHAIN = SpecShape(steps=3, topk=1, tokens=4, draft_kv=DraftKv.PAIR)
TREE = SpecShape(steps=3, topk=2, tokens=6, draft_kv=DraftKv.PAIR)


def _small_pool() -> EngineConfig:
    """11 usable pages of 4: 44 positions, of which a round's reserve and run take 8."""
    memory = MemoryConfig(page_size=4, pool_tokens=48)
    return EngineConfig(memory=memory, sched=SchedConfig(context=1000), spec=spec_config(CHAIN))


RESOLVED = resolve(_small_pool(), ModelTraits(vocab_size=10))


def _submit(max_new_tokens: int | None) -> Submit:
    return Submit(request_id="a", tokens=(1,), max_new_tokens=max_new_tokens)


def test_prompt_output_reserve_and_run_must_fit_an_empty_pool() -> None:
    assert resolve_max_new(RESOLVED, _submit(16), 20) == 16
    with pytest.raises(
        RequestError, match=r"prompt of 20 and 17 new tokens need \[12\] pages.* \[11\] of 4.*allowed length is"
    ) as error:
        resolve_max_new(RESOLVED, _submit(17), 20)
    assert (error.value.status, error.value.param) == (413, "tokens")


@pytest.mark.parametrize("window", [None, 6], ids=["full", "full + window"])
@pytest.mark.parametrize("spec", [PLAIN, CHAIN, TREE], ids=["plain", "chain", "tree"])
@pytest.mark.parametrize("page_size", [1, 4])
def test_a_request_is_taken_exactly_if_its_worst_case_fits_every_book(
    page_size: int, spec: SpecShape, window: int | None
) -> None:
    memory = MemoryConfig(page_size=page_size, pool_tokens=200, window_pool_tokens=60)
    sched = SchedConfig(context=1000, chunk=20)  # so large a chunk that the window pool is a limit, too
    config = EngineConfig(memory=memory, sched=sched, spec=spec_config(spec))
    resolved = resolve(config, ModelTraits(vocab_size=10, window=window))
    prompt_len, taken = 10, []
    for max_new in range(200):
        length = prompt_len + max_new
        fits = all(
            -(-(length + reserve + spec.accept_max) // page_size) < book.num_pages
            for reserve, book in zip(resolved.reserves, resolved.books, strict=True)
        )
        taken.append(_is_taken(resolved, prompt_len, max_new))
        assert taken[-1] == fits
    assert True in taken and False in taken
    assert resolve_max_new(resolved, _submit(None), prompt_len) == taken.index(False) - 1


def _is_taken(resolved: Resolved, prompt_len: int, max_new: int) -> bool:
    try:
        return resolve_max_new(resolved, _submit(max_new), prompt_len) == max_new
    except RequestError as error:
        assert error.status == 413
        return False


def test_an_absent_limit_becomes_what_pool_and_context_allow() -> None:
    assert resolve_max_new(RESOLVED, _submit(None), 20) == 16
    assert resolve_max_new(RESOLVED, _submit(None), 35) == 1
    with pytest.raises(RequestError, match="prompt of 36 and 1 new"):
        resolve_max_new(RESOLVED, _submit(None), 36)


def test_the_context_limits_prompt_and_output_together() -> None:
    resolved = resolve(EngineConfig(sched=SchedConfig(context=100)), ModelTraits(vocab_size=10))
    assert resolve_max_new(resolved, _submit(None), 60) == 40
    assert resolve_max_new(resolved, _submit(0), 100) == 0
    with pytest.raises(
        RequestError, match=r"prompt of 60 and 41 new .* maximum allowed length: --context 100"
    ) as error:
        resolve_max_new(resolved, _submit(41), 60)
    assert (error.value.status, error.value.param) == (413, "tokens")
    with pytest.raises(RequestError, match=r"prompt of 101 and 0 new .* --context 100"):
        resolve_max_new(resolved, _submit(0), 101)


@pytest.mark.parametrize(("prompt_len", "most"), [(60, 40), (99, 1)])
def test_a_least_output_past_the_context_is_refused_by_its_name(prompt_len: int, most: int) -> None:
    resolved = resolve(EngineConfig(sched=SchedConfig(context=100)), ModelTraits(vocab_size=10))
    fits, large = (Submit(request_id="a", tokens=(1,), min_new_tokens=least) for least in (most, most + 1))
    assert resolve_max_new(resolved, fits, prompt_len) == most
    with pytest.raises(RequestError, match=rf"must be in \[0, {most}\], got {most + 1}; .* --context is 100") as error:
        resolve_max_new(resolved, large, prompt_len)
    assert (error.value.status, error.value.param) == (400, "min_new_tokens")


def test_a_least_output_past_the_pool_or_the_session_is_refused_by_its_name() -> None:
    large = Submit(request_id="a", tokens=(1,), min_new_tokens=17)
    with pytest.raises(RequestError, match=r"must be in \[0, 16\], got 17; .*an empty pool holds no more"):
        resolve_max_new(RESOLVED, large, 20)
    with pytest.raises(RequestError, match=r"must be in \[0, 5\], got 17; .*the session's max_tokens is 25"):
        resolve_max_new(RESOLVED, large, 20, session_max=25)


def test_a_window_pool_that_holds_the_windows_limits_no_length() -> None:
    memory = MemoryConfig(page_size=4, pool_tokens=4000, window_pool_tokens=400)
    config = EngineConfig(memory=memory, sched=SchedConfig(context=900, chunk=16))
    resolved = resolve(config, ModelTraits(vocab_size=10, window=16))
    assert resolve_max_new(resolved, _submit(None), 500) == 400


def test_a_session_without_tokens_has_nothing_to_run() -> None:
    with pytest.raises(RequestError, match="at least 1 token"):
        resolve_max_new(RESOLVED, _submit(1), 0)
