"""Conversations are held in both ways, answers that go round in circles are known, and shards keep everything."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from roost.text.language import Language
from roost.text.template import ChatTemplate
from roost.train.answers import (
    OLD_TEMPERATURE,
    TEMPERATURES,
    Dialogue,
    Question,
    TrainingAnswer,
    TrainingTalk,
    conversations,
    read_shards,
    write_shard,
)
from tests.support.small_vocabularies import byte_level
from tests.support.tiny_folder import PLAIN_TEMPLATE

LANGUAGE = Language(tokenizer=byte_level(), template=ChatTemplate(PLAIN_TEMPLATE, bos="", eos=""))


def said(*output: int) -> TrainingAnswer:
    return TrainingAnswer(prompt=(1, 2), output=output, temperature=0.0)


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


def talk(*turns: str, is_drawn: bool = False) -> TrainingTalk:
    return TrainingTalk(turns=turns, is_drawn=is_drawn)


def text_of(question: Question) -> str:
    return LANGUAGE.tokenizer.decode(question.prompt, skip_special=False)


def tokens_of(text: str) -> tuple[int, ...]:
    return tuple(LANGUAGE.tokenizer.encode(text, special=True))


def test_every_conversation_is_held_once_in_both_ways_in_blocks() -> None:
    held = conversations([["a"], ["b", "c"], ["a"]])
    assert [each.is_drawn for each in held] == [False, False, True, True]
    assert {(each.turns, each.is_drawn) for each in held} == {
        (turns, is_drawn) for turns in (("a",), ("b", "c")) for is_drawn in (False, True)
    }
    assert conversations([["b", "c"], ["a"]]) == held  # a hash decides, not the order of a file


def test_what_was_answered_is_part_of_the_next_prompt() -> None:
    dialogue = Dialogue([talk("one", "two")], LANGUAGE, {}, longest=1000)
    first = next(dialogue)
    assert next(dialogue, None) is None  # waits for the answer
    dialogue.answered(first.name, tokens_of("Indeed.<|im_end|>"))
    second = next(dialogue)
    for part in ("one", "Indeed.", "two"):
        assert part in text_of(second)
    dialogue.answered(second.name, tokens_of("So."))
    assert next(dialogue, None) is None


def test_a_conversation_goes_on_from_what_an_earlier_run_answered() -> None:
    first = talk("one", "two").question(LANGUAGE)
    dialogue = Dialogue([talk("one", "two"), talk("one")], LANGUAGE, {first: tokens_of("Indeed.")}, longest=1000)
    (second,) = list(dialogue)
    assert "Indeed." in text_of(second)


def test_conversations_that_begin_alike_share_the_answer() -> None:
    dialogue = Dialogue([talk("one", "two"), talk("one", "three")], LANGUAGE, {}, longest=1000)
    (first,) = list(dialogue)
    dialogue.answered(first.name, tokens_of("Indeed."))
    assert [next(word for word in ("two", "three") if word in text_of(each)) for each in dialogue] == ["three", "two"]


def test_a_prompt_that_is_too_long_or_has_no_answer_ends_its_conversation() -> None:
    dialogue = Dialogue([talk("one " * 99, "two"), talk("three", "four")], LANGUAGE, {}, longest=100)
    (only,) = list(dialogue)
    assert "three" in text_of(only) and dialogue.num_too_long == 1
    dialogue.answered(only.name, ())
    assert list(dialogue) == []


def test_a_model_without_a_template_reads_a_text_that_grows() -> None:
    plain = Language(tokenizer=LANGUAGE.tokenizer, template=None)
    held = talk("one", "two")
    held.said.append("Indeed.")
    assert plain.tokenizer.decode(held.question(plain).prompt, skip_special=False) == "one\n\nIndeed.\n\ntwo"


def test_temperatures_are_spread_by_the_prompt_and_always_the_same() -> None:
    drawn = [Question(prompt=(number,), is_drawn=True) for number in range(300)]
    counts = Counter(each.temperature for each in drawn)
    assert set(counts) == set(TEMPERATURES) and min(counts.values()) > 60
    assert {Question(prompt=(number,), is_drawn=False).temperature for number in range(9)} == {0.0}
    assert len({each.name for each in drawn} | {Question(prompt=(1,), is_drawn=False).name}) == 301


def test_shards_give_back_what_was_put_in_once(tmp_path: Path) -> None:
    answers = [
        TrainingAnswer(prompt=tuple(range(n)), output=(n, 70_000, *range(n)), temperature=(0.0, 0.85)[n % 2])
        for n in range(5)
    ]
    write_shard(tmp_path / "a.safetensors", answers[:3])
    write_shard(tmp_path / "b.safetensors", answers[2:])
    assert read_shards([tmp_path / "a.safetensors", tmp_path / "b.safetensors"]) == answers
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


def test_shards_that_only_say_what_was_sampled_are_read(tmp_path: Path) -> None:
    columns = {
        "is_drawn": np.array([False, True]),
        "tokens": np.array([1, 2, 1, 3], dtype=np.uint16),
        "prompt_lens": np.array([1, 1], dtype=np.int32),
        "output_lens": np.array([1, 1], dtype=np.int32),
    }
    save_file(columns, tmp_path / "old.safetensors")
    greedy, drawn = read_shards([tmp_path / "old.safetensors"])
    assert (greedy.temperature, drawn.temperature, drawn.output) == (0.0, OLD_TEMPERATURE, (3,))
