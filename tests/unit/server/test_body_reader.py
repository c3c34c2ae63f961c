"""Bodies: too many values are refused unread, encodings other than UTF-8 are not read at all."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from types import FrameType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from roost.errors import RequestError
from roost.server import body_reader as body
from roost.server.body_reader import (
    _NAME_LEN_MAX,
    _NUMBER_END,
    BODY_BYTES_MAX,
    DEPTH_MAX,
    PARTS_MAX,
    VALUES_MAX,
    convert,
    read_bytes,
)
from roost.server.schema import ChatBody, CompletionBody, GenerateBody


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_only_utf_8_is_read(encoding: str) -> None:
    with pytest.raises(RequestError, match="body: is not JSON"):
        convert('{"text": "a"}'.encode(encoding), GenerateBody)


def test_a_good_body_of_any_script_is_read_as_it_is() -> None:
    body = convert('{"text": ["🦉", "日本", "\\ud83e\\udd89"], "rid": ["é", "b", "c"]}'.encode(), GenerateBody)
    assert (body.text, body.rid) == (["🦉", "日本", "🦉"], ["é", "b", "c"])
    ids = convert(b'{"input_ids": [[1, 2], [9223372036854775807]]}', GenerateBody).input_ids
    assert ids == [[1, 2], [2**63 - 1]]


HOSTILE = {
    "empty messages": b'{"messages": [' + b",".join([b'{"role": "user", "content": ""}'] * 500_000) + b"]}",
    "unknown names": b"{" + b",".join(b'"k%d": 1' % number for number in range(1_000_000)) + b"}",
    "empty lists": b'{"prompt": [' + b",".join([b"[]"] * 4_000_000) + b"]}",
    "numbers": b'{"prompt": [' + b"1," * 6_000_000 + b"1]}",
    "deep": b'{"prompt": ' + b"[" * 15_000_000,
    "escapes and lists": b'{"prompt": ["' + b'\\\\\\"' * 1_000_000 + b'"' + b",[]" * 1_000_000 + b"]}",
}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_too_many_values_are_refused_before_any_of_them_is_made(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "json", None)  # nothing is read
    with pytest.raises(RequestError, match=r"body: must hold at most \d+ ") as refused:
        convert(data, ChatBody)
    assert refused.value.status == 413


def test_what_is_in_a_text_is_not_counted() -> None:
    text = '[{,:"\\' * VALUES_MAX
    assert convert(json.dumps({"prompt": text}).encode(), CompletionBody).prompt == text
    ids = list(range(VALUES_MAX))
    assert convert(json.dumps({"prompt": ids}).encode(), CompletionBody).prompt == ids
    lists: list[Any] = [[]] * (PARTS_MAX - 3)
    assert convert(json.dumps({"prompt": lists}).encode(), CompletionBody).prompt == lists


@pytest.mark.parametrize("padding", [0, 1, 60_000, *range(65_490, 65_540)])
def test_an_endless_number_is_refused_by_name_wherever_a_body_is_cut(padding: int) -> None:
    data = b'{"user": "' + b"a" * padding + b'", "prompt": "a", "seed": ' + b"9" * 5000 + b"}"
    with pytest.raises(RequestError, match="seed: must be a finite number"):
        convert(data, CompletionBody)


texts = st.text('a"\\,:[]{}é', max_size=6)
values = st.recursive(st.one_of(texts, st.integers()), lambda of: st.lists(of) | st.dictionaries(texts, of))


def _counts(value: Any) -> tuple[int, int]:
    """The plain way: commas, and names with lists and objects."""
    if not isinstance(value, dict | list):
        return 0, 0
    inner = [_counts(each) for each in (value.values() if isinstance(value, dict) else value)]
    names = len(value) if isinstance(value, dict) else 0
    num_commas = max(0, len(value) - 1) + sum(commas for commas, _ in inner)
    return num_commas, 1 + names + sum(parts for _, parts in inner)


@settings(deadline=None)
@given(value=values, slice_len=st.integers(1, 9))
def test_values_are_counted_as_they_are_wherever_a_body_is_cut(value: Any, slice_len: int) -> None:
    data = json.dumps({"prompt": value}, ensure_ascii=False).encode()
    num_values, num_parts = _counts({"prompt": value})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_SLICE", slice_len)
        for values_max, parts_max in (
            (num_values, num_parts),
            (num_values - 1, num_parts),
            (num_values, num_parts - 1),
        ):
            patch.setattr(body, "VALUES_MAX", values_max)
            patch.setattr(body, "PARTS_MAX", parts_max)
            try:
                body._check_counts(data)
                is_refused = False
            except RequestError:
                is_refused = True
            assert is_refused == (values_max < num_values or parts_max < num_parts)


@pytest.mark.parametrize("opening", ["[", '{"a": '])
def test_a_body_may_be_as_deep_as_it_says_and_no_deeper(opening: str) -> None:
    closing = {"[": "]", '{"a": ': "}"}[opening]
    for depth in (DEPTH_MAX - 1, DEPTH_MAX):  # and the body itself
        body = '{"text": ' + opening * depth + "1" + closing * depth + "}"
        said = _refusal(body)
        assert (f"must be nested at most {DEPTH_MAX} deep" in said) == (depth == DEPTH_MAX), said


@pytest.mark.parametrize("sign", ["", "-"])
@pytest.mark.parametrize("place", ["{}", "[{}]", '{{"a": {}}}'])
def test_a_number_is_read_up_to_63_bits_and_refused_by_name_beyond(place: str, sign: str) -> None:
    for number in (_NUMBER_END - 1, _NUMBER_END, 10**20 - 1, 10**20, 10**21):
        said = _refusal('{"text": ' + place.format(f"{sign}{number}") + "}")
        assert ("less than 2**63" in said) == (number >= _NUMBER_END), said
        assert said.startswith("text"), said


def test_what_a_client_wrote_is_repeated_in_a_message_but_not_at_length() -> None:
    for length in (_NAME_LEN_MAX, _NAME_LEN_MAX + 1, 10**5):
        name = "x" * length
        said = _refusal('{"' + name + '": 1}')
        assert said.startswith("x" * min(length, _NAME_LEN_MAX) + ":") and len(said) < 2 * _NAME_LEN_MAX


def _refusal(body: str) -> str:
    with pytest.raises(RequestError) as refused:
        convert(body.encode(), GenerateBody)
    return str(refused.value)


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_body_is_as_long_as_it_may_be(num_more: int) -> None:
    class Sent:
        """A request that comes in two parts."""

        async def stream(self) -> AsyncIterator[bytes]:
            """The parts."""
            yield b"x" * (BODY_BYTES_MAX - 1)
            yield b"x" * (1 + num_more)

    if num_more == 0:
        assert len(asyncio.run(read_bytes(Sent()))) == BODY_BYTES_MAX  # type: ignore[arg-type]
    else:
        with pytest.raises(RequestError, match=f"body: must be at most {BODY_BYTES_MAX} bytes"):
            asyncio.run(read_bytes(Sent()))  # type: ignore[arg-type]


def test_real_numbers_of_a_long_body_are_read_one_by_one_so_that_others_have_their_turn() -> None:
    """What the JSON library makes of many floats by itself, nobody can interrupt."""
    others = []

    def traced(frame: FrameType, event: str, arg: object) -> None:
        others.append(frame.f_code.co_name)

    for count in (1, body._SLICE // 4):
        others.clear()
        data = b'{"input_ids": [' + b",".join([b"1.5"] * count) + b"]}"
        sys.setprofile(traced)
        try:
            read = convert(data, GenerateBody)
        finally:
            sys.setprofile(None)
        assert read.input_ids == [1.5] * count
        assert (others.count("_real_number") >= count) == (len(data) > body._SLICE)


def test_a_real_number_has_as_many_digits_as_it_may() -> None:
    padding = " " * body._SLICE
    for length in (body._DIGITS_MAX, body._DIGITS_MAX + 1):
        said = _refusal('{"text": ' + "1." + "0" * (length - 2) + padding + "}")
        assert ("finite" in said) == (length > body._DIGITS_MAX), said
