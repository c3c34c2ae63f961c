"""Errors: one tree, so that callers can tell whose fault a failure is.

RoostError
├── RequestError     the request can never be served as it is (4xx; names the parameter and what is allowed)
├── CapacityError    the request is fine, but the engine is full now (429 or 503)
├── ConfigError      the engine cannot start like this (names the flag to change)
├── RankError        a rank of the engine was lost, or is not what the others are: the engine ends
├── StepFailure      a launched step failed on the device; its requests are retried or ended with 500
└── InvariantError   a bug in Roost; carries the last page moves
"""


class RoostError(Exception):
    """Root of every error Roost raises on purpose."""


class RequestError(RoostError):
    """A request that can never be served as asked."""

    def __init__(self, status: int, param: str, message: str) -> None:
        super().__init__(f"{param}: {message}")
        self.status = status
        self.param = param
        self.reason = message


class CapacityError(RoostError):
    """A request refused because the engine is full now."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ConfigError(RoostError):
    """A configuration that cannot work; the message names the flag and the allowed range."""


class StepFailure(RoostError):
    """A step that failed on the device; everything launched after it failed with it."""


class RankError(RoostError):
    """A rank that was lost; the engine that it is part of cannot go on."""


class InvariantError(RoostError):
    """An invariant of the engine does not hold."""


def first_line(error: BaseException) -> str:
    """What an error says, in one line."""
    return (str(error).splitlines() or [type(error).__name__])[0]
