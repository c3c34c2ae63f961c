"""Settle: where an accepted run ends the output."""

import pytest

from roost.sched.settle import cut_output


def stops(i: int, token: int) -> int | str | None:
    return 9 if token == 9 else None


@pytest.mark.parametrize(
    ("tokens", "room", "kept", "reason"),
    [
        ([1, 2, 3], 5, 3, None),
        ([1, 2, 3], 3, 3, "length"),
        ([1, 2, 3], 2, 2, "length"),
        ([1, 9, 3], 5, 2, "stop"),
        ([9, 9, 9], 5, 1, "stop"),
        ([1, 2, 9], 3, 3, "stop"),
        ([1, 2, 9], 2, 2, "length"),
        ([1], 0, 0, "length"),
        ([9], 0, 0, "length"),
        ([9], 1, 1, "stop"),
        ([1, 2, 3, 9], 3, 3, "length"),
    ],
)
def test_the_output_ends_at_the_first_stop_or_at_its_limit(
    tokens: list[int], room: int, kept: int, reason: str | None
) -> None:
    assert cut_output(tokens, room, stops) == (kept, reason, 9 if reason == "stop" else None)


def test_without_stop_tokens_only_the_limit_ends_the_output() -> None:
    assert cut_output([9, 9], 3, lambda i, token: None) == (2, None, None)
    assert cut_output([9, 9], 1, lambda i, token: None) == (1, "length", None)
