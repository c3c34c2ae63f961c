"""Record: a growing list of tokens that copies nothing of its past."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from roost.session.record import Record, key_of

TOKENS = st.lists(st.integers(0, 2**31 - 1), max_size=40)


@given(st.lists(st.tuples(TOKENS, st.integers(0, 60))))
def test_a_record_behaves_like_a_list(steps: list[tuple[list[int], int]]) -> None:
    record, model = Record(), list[int]()
    for tokens, cut in steps:
        record.append(tokens)
        model += tokens
        if cut < len(model):
            record.cut(cut)
            del model[cut:]
        assert len(record) == len(model)
        assert record.slice(0, len(record)).tolist() == model


def test_a_slice_does_not_change_with_its_record() -> None:
    record = Record([1, 2, 3])
    piece = record.slice(0, 3)
    record.cut(0)
    record.append([7, 8, 9])
    assert piece.tolist() == [1, 2, 3]
    piece[0] = 5
    assert record.slice(0, 3).tolist() == [7, 8, 9]


def test_a_record_starts_with_what_it_is_given() -> None:
    assert Record([4, 2]).slice(0, 2).tolist() == [4, 2]
    assert len(Record()) == 0


def test_a_cut_cannot_bring_tokens_back() -> None:
    record = Record([1, 2])
    record.cut(1)
    with pytest.raises(AssertionError):
        record.cut(2)


@pytest.mark.parametrize(("start", "stop"), [(-1, 1), (2, 1), (0, 4)])
def test_a_slice_outside_the_record_is_refused(start: int, stop: int) -> None:
    record = Record(range(9))
    record.cut(3)
    with pytest.raises(AssertionError):
        record.slice(start, stop)


def test_a_plain_key_has_an_entry_per_token_and_a_pair_key_one_less() -> None:
    tokens = np.array([5, 6, 7], dtype=np.int32)
    assert key_of(tokens, pair=False).tolist() == [5, 6, 7]
    assert key_of(tokens, pair=True).tolist() == [5 << 32 | 6, 6 << 32 | 7]
    assert key_of(tokens[:1], pair=True).tolist() == []


def test_a_records_key_is_that_of_its_first_tokens_and_stays_so() -> None:
    record = Record([5, 6, 7])
    key = record.key(2, pair=False)
    assert record.key(3, pair=True).tolist() == [5 << 32 | 6, 6 << 32 | 7]
    record.cut(0)
    record.append([1, 1, 1])
    assert key.tolist() == [5, 6]


def test_pairs_are_told_apart_by_both_halves_whatever_the_vocabulary() -> None:
    top = 2**31 - 1
    pairs = np.array([(top, 0), (0, top), (top, top), (1, 0), (0, 1)], dtype=np.int32)
    assert len({int(key_of(pair, pair=True)[0]) for pair in pairs}) == len(pairs)


def test_a_copy_and_what_it_was_made_of_go_on_each_by_itself() -> None:
    record = Record([1, 2, 3])
    record.append([4])  # there is room for more behind it now
    copy = record.copy(4)
    record.append([5, 6])
    copy.append([7])
    assert record.slice(0, 6).tolist() == [1, 2, 3, 4, 5, 6]
    assert copy.slice(0, 5).tolist() == [1, 2, 3, 4, 7]
    copy.cut(2)
    copy.append([8])
    assert record.slice(0, 6).tolist() == [1, 2, 3, 4, 5, 6] and copy.slice(0, 3).tolist() == [1, 2, 8]
    assert len(record.copy(2)) == 2 and len(record.copy(0)) == 0
