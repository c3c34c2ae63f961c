"""Questions are asked in both ways, answers that go round in circles are known, and shards keep everything."""

from pathlib import Path

import pytest

from roost.train.answers import Question, TrainingAnswer, questions, read_shards, write_shard


def said(*output: int) -> TrainingAnswer:
    return TrainingAnswer(prompt=(1, 2), output=output, is_drawn=False)


@pytest.mark.parametrize("period", [1, 2, 7, 31, 32])
def test_an_answer_that_ends_in_a_circle_loops(period: int) -> None:
    assert said(*range(100, 140), *(tuple(range(period)) * 130)[:130]).is_looping


@pytest.mark.parametrize(
    "output",
    [
        tuple(range(300)),
        (7,) * 63,  # too few to say so
        (*(1, 2, 3) * 60, 4),  # it found a way out
        tuple(range(33)) * 8,  # a circle that is too wide
        (),
    ],
)
def test_other_answers_do_not(output: tuple[int, ...]) -> None:
    assert not said(*output).is_looping


def test_every_prompt_is_asked_once_in_both_ways_unless_it_is_done() -> None:
    done = TrainingAnswer(prompt=(6, 7), output=(1,), is_drawn=False)
    asked = questions([(5,), (6, 7), (5,)], done={done.question})
    assert asked == [
        Question(prompt=(5,), is_drawn=False),
        Question(prompt=(5,), is_drawn=True),
        Question(prompt=(6, 7), is_drawn=True),
    ]
    assert len({each.name for each in asked}) == 3


def test_shards_give_back_what_was_put_in(tmp_path: Path) -> None:
    answers = [
        TrainingAnswer(prompt=tuple(range(n)), output=(n, 70_000, *range(n)), is_drawn=bool(n % 2)) for n in range(5)
    ]
    write_shard(tmp_path / "a.safetensors", answers[:3])
    write_shard(tmp_path / "b.safetensors", answers[3:])
    assert read_shards([tmp_path / "a.safetensors", tmp_path / "b.safetensors"]) == answers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
