"""Answers lie side by side in rows without a token lost, and the draft vocabulary is what is said most."""

from random import Random

import numpy as np

from roost.train.answers import Answer
from roost.train.rows import draft_vocabulary, pack, split

ROW_LEN = 24


def drawn(number: int, seed: int = 0) -> list[Answer]:
    random = Random(seed)

    def some(most: int) -> tuple[int, ...]:
        return tuple(random.randrange(1, 90) for _ in range(random.randint(1, most)))

    return [Answer(number=each, prompt=some(9), output=some(12)) for each in range(number)]


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
    rows = pack([Answer(number=0, prompt=(1, 2), output=tuple(range(40)))], ROW_LEN)
    assert rows.tokens[0].tolist() == [1, 2, *range(ROW_LEN - 2)]


def test_a_split_keeps_both_answers_to_a_prompt_on_one_side() -> None:
    answers = drawn(100)
    learn, held_out = split(answers, 0.1, seed=3)
    assert sorted([*learn, *held_out], key=lambda each: each.number) == answers and len(held_out) == 10
    assert not {each.number // 2 for each in learn} & {each.number // 2 for each in held_out}
    assert split(answers, 0.1, seed=3) == (learn, held_out) != split(answers, 0.1, seed=4)


def test_batches_are_whole_and_shuffled_by_their_seed() -> None:
    rows = pack(drawn(100), ROW_LEN)
    first, again, other = ([batch.tokens for batch in rows.batches(8, seed)] for seed in (1, 1, 2))
    assert len(first) == len(rows) // 8 and all(len(each) == 8 for each in first)
    assert np.array_equal(first, again) and not np.array_equal(first, other)


def test_the_vocabulary_is_what_is_said_most_and_what_must_be_in_it() -> None:
    answers = [Answer(number=0, prompt=(9,) * 50, output=(5,) * 6 + (7,) * 3 + (8,))]
    ids, covered = draft_vocabulary(answers, 4, always=(0, 1))
    assert ids.tolist() == [0, 1, 5, 7] and covered == 0.9
