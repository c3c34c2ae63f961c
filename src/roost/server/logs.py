"""Logs: what the server writes for people and for programs, line by line, and never more than somebody can read.

Nothing that a client sent can start a line or control a terminal: unprintable characters are escaped, and continuation
lines are indented. Each kind of line is written at most once a second, with a count of those left out; lines about
requests have a higher limit. A record may carry `fields`, by name, as `extra={"fields": …}`. Set up by `serve`, and by
`worker` in the engine's process.
"""

import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO

TEXT, JSON = FORMATS = ("text", "json")
REQUESTS = "roost.requests"  # the logger of request lines
NOTICES = "roost.notices"  # of what is always said: that the server is ready, or stops
OUTPUTS, REFUSALS, ENGINE = "roost.outputs", "roost.refusals", "roost.engine"
_SUMMARY = "roost.summary"  # of lines left out
_FREQUENT = (REQUESTS, NOTICES, OUTPUTS, REFUSALS, ENGINE)
_LINES_A_SECOND = 1  # of one kind
_REQUESTS_A_SECOND = 200
_WIDTH_MAX = 500  # characters of a line
_NAME_WIDTH = 14  # of a field's name in a notice

Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """What is logged, and in which form."""

    level: str = "warning"
    format: str = TEXT
    slow_s: int = 30


def set_up(config: LogConfig) -> None:
    """Send everything that is logged in this process to standard error; `request_log` selects request lines."""
    level = logging.getLevelNamesMapping()[config.level.upper()]
    others = max(level, logging.WARNING)  # libraries have much to say that is not about this server
    logging.basicConfig(handlers=[LogHandler(sys.stderr, form=config.format)], level=others, force=True)
    logging.getLogger("roost").setLevel(level)
    for name in (REQUESTS, NOTICES):
        logging.getLogger(name).setLevel(logging.INFO)


def printable(text: str) -> str:
    """A text as one line of limited length, with unprintable characters escaped."""
    return _escaped(_short(text))


@dataclass(slots=True)
class _LineCount:
    """How many lines of one kind came within a second."""

    began: float  # the second
    first: str  # the first line
    num_lines: int = 0


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes records, up to a limit per second for each kind."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic, form: str = TEXT) -> None:
        super().__init__(stream)
        self._clock = clock
        self._counts: dict[Kind, _LineCount] = {}  # at most one for each logging call in the code
        self._form = _json if form == JSON else _text

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, or count it."""
        self._report_suppressed(self._clock() - 1)
        kind = _kind(record)
        count = self._counts.setdefault(kind, _LineCount(self._clock(), record.getMessage()))
        count.num_lines += 1
        if count.num_lines <= _limit(kind):
            super().emit(record)

    def format(self, record: logging.LogRecord) -> str:
        """A record as text or as JSON."""
        return self._form(record)

    def close(self) -> None:
        """Report the lines suppressed last; logging calls this when the process ends."""
        self._report_suppressed(self._clock())
        super().close()

    def _report_suppressed(self, before: float) -> None:
        for kind, count in [each for each in self._counts.items() if each[1].began <= before]:
            del self._counts[kind]
            num_more = count.num_lines - _limit(kind)
            if num_more > 0:
                said = f"{num_more} more like: {count.first}"
                fields = {"count": num_more, "of": kind[0]}
                made = {"name": _SUMMARY, "levelno": logging.INFO, "levelname": "INFO", "msg": said, "fields": fields}
                super().emit(logging.makeLogRecord(made))


def _text(record: logging.LogRecord) -> str:
    """One line with its fields; below it, indented, lists among them and the traceback."""
    if record.name == NOTICES:
        return _notice(record)
    message, fields = _stamp(record.created) + _prefix(record) + printable(record.getMessage()), _fields(record)
    if record.name not in (REQUESTS, _SUMMARY):  # their messages say it all
        pairs = [f"{name}={value}" for name, value in fields.items() if not isinstance(value, list)]
        message += printable("".join(f" {pair}" for pair in pairs))
    lists = [f"{name}: {each}" for name, value in fields.items() if isinstance(value, list) for each in value]
    return "\n".join([message, *("    " + printable(line) for line in lists), *_traceback(record, "    ")])


def _notice(record: logging.LogRecord) -> str:
    """What is said in so many words, below what belongs to it: a table for people."""
    table = [f"  {name:<{_NAME_WIDTH}} {value}" for name, value in _fields(record).items()]
    return "\n".join(_escaped(line) for line in (*table, f"roost: {record.getMessage()}"))


def _json(record: logging.LogRecord) -> str:
    """One object: time, level, logger, message, and the record's fields."""
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    fields = {
        name.replace(" ", "_"): _short(value) if isinstance(value, str) else value
        for name, value in _fields(record).items()
    }
    said = {"time": moment, "level": record.levelname.lower(), "logger": record.name}
    trace = _traceback(record, "")
    exception = {"exception": "\n".join(trace)} if trace else {}
    return json.dumps({**said, "message": _short(record.getMessage()), **exception, **fields}, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = record.__dict__.get("fields", {})
    return fields


def _traceback(record: logging.LogRecord, indent: str) -> list[str]:
    if not record.exc_info or record.exc_info[1] is None:
        return []
    trace = "".join(traceback.format_exception(record.exc_info[1])).splitlines()
    return [indent + printable(line) for line in trace]


def _kind(record: logging.LogRecord) -> Kind:
    """Where a record was logged, and where the exception that it reports was raised."""
    last = record.exc_info[2] if record.exc_info else None
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    origin = () if last is None else (last.tb_frame.f_code.co_filename, last.tb_lineno)
    return (record.name, record.pathname, record.lineno, *origin)


def _limit(kind: Kind) -> int:
    return _REQUESTS_A_SECOND if kind[0] in _FREQUENT else _LINES_A_SECOND


def _prefix(record: logging.LogRecord) -> str:
    return "" if record.name in (REQUESTS, _SUMMARY) else f"{record.levelname.lower()}: "


def _short(text: str) -> str:
    return text if len(text) <= _WIDTH_MAX else text[:_WIDTH_MAX] + "…"


def _escaped(text: str) -> str:
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S ", time.localtime(seconds))
