"""Logs: what the server writes for people, a line at a time, and never more than somebody can read.

Nothing that a client sent can begin a line or steer a terminal: whatever is not printable is escaped, and what follows
a first line is indented. Of one kind of line one is written a second, with a count of those that were left out; request
lines have more room. Set up by `serve`.
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
_WIDTH_MAX = 500  # of a line

Kind = tuple[object, ...]


def set_up(level: str) -> None:
    """Send everything that is logged in this process to standard error; request lines are chosen elsewhere."""
    logging.basicConfig(handlers=[LogHandler(sys.stderr)], level=level.upper(), force=True)
    logging.getLogger(REQUESTS).setLevel(logging.INFO)


def printable(text: str) -> str:
    """A text in one line, cut to a length, with an escape for whatever is not to be seen as it is."""
    short = text if len(text) <= _WIDTH_MAX else text[:_WIDTH_MAX] + "…"
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in short)


@dataclass(slots=True)
class _Second:
    """How many lines of a kind came in the second that began then."""

    began: float
    first: str
    num_lines: int = 0


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records, but for those of a kind of which enough were written in this second."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(stream)
        self._clock = clock
        self._seconds: dict[Kind, _Second] = {}  # as many as there are lines of code that log

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        self._say_what_was_left_out(self._clock() - 1)
        kind = _kind(record)
        second = self._seconds.setdefault(kind, _Second(self._clock(), printable(record.getMessage())))
        second.num_lines += 1
        if second.num_lines <= _room(kind):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """One line, and below it, indented, where an error came from."""
        name = "" if record.name == REQUESTS else f"{record.levelname.lower()}: "
        lines = [_stamp(record.created) + name + printable(record.getMessage())]
        if record.exc_info and record.exc_info[1] is not None:
            told = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
            lines += ["    " + printable(line) for line in told]
        return "\n".join(lines)

    def close(self) -> None:
        """Say what was left out last; logging does this when the process ends."""
        self._say_what_was_left_out(self._clock())
        super().close()

    def _say_what_was_left_out(self, before: float) -> None:
        for kind, second in [each for each in self._seconds.items() if each[1].began <= before]:
            del self._seconds[kind]
            num_more = second.num_lines - _room(kind)
            if num_more > 0:
                self.stream.write(f"{_stamp(time.time())}{num_more} more like: {second.first}{self.terminator}")
                self.flush()


def _kind(record: logging.LogRecord) -> Kind:
    """Where a record was made, and where the error that it tells of was."""
    last = record.exc_info[2] if record.exc_info else None
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    origin = () if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)
    return (record.name, record.pathname, record.lineno, *origin)


def _room(kind: Kind) -> int:
    return _REQUESTS_A_SECOND if kind[0] == REQUESTS else _LINES_A_SECOND


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(seconds))
