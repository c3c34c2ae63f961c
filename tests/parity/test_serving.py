"""Served output equals transformers': preemptions, the prefix tree, sessions, windows and failures change no token."""

import pytest
from torch import Tensor

from roost.layers.attention import Attend
from tests.support.tiny_models import BACKEND, Served, configure, greedy, prompts, tiny
from tests.support.workload import CHUNKS, DEPTHS, PAGE_SIZES, assert_equals_reference, serve, several

# --- greedy output ---------------------------------------------------------------------------------------------


@DEPTHS
@CHUNKS
def test_prefill_in_steps_of_its_own_gives_the_same_output(depth: int, chunk: int) -> None:
    work = several()
    config = configure(depth=depth, chunk=chunk, mixed=False, max_running=4)
    assert_equals_reference(serve(tiny("llama").model(), config, work), "llama", work)


@DEPTHS
@PAGE_SIZES
@CHUNKS
def test_preempted_requests_give_the_same_output(depth: int, page_size: int, chunk: int) -> None:
    work = list(zip(prompts(9, 12, 10, 14, seed=1), (40, 35, 45, 38), strict=True))
    config = configure(depth=depth, page_size=page_size, chunk=chunk, pool_tokens=96)
    served = serve(tiny("llama").model(), config, work)
    assert served.count("preempt") > 0
    assert_equals_reference(served, "llama", work)


@DEPTHS
@PAGE_SIZES
def test_a_prompt_found_in_the_prefix_tree_gives_the_same_output(depth: int, page_size: int) -> None:
    (prompt,) = prompts(40, seed=2)
    work = [(prompt, 9), (prompt, 9), (prompt[:33], 12)]
    served = Served(tiny("llama").model(), configure(depth=depth, page_size=page_size))
    for number, (tokens, num_new) in enumerate(work):
        served.submit(f"r{number}", tokens, num_new)
        served.run()  # one after the other, so that the next finds what the last published
    assert_equals_reference(served, "llama", work)
    assert served.finish("r1").usage.cached_tokens >= 39 // page_size * page_size


# --- sessions --------------------------------------------------------------------------------------------------


@DEPTHS
@PAGE_SIZES
@pytest.mark.parametrize("kind", ["llama", "mistral"])
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
@pytest.mark.parametrize("page_size", [1, 4])
def test_window_pages_used_again_give_the_same_output(depth: int, page_size: int) -> None:
    work = list(zip(prompts(30, 41, 12, 25, seed=6), (70, 50, 60, 40), strict=True))
    config = configure(depth=depth, page_size=page_size, chunk=5, window_pool_tokens=120)
    assert_equals_reference(serve(tiny("mistral").model(), config, work), "mistral", work)


@DEPTHS
@PAGE_SIZES
@pytest.mark.parametrize("kind", ["qwen2-window", "gemma3"])
def test_window_pages_used_again_beside_full_layers_give_the_same_output(depth: int, page_size: int, kind: str) -> None:
    work = list(zip(prompts(30, 5, 17, seed=8), (12, 40, 16), strict=True))
    config = configure(depth=depth, page_size=page_size, chunk=5, window_pool_tokens=256)
    assert_equals_reference(serve(tiny(kind).model(), config, work), kind, work)


# --- failures --------------------------------------------------------------------------------------------------


@DEPTHS
@pytest.mark.parametrize("broken_call", [0, 3, 9, 16])
def test_a_step_that_breaks_once_is_retried_with_the_same_output(
    depth: int, broken_call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if BACKEND.name == "numba":
        pytest.skip("it calls the model once, and replays what was recorded")
    model = tiny("llama").model()
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
    assert_equals_reference(served, "llama", work)
