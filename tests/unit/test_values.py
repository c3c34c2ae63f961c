"""What a caller gave, in messages: readable, and never long."""

import pytest

from roost.errors import RequestError
from roost.values import _SHOWN_MAX, _WHOLE_BITS_MAX, shown, token_ids


def test_a_whole_number_has_so_many_bits_and_no_more() -> None:
    largest = 2**_WHOLE_BITS_MAX - 1
    assert token_ids("tokens", [largest, -largest]) == (largest, -largest)
    for number in (largest + 1, -largest - 1, 10**5000):
        with pytest.raises(RequestError, match=f"tokens: .* got a number of more than {_WHOLE_BITS_MAX} bits"):
            token_ids("tokens", [number])
    assert shown(largest) == str(largest)


def test_a_value_is_repeated_in_a_message_but_not_at_length() -> None:
    for length in (_SHOWN_MAX, _SHOWN_MAX + 1, 10**6):
        assert shown("x" * length) == repr("x" * _SHOWN_MAX)
    assert shown("x" * (_SHOWN_MAX - 1)) == repr("x" * (_SHOWN_MAX - 1))
