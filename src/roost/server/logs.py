"""Logs: what the server writes for people, line by line, and never more than somebody can read.

Nothing that a client sent can start a line or control a terminal: unprintable characters are escaped, and continuation
lines are indented. Each kind of line is written at most once a second, with a count of those left out; request lines
have a higher limit. Set up by `serve`.
"""

import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TextIO

REQUESTS = "roost.requests"  # the logger of request lines
_LINES_A_SECOND = 1  # of one kind
_REQUESTS_A_SECOND = 200
_WIDTH_MAX = 500  # characters of a line

Kind = tuple[object, ...]


def set_up(level: str) -> None:
    """Send everything that is logged in this process to standard error; `request_log` selects request lines."""
    logging.basicConfig(handlers=[LogHandler(sys.stderr)], level=level.upper(), force=True)
    logging.getLogger(REQUESTS).setLevel(logging.INFO)


def printable(text: str) -> str:
    """A text as one line of limited length, with unprintable characters escaped."""
    short = text if len(text) <= _WIDTH_MAX else text[:_WIDTH_MAX] + "…"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in short)


@dataclass(slots=True)
class _LineCount:
    """How many lines of one kind came within a second."""

    began: float  # the second
    first: str  # the first line
    num_lines: int = 0


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records, up to a limit per second for each kind."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._counts: dict[Kind, _LineCount] = {}  # at most one for each logging call in the code

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        self._report_suppressed(self._clock() - 1)
        kind = _kind(record)
        count = self._counts.setdefault(kind, _LineCount(self._clock(), printable(record.getMessage())))
        count.num_lines += 1
        if count.num_lines <= _limit(kind):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """One line, and below it the traceback, indented."""
        name = "" if record.name == REQUESTS else f"{record.levelname.lower()}: "
        lines = [_stamp(record.created) + name + printable(record.getMessage())]
        if record.exc_info and record.exc_info[1] is not None:
            trace = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
            lines += ["    " + printable(line) for line in trace]
        return "\n".join(lines)

    def close(self) -> None:
        """Report the lines suppressed last; logging calls this when the process ends."""
        self._report_suppressed(self._clock())
        super().close()

    def _report_suppressed(self, before: float) -> None:
        for kind, count in [each for each in self._counts.items() if each[1].began <= before]:
            del self._counts[kind]
            num_more = count.num_lines - _limit(kind)
            if num_more > 0:
                self.stream.write(f"{_stamp(time.time())}{num_more} more like: {count.first}{self.terminator}")
                self.flush()


def _kind(record: logging.LogRecord) -> Kind:
    """Where a record was logged, and where the exception that it reports was raised."""
    last = record.exc_info[2] if record.exc_info else None
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    origin = () if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)
    return (record.name, record.pathname, record.lineno, *origin)


def _limit(kind: Kind) -> int:
    return _REQUESTS_A_SECOND if kind[0] == REQUESTS else _LINES_A_SECOND


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(seconds))
