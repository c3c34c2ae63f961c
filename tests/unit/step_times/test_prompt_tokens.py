"""Prompt tokens: the time of a prompt token is learned from steps that differ in little else, and never guessed."""

import random

import pytest

from roost.step_times.prompt_tokens import PromptTokenTime


def _time(num_rounds: int, width: int, num_tokens: int) -> int:
    return 5000 + 600 * num_rounds * width + 60 * num_tokens


def test_a_step_without_chunks_is_all_rounds() -> None:
    assert PromptTokenTime().rest(0, 1234) == 1234


@pytest.mark.parametrize("num_rounds", [1, 32])
def test_steps_that_differ_in_their_chunks_tell_what_a_prompt_token_costs(num_rounds: int) -> None:
    chunks, rng = PromptTokenTime(), random.Random(0)
    for _ in range(50):
        num_tokens = rng.randint(1, 512)
        chunks.note(num_rounds, 3, num_tokens, _time(num_rounds, 3, num_tokens))
    for width in (1, 3, 5):
        rest = chunks.rest(100, _time(num_rounds, width, 100))
        assert rest == pytest.approx(_time(num_rounds, width, 0), abs=1)


def test_rounds_that_come_and_go_hardly_matter() -> None:
    chunks, rng = PromptTokenTime(), random.Random(0)
    for _ in range(200):
        num_rounds, num_tokens = rng.randint(24, 32), rng.randint(1, 512)
        chunks.note(num_rounds, 1, num_tokens, _time(num_rounds, 1, num_tokens))
    assert chunks.rest(100, _time(28, 1, 100)) == pytest.approx(_time(28, 1, 0), rel=0.1)


def test_chunks_that_are_always_alike_tell_nothing() -> None:
    chunks = PromptTokenTime()
    for _ in range(50):
        chunks.note(8, 3, 256, _time(8, 3, 256))
    assert chunks.rest(256, _time(8, 3, 256)) is None
    assert chunks.wants_pair


def test_one_chunk_that_is_shorter_is_enough_for_a_while() -> None:
    chunks, num_short = PromptTokenTime(), 0
    for _ in range(1000):
        num_tokens = 128 if chunks.wants_pair else 256
        num_short += num_tokens == 128
        chunks.note(8, 3, num_tokens, _time(8, 3, num_tokens))
    assert 8 <= num_short <= 12
    assert chunks.rest(256, _time(8, 3, 256)) == pytest.approx(_time(8, 3, 0), abs=1)


def test_rounds_alone_want_no_pair() -> None:
    chunks = PromptTokenTime()
    for _ in range(300):
        chunks.note(8, 3, 0, _time(8, 3, 0))
        chunks.note(0, 0, 256, _time(0, 0, 256))
    assert not chunks.wants_pair


def test_chunks_that_are_shorter_by_the_rounds_beside_them_tell_nothing() -> None:
    chunks = PromptTokenTime()
    for step in range(200):
        num_rounds, width = 24 + step * 7 % 9, 1 + step % 3
        num_tokens = 256 - num_rounds * width
        chunks.note(num_rounds, width, num_tokens, _time(num_rounds, width, num_tokens))
    assert chunks.rest(224, _time(32, 1, 224)) is None


def test_until_then_a_step_of_chunks_alone_bounds_it() -> None:
    chunks = PromptTokenTime()
    for _ in range(3):
        chunks.note(0, 0, 256, _time(0, 0, 256))
    chunks.note(0, 0, 256, 10**9)  # a late one
    rest = chunks.rest(200, _time(32, 1, 200))
    assert rest is not None and 0.75 * _time(32, 1, 0) < rest < _time(32, 1, 0)


def test_late_steps_change_nothing() -> None:
    chunks, rng = PromptTokenTime(), random.Random(0)
    for step in range(100):
        num_tokens = rng.randint(1, 512)
        chunks.note(4, 3, num_tokens, _time(4, 3, num_tokens) + 10**7 * (step % 10 == 0))
    assert chunks.rest(100, _time(4, 1, 100)) == pytest.approx(_time(4, 1, 0), rel=0.02)


def test_where_a_chunk_takes_almost_all_of_a_step_nothing_is_said_of_its_rounds() -> None:
    chunks = PromptTokenTime()
    for num_tokens in (100, 200, 300, 400, 100, 500):
        chunks.note(1, 1, num_tokens, 100 * num_tokens)
    assert chunks.rest(300, 100 * 300) is None
    assert chunks.rest(300, 100 * 250) is None
    assert chunks.rest(300, 100 * 400) == 100 * 100
