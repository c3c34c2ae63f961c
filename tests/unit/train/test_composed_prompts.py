"""Composed prompts are the same in every run, of every kind and length, and made of the given texts alone."""

import builtins
import io
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from roost.train.composed_prompts import LONG_CHARS, PASSAGE_CHARS_MIN, Material, compose

WORDS = "old harbour lies behind wall and in the morning boats come home with nets full of fish"


def passage(seed: int) -> str:
    random = Random(seed)
    return " ".join(
        " ".join(random.choices(WORDS.split(" "), k=random.randint(8, 20))).capitalize() + "."
        for _ in range(random.randint(8, 20))
    )


TEXTS = [f"Answer the question.\nContext: {passage(seed)}\nWhat is it?" for seed in range(60)] + [
    "Fix this.\n\ndef add(a, b):\n    return a - b\n\nfor x in y:\n    print(x)",
    "What is the capital of France?",
]


def test_the_same_texts_give_the_same_prompts_and_more_begin_with_the_same() -> None:
    assert compose(TEXTS, 300) == compose(TEXTS, 300)
    assert compose(TEXTS, 100) == compose(TEXTS, 300)[:100]
    assert compose(TEXTS, 0) == []


def test_prompts_differ_and_have_no_gaps_left() -> None:
    found = compose(TEXTS, 500)
    assert len({tuple(talk) for talk in found}) > 480
    assert all(turn.strip() for talk in found for turn in talk)
    for gap in ("{text}", "{list}", "{name}", "{length}", "{question}", "{language}"):
        assert not any(gap in turn for talk in found for turn in talk), gap


def test_some_contexts_are_long_and_none_too_long() -> None:
    lengths = [len(talk[0]) for talk in compose(TEXTS, 1000)]
    assert 0.08 < sum(length >= LONG_CHARS[0] for length in lengths) / len(lengths) < 0.25
    assert max(lengths) < 14_000 and sum(length < 1_000 for length in lengths) > 400


def test_some_are_conversations_of_several_turns() -> None:
    counts = Counter(len(talk) for talk in compose(TEXTS, 1000))
    assert set(counts) == {1, 2, 3, 4} and 0.05 < 1 - counts[1] / 1000 < 0.25


def test_passages_are_long_lines_without_their_labels_and_code_is_code() -> None:
    material = Material.of(TEXTS)
    assert material.passages == tuple(passage(seed) for seed in range(60))
    assert all(len(each) >= PASSAGE_CHARS_MIN for each in material.passages)
    assert material.codes == (TEXTS[60].split("\n\n", 1)[1],)


def test_without_passages_there_are_the_tasks_that_need_none() -> None:
    found = compose(["What is the capital of France?"], 200)
    assert len(found) == 200 and all(talk for talk in found)


def test_no_file_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("a file was opened")

    monkeypatch.setattr(builtins, "open", refuse)
    monkeypatch.setattr(io, "open", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    assert len(compose(TEXTS, 50)) == 50
