"""Ours equals Hugging Face: greedy output and logits of tiny checkpoints, through the engine and its paged KV."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from roost.config import EngineConfig
from roost.layers.attention import Attend, causal_attention
from roost.models.llama import Llama
from tests.parity.tiny import CPU, WINDOW, Served, Tiny, configure, dense_greedy, dense_logits, greedy, prompts, tiny

DEPTHS = pytest.mark.parametrize("depth", [0, 1])
PAGE_SIZES = pytest.mark.parametrize("page_size", [1, 4, 16])
CHUNKS = pytest.mark.parametrize("chunk", [5, 512])

Work = Sequence[tuple[tuple[int, ...], int]]  # prompts and how many tokens each shall get


def several(seed: int = 0) -> Work:
    """Requests of different lengths."""
    return list(zip(prompts(1, 33, 7, 18, 16, seed=seed), (25, 14, 30, 1, 17), strict=True))


def serve(model: Llama, config: EngineConfig, work: Work) -> Served:
    """Run requests side by side."""
    served = Served(model, config)
    for number, (prompt, num_new) in enumerate(work):
        served.submit(f"r{number}", prompt, num_new)
    served.run()
    return served


def assert_equals_reference(served: Served, kind: str, work: Work) -> None:
    """Every output is what transformers generates."""
    for number, (prompt, num_new) in enumerate(work):
        assert served.output(f"r{number}") == greedy(kind, prompt, num_new), number
        assert served.finish(f"r{number}").reason == "length"


# --- greedy output ---------------------------------------------------------------------------------------------


@DEPTHS
@PAGE_SIZES
@CHUNKS
@pytest.mark.parametrize("mixed", [False, True])
def test_greedy_output_equals_transformers(depth: int, page_size: int, chunk: int, mixed: bool) -> None:
    work = several()
    config = configure(depth=depth, page_size=page_size, chunk=chunk, mixed=mixed, max_running=4)
    assert_equals_reference(serve(tiny("full").model(), config, work), "full", work)


@DEPTHS
@PAGE_SIZES
@CHUNKS
def test_retracted_requests_give_the_same_output(depth: int, page_size: int, chunk: int) -> None:
    work = list(zip(prompts(9, 12, 10, 14, seed=1), (40, 35, 45, 38), strict=True))
    config = configure(depth=depth, page_size=page_size, chunk=chunk, pool_tokens=96)
    served = serve(tiny("full").model(), config, work)
    assert served.count("retract") > 0
    assert_equals_reference(served, "full", work)


@DEPTHS
@PAGE_SIZES
def test_a_prompt_found_in_the_prefix_tree_gives_the_same_output(depth: int, page_size: int) -> None:
    (prompt,) = prompts(40, seed=2)
    work = [(prompt, 9), (prompt, 9), (prompt[:33], 12)]
    served = Served(tiny("full").model(), configure(depth=depth, page_size=page_size))
    for number, (tokens, num_new) in enumerate(work):
        served.submit(f"r{number}", tokens, num_new)
        served.run()  # one after the other, so that the next finds what the last published
    assert_equals_reference(served, "full", work)
    assert served.finish("r1").usage.cached_tokens >= 39 // page_size * page_size


@DEPTHS
def test_a_shared_embedding_equals_transformers(depth: int) -> None:
    work = several(seed=3)
    assert_equals_reference(serve(tiny("tied").model(), configure(depth=depth, chunk=5), work), "tied", work)


# --- sessions --------------------------------------------------------------------------------------------------


@DEPTHS
@PAGE_SIZES
@pytest.mark.parametrize("kind", ["full", "window"])
def test_three_turns_of_a_session_equal_one_long_prompt(depth: int, page_size: int, kind: str) -> None:
    served = Served(tiny(kind).model(), configure(depth=depth, page_size=page_size, chunk=5))
    served.open("s")
    history: tuple[int, ...] = ()
    for number, prompt in enumerate(prompts(13, 6, 21, seed=4)):
        name = f"turn{number}"
        served.submit(name, prompt, 11, session="s")
        served.submit(f"beside{number}", prompt, 8)
        served.run()
        assert served.output(name) == greedy(kind, history + prompt, 11), name
        assert served.output(f"beside{number}") == greedy(kind, prompt, 8), name
        lack = 1 - depth if history else 0  # depth 0 ends before the last token's KV is written
        assert served.finish(name).usage.cached_tokens == len(history) - lack
        history += prompt + served.output(name)


# --- sliding windows -------------------------------------------------------------------------------------------


@DEPTHS
@PAGE_SIZES
@CHUNKS
def test_a_window_in_every_layer_equals_transformers(depth: int, page_size: int, chunk: int) -> None:
    work = several(seed=5)
    config = configure(depth=depth, page_size=page_size, chunk=chunk)
    assert_equals_reference(serve(tiny("window").model(), config, work), "window", work)


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 4])
def test_window_pages_used_again_give_the_same_output(depth: int, page_size: int) -> None:
    work = list(zip(prompts(30, 41, 12, 25, seed=6), (70, 50, 60, 40), strict=True))
    config = configure(depth=depth, page_size=page_size, chunk=5, window_pool_tokens=120)
    assert_equals_reference(serve(tiny("window").model(), config, work), "window", work)


def mixed_layers(*window_layers: int) -> Tiny:
    """The Llama checkpoint with a window in some layers; transformers has no such Llama."""
    full = tiny("full")
    return replace(full, config=replace(full.config, window=WINDOW, window_layers=frozenset(window_layers)))


@DEPTHS
@PAGE_SIZES
@pytest.mark.parametrize("window_layers", [(0, 2), (1,)])
def test_full_and_window_layers_together_equal_a_dense_computation(
    depth: int, page_size: int, window_layers: tuple[int, ...]
) -> None:
    checkpoint = mixed_layers(*window_layers)
    work = list(zip(prompts(30, 5, 17, seed=8), (12, 20, 16), strict=True))
    config = configure(depth=depth, page_size=page_size, chunk=5, window_pool_tokens=256)
    served = serve(checkpoint.model(), config, work)
    state = checkpoint.reference.state_dict()
    for number, (prompt, num_new) in enumerate(work):
        assert served.output(f"r{number}") == dense_greedy(checkpoint.config, state, prompt, num_new), number


# --- failures --------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("broken_call", [0, 3, 9, 16])
def test_a_step_that_breaks_once_is_retried_with_the_same_output(
    depth: int, broken_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny("full").model()
    forward, calls = model.forward, []

    def break_once(tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        calls.append(len(tokens))
        hidden = forward(tokens, positions, attend)  # KV is written by then
        if len(calls) - 1 == broken_call:
            raise RuntimeError("the device is gone")
        return hidden

    monkeypatch.setattr(model, "forward", break_once)
    work = several(seed=9)
    served = serve(model, configure(depth=depth, chunk=5), work)
    assert served.count("fail") == 1
    assert_equals_reference(served, "full", work)


# --- logits ----------------------------------------------------------------------------------------------------


def reference_logits(kind: str, prompt: tuple[int, ...]) -> Tensor:
    """Scores after every token, by transformers."""
    with torch.no_grad():
        return tiny(kind).reference(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("kind", ["full", "tied", "window"])
def test_dense_logits_are_close_to_transformers(kind: str) -> None:
    (prompt,) = prompts(37, seed=10)
    model = tiny(kind).model()
    windows = model.kv.windows

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return causal_attention(query, key, value, start=0, first=0, window=windows[layer])

    hidden = model.forward(torch.tensor(prompt), torch.arange(len(prompt)), attend)
    torch.testing.assert_close(model.logits(hidden), reference_logits(kind, prompt), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["full", "window"])
def test_the_dense_computation_of_these_tests_is_close_to_transformers(kind: str) -> None:
    (prompt,) = prompts(37, seed=11)
    checkpoint = tiny(kind)
    logits = dense_logits(checkpoint.config, checkpoint.reference.state_dict(), prompt)
    torch.testing.assert_close(logits, reference_logits(kind, prompt), atol=1e-4, rtol=1e-4)


@PAGE_SIZES
@pytest.mark.parametrize("kind", ["full", "window"])
def test_paged_and_chunked_logits_are_close_to_transformers(
    page_size: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = prompts(37, seed=12)
    model = tiny(kind).model()
    forward, passes = model.forward, []

    def record(tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        passes.append(forward(tokens, positions, attend))
        return passes[-1]

    monkeypatch.setattr(model, "forward", record)
    serve(model, configure(page_size=page_size, chunk=5), [(prompt, 1)])
    assert [len(hidden) for hidden in passes] == [5] * 7 + [2]
    logits = model.logits(torch.cat(passes))
    torch.testing.assert_close(logits, reference_logits(kind, prompt), atol=1e-4, rtol=1e-4, check_device=False)
    assert logits.device == CPU
