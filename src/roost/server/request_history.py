"""Request history: what a session of SGLang's that does not stream consists of: its requests that have ended.

Owns their tokens, by the names that clients gave them. A new request may continue any of them, from any of its tokens,
or replace everything that continued it. Such a session has no tokens of its own in the engine. Called by
`native_sessions`.
"""

import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from roost.errors import RequestError
from roost.front.session import is_committed
from roost.messages import Event, Finished, Refused, Tokens

ENDED_MAX = 256  # ended requests of one session whose tokens are kept


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EndedRequest:
    """A request that can be continued."""

    tokens: "array[int]"  # prompt and output
    prompt_len: int
    number: int
    parent: int | None  # the number of the request that it continued


class RequestHistory:
    """The ended requests of one session, by name, and those that still run."""

    def __init__(self, timeout_s: float | None) -> None:
        self.timeout_s = timeout_s
        self.numbers = count()  # of requests: names may be used again, numbers are not
        self._used = time.monotonic()
        self._ended: OrderedDict[str, EndedRequest] = OrderedDict()
        self._running: dict[int, RunningRequest] = {}

    @property
    def idle_s(self) -> float:
        """How long nobody has used the session."""
        return 0.0 if self._running else time.monotonic() - self._used

    @property
    def is_expired(self) -> bool:
        """Whether nobody has used the session for too long."""
        return self.timeout_s is not None and self.idle_s > self.timeout_s

    def add_running(self, request: "RunningRequest") -> None:
        """A request is on its way."""
        self._running[request.number] = request

    def remove_running(self, request: "RunningRequest") -> None:
        """It has ended, however it did."""
        del self._running[request.number]
        self._used = time.monotonic()

    def find(self, name: str, *, with_output: bool = True, may_run: bool = False) -> tuple[int, ...]:
        """Prompt and output of an ended request, or its prompt alone; of one that may run still, what it has so far."""
        found = self._find(name, may_run=may_run)
        return tuple(found.tokens if with_output else found.tokens[: found.prompt_len])

    def number_of(self, name: str, *, may_run: bool = False) -> int:
        """The number of such a request."""
        return self._find(name, may_run=may_run).number

    def keep(self, name: str, tokens: Sequence[int], request: "RunningRequest | None" = None) -> None:
        """Make a request continuable; the oldest is forgotten when there are too many."""
        self._ended.pop(name, None)  # another had this name before
        self._ended[name] = EndedRequest(
            tokens=array("i", tokens),
            prompt_len=len(tokens) if request is None else request.prompt_len,
            number=next(self.numbers) if request is None else request.number,
            parent=None if request is None else request.parent,
        )
        if len(self._ended) > ENDED_MAX:
            self._ended.popitem(last=False)

    def stop_from(self, number: int | None) -> None:
        """Abort a request that still runs and all that continue it; what it has generated so far can be continued."""
        after = self._descendants(number)
        for request in [each for each in self._running.values() if not each.is_stopped]:
            if request.number == number:
                self.keep(request.name, request.tokens, request)
            if number in (None, request.number, request.parent) or request.parent in after:
                request.stop()

    def drop_after(self, number: int | None, before: int) -> None:
        """Forget what continued a request (None: every request), as far as it began before request `before`."""
        after = self._descendants(number)
        for name in [name for name, each in self._ended.items() if each.number in after and each.number < before]:
            del self._ended[name]

    def _find(self, name: str, *, may_run: bool) -> EndedRequest:
        self._used = time.monotonic()
        for request in self._running.values() if may_run else ():
            if request.name == name and not request.is_stopped:
                return EndedRequest(
                    tokens=array("i", request.tokens),
                    prompt_len=request.prompt_len,
                    number=request.number,
                    parent=request.parent,
                )
        if name not in self._ended:
            raise RequestError(400, "session_params.rid", f"no request {name[:100]!r} has ended in this session")
        return self._ended[name]

    def _descendants(self, number: int | None) -> set[int]:
        """Ended requests that continued a request, directly or through others; None: every ended request."""
        found: set[int] = set()
        for each in sorted(self._ended.values(), key=lambda each: each.number):  # a parent has the smaller number
            if number is None or each.parent == number or each.parent in found:
                found.add(each.number)
        return found


class RunningRequest:
    """A request of such a session, followed to its end; then others may continue it."""

    def __init__(
        self,
        history: RequestHistory,
        name: str,
        prompt: tuple[int, ...],
        *,
        parent: int | None = None,
        replaces: bool = False,
        abort: Callable[[], None] | None = None,
    ) -> None:
        self._history = history
        self._replaces = replaces  # everything else that continued its parent
        self._abort = abort
        self.name = name
        self.number = next(history.numbers)
        self.parent = parent
        self.prompt_len = len(prompt)
        self.tokens = list(prompt)
        self.is_stopped = False

    def on_sent(self) -> None:
        """It is on its way, and nobody can continue it yet; what it replaces is aborted."""
        if self._replaces:
            self._history.stop_from(self.parent)
        self._history.add_running(self)

    def on_event(self, event: Event) -> None:
        """More output, or the end; what it replaces is forgotten once the engine has accepted it."""
        if self._replaces and not isinstance(event, Refused):
            self._replaces = False
            self._history.drop_after(self.parent, self.number)
        if isinstance(event, Tokens):
            self.tokens += event.tokens
        elif isinstance(event, Finished | Refused):
            self._history.remove_running(self)
            if is_committed(event) and not self.is_stopped:
                self._history.keep(self.name, self.tokens, self)

    def stop(self) -> None:
        """Abort it: what it generates from now on cannot be continued."""
        self.is_stopped = True
        if self._abort is not None:
            self._abort()
