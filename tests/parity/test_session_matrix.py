"""Sessions are exact on the real engine: drafters, layers, pages and loads, each with each, in every scene.

Each turn inherits what was predicted, says what the same conversation says as one prompt, and leaves every page in its
place. Pools start as NaN, and every tick is audited page by page.
"""

from functools import cache

import pytest

from tests.support.forced_drafts import Knowing, Prompt, model_of, null_prompts
from tests.support.random_heads import make_head
from tests.support.session_clients import Talks
from tests.support.session_matrix import CELLS, LARGE_PAGES, NAMED, QUANTISED, WIDE_PAGES, Cell, drawn
from tests.support.session_scenes import SCENES, play
from tests.support.slow_reference import next_tokens

ALWAYS = ("turns", "together", "aborts")  # scenes that every named cell plays
DRAWN = drawn(SCENES)


@pytest.mark.parametrize("name", NAMED)
def test_in_each_named_engine_turns_inherit_what_was_predicted(name: str) -> None:
    talks = play(NAMED[name], *ALWAYS)
    assert (talks.engine.state.totals.preemptions > 0) == (NAMED[name].load == "preemptions")


@pytest.mark.parametrize("name", QUANTISED)
def test_with_quantised_kv_turns_say_what_one_prefill_of_the_conversation_says(name: str) -> None:
    cell, scenes = QUANTISED[name]
    play(cell, *scenes)


@pytest.mark.parametrize("layers", LARGE_PAGES)
def test_turns_too_long_for_a_context_of_512_cost_a_session_on_pages_of_256_nothing(layers: str) -> None:
    play(LARGE_PAGES[layers], "over_length", "refusals")


def test_thirty_turns_on_pages_of_512_with_eight_branches_leak_nothing() -> None:
    talks = Talks(WIDE_PAGES, max_running=1)
    talks.begin("s")
    for number, prompt in enumerate(null_prompts(*[13, 24, 31] * 10, seed=4)):
        talks.turn("s", prompt[number > 0 :], 1 + number % 7)
        talks.assert_at_rest()
    assert talks.engine.state.spec_counters.snapshot().overshoot > 0
    assert len(talks.talks["s"].tokens) > 512
    talks.wind_up()
    talks.executor.close()


@pytest.mark.parametrize(
    ("layers", "drafter", "page_size", "load"),
    [
        ("window", "chain0", 1, "preemptions"),
        ("window", "chain1", 256, "preemptions"),
        ("window", "tree1", 16, "whole"),
        ("mixed", "chain0", 256, "whole"),
        ("mixed", "chain1", 16, "preemptions"),
        ("mixed", "tree1", 1, "whole"),
        ("convolutions", "chain1", 1, "preemptions"),
        ("convolutions", "tree1", 1, "whole"),
        ("convolutions", "tree1", 16, "preemptions"),
    ],
)
def test_rounds_that_overshoot_beside_a_window_leave_what_was_returned(
    layers: str, drafter: str, page_size: int, load: str
) -> None:
    cell = Cell(drafter=drafter, layers=layers, page_size=page_size, load=load)
    turns, text = _conversation(cell.kind)
    head = Knowing(make_head("eagle", model_of(cell.kind)), text, decoy_after=range(0, len(text), 3))
    talks = Talks(cell, head=head, max_running=1)
    talks.begin("s")
    for number, (prompt, num_new) in enumerate(turns):
        if number % 2:  # one that is gone in the middle of its rounds, on the same text
            gone = talks.say("s", prompt, num_new + 9)
            talks.tick(3)
            talks.abort(gone)
            talks.finish_all()
            talks.assert_at_rest()
        talks.turn("s", prompt, num_new)
        talks.assert_at_rest()
    assert talks.engine.state.spec_counters.snapshot().overshoot > 0
    assert talks.talks["s"].tokens == text
    talks.wind_up()
    talks.executor.close()


@cache
def _conversation(kind: str) -> tuple[list[tuple[Prompt, int]], Prompt]:
    """Inputs with how many tokens each shall get, cut at every length of a last round; and all that is said."""
    turns = list(zip(null_prompts(23, 5, 6, 4, 7, seed=5), (6, 3, 8, 7, 4), strict=True))
    text: Prompt = ()
    for prompt, num_new in turns:
        text += prompt + next_tokens(kind, text + prompt, num_new)
    return turns, text


@pytest.mark.parametrize(("cell", "scene"), DRAWN, ids=lambda value: value.name if isinstance(value, Cell) else value)
def test_a_drawn_scene_in_a_drawn_engine_is_exact_and_leaves_nothing_behind(cell: Cell, scene: str) -> None:
    play(cell, scene)


@pytest.mark.full
@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_every_scene_in_every_engine_is_exact_and_leaves_nothing_behind(cell: Cell) -> None:
    play(cell, *SCENES)
