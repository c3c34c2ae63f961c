"""Answers lie side by side in rows without a token lost, and the draft vocabulary is what is said most."""

from random import Random

import numpy as np

from roost.train.answers import TrainingAnswer
from roost.train.packing import draft_vocabulary, pack, share_said, split

ROW_LEN = 24


def drawn(number: int, seed: int = 0) -> list[TrainingAnswer]:
    random = Random(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(random.randrange(1, 90) for _ in range(random.randint(1, most)))

    prompts = [some(9) for _ in range(number // 2)]
    return [
        TrainingAnswer(prompt=prompt, output=some(12), temperature=temperature)
        for prompt in prompts
        for temperature in (0.0, 0.7)
    ]


def test_every_answer_is_in_one_row_with_what_was_said_marked() -> None:
    answers = drawn(60)
    rows = pack(answers, ROW_LEN)
    found = []
    for tokens, owners, is_said in zip(rows.tokens, rows.owners, rows.is_said, strict=True):
        for owner in range(owners.max() + 1):
            mine = owners == owner
            assert mine.nonzero()[0].tolist() == list(range(mine.argmax(), mine.argmax() + mine.sum()))
            found.append((tuple(tokens[mine & ~is_said].tolist()), tuple(tokens[mine & is_said].tolist())))
        assert not is_said[owners < 0].any()
    assert sorted(found) == sorted((each.prompt, each.output) for each in answers)


def test_rows_are_nearly_full() -> None:
    rows = pack(drawn(400, seed=1), ROW_LEN)
    assert (rows.owners >= 0).mean() > 0.95


def test_an_answer_longer_than_a_row_is_cut() -> None:
    rows = pack([TrainingAnswer(prompt=(1, 2), output=tuple(range(40)), temperature=0.7)], ROW_LEN)
    assert rows.tokens[0].tolist() == [1, 2, *range(ROW_LEN - 2)]


def test_a_prompt_is_on_one_side_with_both_answers_also_when_there_are_more() -> None:
    answers = drawn(400)
    learn, held_out = split(answers, 0.1)
    assert [each for each in answers if each in learn or each in held_out] == answers
    assert not {each.prompt for each in learn} & {each.prompt for each in held_out}
    assert 0.05 < len(held_out) / len(answers) < 0.15
    few_learn, few_held_out = split(answers[:50], 0.1)
    assert all(each in learn for each in few_learn) and all(each in held_out for each in few_held_out)


def test_at_least_one_prompt_is_held_out() -> None:
    learn, held_out = split(drawn(20), 0.0)
    assert len(learn) == 18 and len(held_out) == 2


def test_batches_are_whole_and_shuffled_by_their_seed() -> None:
    rows = pack(drawn(100), ROW_LEN)
    first, again, other = ([batch.tokens for batch in rows.batches(8, seed)] for seed in (1, 1, 2))
    assert len(first) == len(rows) // 8 and all(len(each) == 8 for each in first)
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_the_vocabulary_is_what_is_said_most_and_what_must_be_in_it() -> None:
    answers = [TrainingAnswer(prompt=(9,) * 50, output=(5,) * 6 + (7,) * 3 + (8,), temperature=0.7)]
    ids = draft_vocabulary(answers, 4, always=(0, 1))
    assert ids.tolist() == [0, 1, 5, 7] and share_said(answers, ids) == 0.9
