"""Recipes by which engines have said something else on models with recurrent state: each says what transformers says.

Drafts meet the prefix cache: a state that was kept behind a draft that was refused, or at another position than its
prefix, shows in whatever the history had to say.
"""

from dataclasses import replace

import pytest

from roost.messages import Abort, FlushCache
from tests.support.spec_matrix import DRAFTERS, OWN_HEADS, Cell, head_of, model_of
from tests.support.tiny_models import Served, greedy, prompts

SPACING = 16  # tokens between states in the prefix cache
DRAFTED = pytest.mark.parametrize("drafter", ["plain", "ngram", "eagle-chain", "mtp-chain", "mtp-tree", "mtp-joint"])
DEPTHS = pytest.mark.parametrize("depth", [0, 1])
KIND = "qwen3.5"


def engine(drafter: str, depth: int, *, page_size: int = 4, max_running: int = 4) -> Served:
    """One that keeps many states of a prompt."""
    cell = Cell(drafter=drafter, depth=depth, page_size=page_size, kind=KIND, load="mixed")
    memory, sched = cell.config.memory, cell.config.sched
    config = replace(
        cell.config,
        memory=replace(memory, state_spacing=SPACING, pool_tokens=4096, window_pool_tokens=4096),
        sched=replace(sched, max_running=max_running, context=256),
    )
    head, _ = {**DRAFTERS, **OWN_HEADS}[drafter]
    return Served(model_of(KIND), config, head=head and head_of(head, KIND))


def check(served: Served, name: str, prompt: tuple[int, ...], num_new: int) -> None:
    """A request said what transformers says."""
    assert served.output(name) == greedy(KIND, prompt, num_new), name


@DEPTHS
@DRAFTED
def test_a_needle_in_a_cached_history_is_asked_for_again_and_again(drafter: str, depth: int) -> None:
    hay, needle, *questions = prompts(30, 7, 5, 9, 6, 3, seed=31)
    history = hay + needle + hay[:20] + needle  # n-grams of it are found again
    served = engine(drafter, depth)
    served.submit("first", history + questions[0], 12)
    served.run()
    check(served, "first", history + questions[0], 12)
    for number, question in enumerate(questions[1:]):
        served.submit(f"r{number}", history + question, 14)  # side by side, all on the same states
    served.run()
    for number, question in enumerate(questions[1:]):
        check(served, f"r{number}", history + question, 14)
        assert served.finish(f"r{number}").usage.cached_tokens > len(history) - SPACING
    whole = history + questions[0] + served.output("first")
    served.submit("on", whole + questions[1], 10)
    served.run()
    check(served, "on", whole + questions[1], 10)
    assert served.finish("on").usage.cached_tokens > len(history)
    served.executor.close()


@DEPTHS
@DRAFTED
def test_what_was_aborted_among_drafts_is_sent_again(drafter: str, depth: int) -> None:
    (prompt,) = prompts(26, seed=32)
    prompt = prompt + prompt[:15]
    served = engine(drafter, depth)
    for number, ticks in enumerate((3, 4, 5, 7)):
        served.submit(f"a{number}", prompt, 40)
        for _ in range(ticks):
            served.engine.tick()
        served.post(Abort(request_id=f"a{number}"))
        served.run()
        said = served.output(f"a{number}")
        assert said == greedy(KIND, prompt, 40)[: len(said)]
        served.submit(f"b{number}", prompt + said, 9)
        served.run()
        check(served, f"b{number}", prompt + said, 9)
    served.executor.close()


@DEPTHS
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_prompts_that_end_where_states_and_pages_do_go_on_from_there(page_size: int, depth: int) -> None:
    (text,) = prompts(70, seed=33)
    served = engine("mtp-chain", depth, page_size=page_size)
    for length in (15, 16, 17, 31, 32, 33, 48, 64):
        served.submit(f"p{length}", text[:length], 5)
        served.run()
        check(served, f"p{length}", text[:length], 5)
    served.executor.close()


@DEPTHS
def test_a_row_that_is_used_again_starts_from_nothing(depth: int) -> None:
    one, two = prompts(40, 11, seed=34)
    served = engine("mtp-chain", depth, max_running=1)
    for number, prompt in enumerate((one, two, one, two)):
        served.submit(f"r{number}", prompt, 8)
        served.run()
        check(served, f"r{number}", prompt, 8)
        assert served.finish(f"r{number}").usage.cached_tokens == 0
        served.post(FlushCache())
        served.run()
    served.executor.close()
