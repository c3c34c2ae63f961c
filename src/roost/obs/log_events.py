"""Log events: the scheduler's rare events as lines of a log, a failed step with those that led to it.

Turns notes of the trace into records of the standard library's logging, with their numbers by name. Knows no prompt and
no token, since notes have none. Called by the engine's process, which makes its trace here.
"""

import logging
from dataclasses import dataclass

from roost.obs.trace import Note, Trace

_log = logging.getLogger("roost.engine")
_LAST_EVENTS = 32  # logged with a failure


@dataclass(frozen=True, slots=True)
class _Line:
    """How a kind of note is logged."""

    level: int
    message: str
    numbers: tuple[str, ...] = ()  # their names
    subject: str = "id"


_PLAIN_ENDS = ("stop", "length", "abort")
_LINES = {
    "admit": _Line(logging.DEBUG, "a request runs", ("inherited_tokens", "prompt_tokens")),
    **{f"end_{each}": _Line(logging.DEBUG, "a request ended", ("completion_tokens",)) for each in _PLAIN_ENDS},
    "end_error": _Line(logging.INFO, "a request failed", ("completion_tokens",)),
    "end_timeout": _Line(logging.INFO, "a request timed out", ("completion_tokens",)),
    "preempt": _Line(logging.INFO, "a request will be retracted: pages are short", ("book", "pages_needed")),
    "suspend": _Line(logging.INFO, "a request was retracted: it waits to go on", ("settled_tokens",)),
    "sit_out": _Line(logging.DEBUG, "a request sits a step out: pages are short"),
    "reclaim": _Line(logging.INFO, "an idle session loses its pages", ("book", "pages_missing")),
    "drop_states": _Line(logging.DEBUG, "kept states are dropped", ("states_needed",)),
    "over_limit": _Line(logging.INFO, "idle sessions hold too many tokens: one loses its pages", ("tokens_over",)),
    "expire": _Line(logging.INFO, "a session was closed: its time is over"),
    "rewind": _Line(logging.DEBUG, "a session was rewound", ("tokens", "resident_tokens")),
    "take_over": _Line(logging.INFO, "a session goes on from the journal", ("tokens", "turns")),
    "session_moved": _Line(logging.INFO, "a session has moved: another replica owns it", ("tokens",)),
    "journal": _Line(logging.ERROR, "a session could not be written to the journal", subject="reason"),
    "fail": _Line(logging.ERROR, "a step failed", ("first_step", "last_step"), "reason"),
    "broken_command": _Line(logging.ERROR, "a command failed: a bug of Roost", subject="reason"),
    "lost_client": _Line(logging.WARNING, "a client could not be told", subject="reason"),
}
_FAILURES = ("fail", "broken_command")


def logged_trace() -> Trace:
    """A trace whose notes are logged as they come."""
    trace = Trace(lambda note: _log_note(note, trace))
    return trace


def last_events(trace: Trace) -> list[str]:
    """The last events, oldest first, each as a line."""
    return [" ".join(map(str, (kind, subject, *numbers))) for kind, subject, numbers in trace.last()[-_LAST_EVENTS:]]


def _log_note(note: Note, trace: Trace) -> None:
    kind, subject, numbers = note
    line = _LINES.get(kind, _Line(logging.DEBUG, kind.replace("_", " ")))
    if not _log.isEnabledFor(line.level):
        return
    named = dict(zip(line.numbers, numbers, strict=False))  # a log is no reason to fail
    fields: dict[str, object] = {"event": kind, line.subject: subject, **named}
    if kind in _FAILURES:
        fields["last_events"] = last_events(trace)
    _log.log(line.level, "%s", line.message, extra={"fields": fields})
