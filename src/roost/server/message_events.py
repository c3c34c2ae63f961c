"""Events of Anthropic's Messages API: an answer as the events of a stream, and as one message in the end.

Each stretch of text, of thoughts and each call is a content block of its own, opened, added to and stopped in turn. The
prefix cache is automatic and writing to it costs nothing, so `cache_creation_input_tokens` is always 0: the tokens of a
prompt are those that were read from the cache and, as `input_tokens`, all others. Knows no HTTP and never waits. Called
by the endpoints of messages.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from roost.tools.events import CallArguments, CallClosed, CallOpened, Content, Reasoning, ToolEvent

Event = dict[str, Any]  # `type` is its name

SIGNATURE = "cm9vc3Q="  # of every thinking block: clients want one, and nobody here checks it
_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    499: "api_error",  # the request was aborted here
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_NUMBER_END = 2**63


def error_body(status: int, message: str, details: dict[str, Any] | None = None) -> dict[str, Any]:
    """An error as Anthropic's clients read it, whole or as an event of a stream."""
    other = "invalid_request_error" if status < 500 else "api_error"
    error: dict[str, Any] = {"type": _ERROR_TYPES.get(status, other), "message": message}
    if details is not None:
        error["details"] = details
    return {"type": "error", "error": error, "request_id": None}


def stop_reason(reason: str, *, matched_stop: str | None, has_calls: bool, fills_context: bool = False) -> str:
    """Anthropic's word for why an output ended; `has_calls`: it has calls, and all of them are complete.

    `fills_context`: there was no room for as many tokens as it might have had.
    """
    if reason == "length":
        return "model_context_window_exceeded" if fills_context else "max_tokens"
    if has_calls:  # which are to be run, whatever ended the output after them
        return "tool_use"
    return "end_turn" if matched_stop is None else "stop_sequence"


class MessageStream:
    """One answer: events come out as it goes in."""

    def __init__(self, *, id: str, model: str, new_id: Callable[[str], str], shows_thinking: bool = True) -> None:
        """Begin with nothing; `new_id` gives an id for a prefix, `shows_thinking` whether thoughts are sent."""
        self.id = id
        self._model = model
        self._new_id = new_id
        self._shows_thinking = shows_thinking
        self._usage: dict[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []  # of the message; the last one may be open
        self._open = ""  # type of the block that is open
        self._parts: list[str] = []  # what was added to it
        self._stop_reason: str | None = None
        self._stop_sequence: str | None = None

    def begin(self, prompt_tokens: int, cached_tokens: int) -> list[Event]:
        """The answer is on its way; comes first."""
        self._usage = {
            "input_tokens": prompt_tokens - cached_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached_tokens,
            "output_tokens": 0,
            "service_tier": "standard",
        }
        return [{"type": "message_start", "message": self.message}]

    def feed(self, events: Sequence[ToolEvent]) -> list[Event]:
        """What these add."""
        return [made for event in events for made in self._made_of(event)]

    def end(
        self,
        *,
        reason: str,
        matched_stop: str | None,
        has_calls: bool,
        completion_tokens: int,
        fills_context: bool = False,
    ) -> list[Event]:
        """The answer is over; comes last.

        `reason`: stop or length; `matched_stop`: the stop sequence that ended it; for the others see `stop_reason`.
        """
        closed = self._close()
        self._stop_reason = stop_reason(
            reason, matched_stop=matched_stop, has_calls=has_calls, fills_context=fills_context
        )
        self._stop_sequence = matched_stop if self._stop_reason == "stop_sequence" else None
        self._usage = {**self._usage, "output_tokens": completion_tokens}
        usage = {name: value for name, value in self._usage.items() if name != "service_tier"}
        delta = {"stop_reason": self._stop_reason, "stop_sequence": self._stop_sequence, "stop_details": None}
        return [*closed, {"type": "message_delta", "delta": delta, "usage": usage}, {"type": "message_stop"}]

    @property
    def message(self) -> dict[str, Any]:
        """The whole answer, complete after its end; a call that broke off has no input."""
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [dict(block) for block in self._blocks],
            "stop_reason": self._stop_reason,
            "stop_sequence": self._stop_sequence,
            "stop_details": None,
            "container": None,
            "usage": dict(self._usage),
        }

    def _made_of(self, event: ToolEvent) -> list[Event]:
        match event:
            case Content(text=text):
                return self._add("text", {"type": "text", "text": ""}, text)
            case Reasoning(text=text):
                return self._add("thinking", {"type": "thinking", "thinking": "", "signature": ""}, text)
            case CallOpened(name=name):
                call = {"type": "tool_use", "id": self._new_id("toolu"), "name": name, "input": {}}
                return [*self._close(), *self._start(call)]
            case CallArguments(text=text):
                assert self._open == "tool_use", event
                return self._delta(text)
            case CallClosed(is_complete=is_complete):
                assert self._open == "tool_use", event
                return self._close(is_complete=is_complete)

    def _add(self, kind: str, empty: dict[str, Any], text: str) -> list[Event]:
        """More of a stretch, which begins here unless one of its kind is open."""
        if not text:
            return []
        begun = [] if self._open == kind else [*self._close(), *self._start(empty)]
        return [*begun, *self._delta(text)]

    def _start(self, block: dict[str, Any]) -> list[Event]:
        self._blocks.append(block)
        self._open, self._parts = block["type"], []
        return [{"type": "content_block_start", "index": self._index, "content_block": dict(block)}]

    def _delta(self, text: str) -> list[Event]:
        """More of the open block."""
        self._parts.append(text)
        match self._open:
            case "text":
                return self._delta_event({"type": "text_delta", "text": text})
            case "thinking":
                shown = self._shows_thinking
                return self._delta_event({"type": "thinking_delta", "thinking": text}) if shown else []
            case _:
                return self._delta_event({"type": "input_json_delta", "partial_json": text}) if text else []

    def _close(self, *, is_complete: bool = False) -> list[Event]:
        """Stop the open block, if one is; `is_complete`: it is a call whose arguments are all there."""
        if not self._open:
            return []
        block, text, signed = self._blocks[-1], "".join(self._parts), list[Event]()
        match self._open:
            case "text":
                block["text"] = text
            case "thinking":
                block |= {"thinking": text if self._shows_thinking else "", "signature": SIGNATURE}
                signed = self._delta_event({"type": "signature_delta", "signature": SIGNATURE})
            case _:
                block["input"] = _input_of(text) if is_complete else {}
        self._open, self._parts = "", []
        return [*signed, {"type": "content_block_stop", "index": self._index}]

    def _delta_event(self, delta: dict[str, Any]) -> list[Event]:
        return [{"type": "content_block_delta", "index": self._index, "delta": delta}]

    @property
    def _index(self) -> int:
        """Of the last block."""
        return len(self._blocks) - 1


def _input_of(arguments: str) -> dict[str, Any]:
    """The object that a call's arguments stand for, with nothing in it that JSON's encoders refuse."""
    try:
        value = json.loads(arguments or "{}", parse_int=_whole)
        text = json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):  # nested too deep to be read, or a number of thousands of digits
        return {}
    is_mended = not text.isascii()  # half of a surrogate pair may have been escaped
    value = json.loads(text.encode("utf-8", "replace")) if is_mended else value
    return value if isinstance(value, dict) else {}


def _whole(digits: str) -> int | float:
    value = int(digits)
    return value if abs(value) < _NUMBER_END else float(digits)
