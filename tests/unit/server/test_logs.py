"""Log lines: readable, one line each, and never more than a person can follow."""

import io
import logging

import pytest

from roost.server.logs import _WIDTH_MAX, REQUESTS, LogHandler, printable


class Log:
    """A handler with a clock of its own."""

    def __init__(self) -> None:
        self.now = 100.0
        self._stream = io.StringIO()
        self.handler = LogHandler(self._stream, lambda: self.now)

    def say(self, text: str, name: str = "roost.server", number: int = 1) -> None:
        """Log a text from some line of code."""
        self.handler.handle(logging.LogRecord(name, logging.WARNING, "file", number, "%s", (text,), None))

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
