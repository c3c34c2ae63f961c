"""Log lines: readable, one line each, and never more than a person can follow."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from roost.server.logs import (
    _WIDTH_MAX,
    ENGINE,
    FORMATS,
    JSON,
    NOTICES,
    REQUESTS,
    TEXT,
    LogConfig,
    LogHandler,
    printable,
    set_up,
)


class Log:
    """A handler with a clock of its own."""

    def __init__(self, form: str = TEXT) -> None:
        self.now = 100.0
        self._stream = io.StringIO()
        self.handler = LogHandler(self._stream, lambda: self.now, form)

    def say(self, text: str, name: str = "roost.server", number: int = 1, **fields: Any) -> None:
        """Log a text from some line of code."""
        record = logging.LogRecord(name, logging.WARNING, "file", number, "%s", (text,), None)
        record.fields = fields
        self.handler.handle(record)

    @property
    def objects(self) -> list[dict[str, Any]]:
        """What was written as JSON."""
        return [json.loads(line) for line in self._stream.getvalue().splitlines()]

    @property
    def lines(self) -> list[str]:
        """What was written, without its time."""
        return [line[20:] for line in self._stream.getvalue().splitlines()]


def test_one_line_of_a_kind_is_written_a_second_and_the_others_are_counted() -> None:
    log = Log()
    for _ in range(10_000):
        log.say("no room")
        log.say("another thing", number=2)
    assert log.lines == ["warning: no room", "warning: another thing"]
    log.now += 1
    log.say("no room")
    assert log.lines[2:] == ["9999 more like: no room", "9999 more like: another thing", "warning: no room"]
    log.say("no room")
    log.handler.close()
    assert log.lines[5:] == ["1 more like: no room"]


def test_request_lines_have_more_room_but_not_all() -> None:
    log = Log()
    for _ in range(1000):
        log.say("GET /", REQUESTS)
    assert log.lines == ["GET /"] * 200
    log.handler.close()
    assert log.lines[200:] == ["800 more like: GET /"]


@pytest.mark.parametrize("text", ["\n", "\r", "\x1b[2J", "\x00", "\x7f", "\u2028", "\u202e", "\ud800", "\x85", "\x9b"])
def test_nothing_that_a_client_sent_begins_a_line_or_steers_a_terminal(text: str) -> None:
    log = Log()
    log.say(f"a{text}b")
    (line,) = log.lines
    assert line.isprintable()
    assert printable("é 日本") == "é 日本"


def test_a_line_has_an_end() -> None:
    assert printable("a" * _WIDTH_MAX) == "a" * _WIDTH_MAX
    assert printable("a" * (_WIDTH_MAX + 1)) == "a" * _WIDTH_MAX + "…"


def test_an_error_is_told_with_its_origin_indented() -> None:
    log = Log()
    try:
        raise ValueError("first\n2025-01-01 00:00:00 POST /forged 200")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "broke", (), (ValueError, error, error.__traceback__))
    log.handler.handle(record)
    first, *others = log.handler.stream.getvalue().splitlines()
    assert first.endswith("error: broke")
    assert any("ValueError" in line for line in others)
    assert all(line.startswith("    ") for line in others)


def test_two_errors_of_different_origin_are_both_told() -> None:
    log = Log()
    for text in ("1 / 0", "[].pop()"):
        try:
            eval(compile(text, text, "eval"))
        except (ZeroDivisionError, IndexError) as error:
            info = (type(error), error, error.__traceback__)
            log.handler.handle(logging.LogRecord("a", logging.ERROR, "f", 1, "broke", (), info))
    assert sum("error: broke" in line for line in log.lines) == 2


def test_json_is_one_object_a_line_whatever_is_in_it() -> None:
    log = Log(JSON)
    log.say('a\n"b"\x1b[2J\u2028', REQUESTS, status=200, path="/\n", ms=1.5, key=None)
    log.say("é", number=2)
    first, second = log.objects
    assert first == {
        "time": first["time"],
        "level": "warning",
        "logger": REQUESTS,
        "message": 'a\n"b"\x1b[2J\u2028',
        "status": 200,
        "path": "/\n",
        "ms": 1.5,
        "key": None,
    }
    assert second["message"] == "é"
    assert all(line.isprintable() and line.isascii() for line in log._stream.getvalue().splitlines())


def test_json_has_an_end_and_says_what_was_left_out() -> None:
    log = Log(JSON)
    for _ in range(3):
        log.say("a" * (_WIDTH_MAX + 1), path="b" * (_WIDTH_MAX + 1))
    log.handler.close()
    first, summary = log.objects
    assert first["message"] == "a" * _WIDTH_MAX + "…" and first["path"] == "b" * _WIDTH_MAX + "…"
    assert (summary["level"], summary["count"], summary["of"]) == ("info", 2, "roost.server")


def test_json_has_the_traceback_in_the_same_line() -> None:
    log = Log(JSON)
    try:
        raise ValueError("why")
    except ValueError as error:
        record = logging.LogRecord("a", logging.ERROR, "f", 1, "broke", (), (ValueError, error, error.__traceback__))
    log.handler.handle(record)
    (line,) = log.objects
    assert line["message"] == "broke" and line["exception"].startswith("Traceback")
    assert line["exception"].endswith("ValueError: why")


def test_text_has_fields_behind_the_message_and_lists_below_it() -> None:
    log = Log()
    log.say("a step failed", ENGINE, first_step=3, reason="x\ny", last_events=["admit r1 0 4", "fail\n"])
    assert log._stream.getvalue().splitlines()[0][20:] == "warning: a step failed first_step=3 reason=x\\ny"
    below = log._stream.getvalue().splitlines()[1:]
    assert below == ["    last_events: admit r1 0 4", "    last_events: fail\\n"]


def test_a_notice_is_said_in_words_below_its_table() -> None:
    log = Log()
    log.say("a model is ready", NOTICES, device="cpu", **{"tool calls": "none"})
    assert log._stream.getvalue() == "  device         cpu\n  tool calls     none\nroost: a model is ready\n"
    as_json = Log(JSON)
    as_json.say("a model is ready", NOTICES, **{"tool calls": "none"})
    assert as_json.objects[0]["tool_calls"] == "none"


@contextmanager
def as_set_up(config: LogConfig) -> Iterator[None]:
    """Logging as a server has it, and afterwards as it was."""
    names = ("", "roost", REQUESTS, NOTICES)
    before, handlers = [logging.getLogger(name).level for name in names], logging.getLogger().handlers[:]
    logging.getLogger().handlers = []  # it would close those of the tests
    try:
        set_up(config)
        yield
    finally:
        logging.getLogger().handlers = handlers
        for name, level in zip(names, before, strict=True):
            logging.getLogger(name).setLevel(level)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(
    ("level", "said"),
    [
        ("critical", ["request", "notice"]),
        ("warning", ["request", "notice", "error", "of a library"]),
        ("debug", ["request", "notice", "error", "of a library", "detail"]),
    ],
)
def test_requests_and_notices_are_said_at_every_level_and_details_of_libraries_at_none(
    form: str, level: str, said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with as_set_up(LogConfig(level=level, format=form)):
        logging.getLogger(REQUESTS).info("request")
        logging.getLogger(NOTICES).info("notice")
        logging.getLogger("roost.server").error("error")
        logging.getLogger("numba.core").warning("of a library")
        logging.getLogger("numba.core").info("chatter")
        logging.getLogger(ENGINE).debug("detail")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == len(said)
    assert all(words in line for words, line in zip(said, lines, strict=True))
    assert all(line.startswith("{") == (form == JSON) for line in lines)
