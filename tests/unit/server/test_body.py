"""Bodies: long ones are read beside the event loop, and encodings other than UTF-8 are not read at all."""

import asyncio
import threading

import pytest

from roost.errors import RequestError
from roost.server.body import aside, convert
from roost.server.schema import GenerateBody


def test_long_work_does_not_hold_up_the_event_loop() -> None:
    here = threading.get_ident()
    assert asyncio.run(aside(100, threading.get_ident)) == here
    assert asyncio.run(aside(10**6, threading.get_ident)) != here


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_only_utf_8_is_read(encoding: str) -> None:
    with pytest.raises(RequestError, match="body: is not JSON"):
        convert('{"text": "a"}'.encode(encoding), GenerateBody)


def test_a_good_body_of_any_script_is_read_as_it_is() -> None:
    body = convert('{"text": ["🦉", "日本", "\\ud83e\\udd89"], "rid": ["é", "b", "c"]}'.encode(), GenerateBody)
    assert (body.text, body.rid) == (["🦉", "日本", "🦉"], ["é", "b", "c"])
    ids = convert(b'{"input_ids": [[1, 2], [9223372036854775807]]}', GenerateBody).input_ids
    assert ids == [[1, 2], [2**63 - 1]]
