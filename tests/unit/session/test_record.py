"""Record: a growing list of tokens that copies nothing of its past."""

import numpy as np
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


def test_a_plain_key_has_an_entry_per_token_and_a_pair_key_one_less() -> None:
    tokens = np.array([5, 6, 7], dtype=np.int32)
    assert key_of(tokens, pair=False).tolist() == [5, 6, 7]
    assert key_of(tokens, pair=True).tolist() == [5 << 32 | 6, 6 << 32 | 7]
    assert key_of(tokens[:1], pair=True).tolist() == []
