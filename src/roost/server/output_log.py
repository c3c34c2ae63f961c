"""Output log: a line for the end of each output, and for each refusal with its reason.

An output that failed or was slow is logged at info, the others at debug. Lines have numbers and names, never a prompt,
an output or a value that a client sent. Called by the engine's client, and where a refusal becomes an answer.
"""

import logging
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

from roost.errors import CapacityError, RequestError
from roost.messages import Begun, Event, Finished, Refused, Submit, Tokens
from roost.server.logs import OUTPUTS, REFUSALS

_outputs, _refusals = logging.getLogger(OUTPUTS), logging.getLogger(REFUSALS)
_FAILED = ("error", "timeout")
_PARAM = re.compile(r"[A-Za-z0-9_.\[\]-]{1,64}")  # whatever else a client names a field may be a text


@dataclass(slots=True, kw_only=True)
class _Times:
    """When what happened to an output."""

    client: str
    began: float
    ran: float | None = None
    first_token: float | None = None


class OutputLog:
    """Follows outputs to their ends."""

    def __init__(self, slow_s: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._slow_s = slow_s
        self._clock = clock
        self._open: dict[str, _Times] = {}  # by the engine's id

    def begin(self, submit: Submit) -> None:
        """An output is asked of the engine."""
        self._open[submit.request_id] = _Times(client=submit.client, began=self._clock())

    def observe(self, event: Event) -> None:
        """An event came from the engine."""
        match event:
            case Tokens():
                times = self._open.get(event.request_id)
                if times is not None and times.first_token is None:
                    times.first_token = self._clock()
            case Begun():
                if (times := self._open.get(event.request_id)) is not None:
                    times.ran = self._clock()
            case Refused():
                self._open.pop(event.request_id, None)
            case Finished():
                if (times := self._open.pop(event.request_id, None)) is not None:
                    self._log(event, times, self._clock())

    def _log(self, finished: Finished, times: _Times, now: float) -> None:
        has_failed, is_slow = finished.reason in _FAILED, now - times.began >= self._slow_s
        level = logging.INFO if has_failed or is_slow else logging.DEBUG
        if not _outputs.isEnabledFor(level):
            return
        usage, spec = finished.usage, finished.spec
        fields: dict[str, object] = {"id": finished.request_id, "reason": finished.reason}
        fields |= {"key": times.client} if times.client else {}
        fields |= {"prompt_tokens": usage.prompt_tokens, "cached_tokens": usage.cached_tokens}
        fields |= {"completion_tokens": usage.completion_tokens, "ms": _ms(times.began, now)}
        fields |= {"queued_ms": _ms(times.began, times.ran), "first_token_ms": _ms(times.began, times.first_token)}
        if spec.rounds:
            fields["accept_length"] = round(spec.accept_length, 2)
        what = "an output failed" if has_failed else "a slow output ended" if is_slow else "an output ended"
        _outputs.log(level, "%s", what, extra={"fields": fields})


def log_refusal(error: RequestError | CapacityError) -> None:
    """A request is refused; what is said of a parameter may repeat its value, so only its name is logged."""
    reason = str(error)
    if isinstance(error, RequestError):
        reason = f"parameter {error.param}" if _PARAM.fullmatch(error.param) else "a parameter that there is not"
    _refusals.info("a request was refused", extra={"fields": {"status": error.status, "reason": reason}})


def _ms(began: float, ended: float | None) -> float | None:
    return None if ended is None else round((ended - began) * 1000, 3)
