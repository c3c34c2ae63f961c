"""Admission charges exactly what a request may come to hold before a result is seen: not a page less, not one more."""

import pytest

from roost.kv.node import Key
from roost.kv.radix import Match
from roost.messages import Submit
from tests.support.engine_client import EngineClientDouble, engine_client

PAGE = 4


def _let_in(num_pages: int, length: int, spec: str, *, overlap: bool) -> EngineClientDouble:
    """An engine that two requests have just reached."""
    at = engine_client(num_pages=num_pages, spec=spec, overlap=overlap)
    for number in range(2):
        tokens = tuple(range(20 * number, 20 * number + length))
        at.engine.post(Submit(request_id=f"r{number}", tokens=tokens, max_new_tokens=1), at.events.append)
    at.tick()
    return at


# positions past the prompt that each is charged: a round's one, or 17 with drafts; two rounds can be in flight
@pytest.mark.parametrize(
    ("spec", "overlap", "past_the_prompt"),
    [("none", False, 1), ("none", True, 2), ("ngram", False, 17), ("ngram", True, 34)],
)
@pytest.mark.parametrize("length", [4, 5, 6, 7, 8])
def test_two_are_let_in_exactly_when_prompts_and_rounds_of_both_fit(
    spec: str, overlap: bool, past_the_prompt: int, length: int
) -> None:
    each = -(-(length + past_the_prompt) // PAGE)
    fits = _let_in(2 * each, length, spec, overlap=overlap)
    assert len(fits.engine.state.running) == 2 and fits.engine.waiting_for == ""
    does_not = _let_in(2 * each - 1, length, spec, overlap=overlap)
    assert len(does_not.engine.state.running) == 1 and f"{2 * each} pages" in does_not.engine.waiting_for
    does_not.run()
    assert {does_not.finished(name).reason for name in ("r0", "r1")} == {"length"}, "it only had to wait"


@pytest.mark.parametrize("overlap", [False, True])
def test_who_was_refused_starts_once_most_of_its_prompt_is_shared(overlap: bool) -> None:
    at = engine_client(num_pages=12, overlap=overlap)
    for number in range(2):
        tokens = tuple(range(32))  # 8 pages, of which the second needs one of its own
        at.engine.post(Submit(request_id=f"r{number}", tokens=tokens, max_new_tokens=10), at.events.append)
    at.tick()
    assert len(at.engine.state.running) == 1 and at.engine.waiting_for
    while not at.output("r0"):
        at.tick()
    assert len(at.engine.state.running) == 2, "nobody has ended, and no page more is free"
    at.run()


@pytest.mark.parametrize("overlap", [False, True])
def test_who_has_to_wait_is_not_looked_up_again_before_something_has_changed(overlap: bool) -> None:
    at = engine_client(num_pages=12, overlap=overlap)
    tree, looked_up = at.engine.state.store.tree, list[int]()
    match = tree.match

    def counted(cache_salt: str, key: Key) -> Match | None:
        looked_up.append(len(key))
        return match(cache_salt, key)

    tree.match = counted  # type: ignore[method-assign]
    for number in range(2):
        tokens = tuple(range(25 * number, 25 * number + 24))
        at.engine.post(Submit(request_id=f"r{number}", tokens=tokens, max_new_tokens=20), at.events.append)
    for _ in range(15):
        at.tick()
        assert len(at.engine.state.running) == 1 and at.engine.waiting_for
    assert len(looked_up) <= 3, "one for each, and one for what the first has shared"
    at.run()
    assert len(looked_up) <= 6
