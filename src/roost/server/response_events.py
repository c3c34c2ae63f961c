"""Events of a response: OpenAI's Responses API, from what the model says to the events and the object clients read.

An output becomes items: reasoning, messages, calls, one after the other and one open at a time. Each event has the next
number, each item keeps its id and its index, and what is done repeats the whole of what came in pieces. Pure: never
waits, and never sees tokens; whoever makes the output feeds it. Called by the endpoints of responses.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from roost.server.response_input import CUSTOM_INPUT, CalledAs, output_text
from roost.tools.events import CallArguments, CallClosed, CallOpened, Content, Reasoning, ToolEvent

Fields = dict[str, Any]

# Every field of a response that does not come with its output; what a request says of them takes their place.
_FIELDS: Fields = {
    "instructions": None,
    "previous_response_id": None,
    "conversation": None,
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "truncation": "disabled",
    "text": {"format": {"type": "text"}},
    "reasoning": {"effort": None, "summary": None},
    "temperature": 1.0,
    "top_p": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "top_logprobs": 0,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "store": True,
    "background": False,
    "service_tier": "default",
    "metadata": {},
    "user": None,
    "safety_identifier": None,
    "prompt_cache_key": None,
    "prompt_cache_retention": None,
    "prompt_cache_options": None,
    "prompt_cache_diagnostics": None,
    "access_programs": None,
    "image": None,
    "input_transformations": None,
    "moderation": None,
    "prompt": None,
    "tool_usage": None,
}
# a stream has no event of its own for a response that was cancelled
_LAST_EVENTS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    "cancelled": "response.incomplete",
}


def usage_of(prompt_tokens: int, cached_tokens: int, completion_tokens: int, reasoning_tokens: int = 0) -> Fields:
    """What a response cost."""
    written = prompt_tokens - cached_tokens
    return {
        "input_tokens": prompt_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens, "cache_write_tokens": written},
        "output_tokens": completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": prompt_tokens + completion_tokens,
    }


@dataclass(slots=True, kw_only=True, eq=False)
class _OpenItem:
    """The item that the output is in."""

    id: str
    call: CallOpened | None = None  # None: a text
    is_thought: bool = False
    pieces: list[str] = field(default_factory=list)
    logprobs: list[Fields] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self.pieces)


class ResponseStream:
    """One response while it is made."""

    def __init__(
        self,
        *,
        id: str,
        created_at: int,
        model: str,
        echo: Fields,  # what the response repeats of its request
        new_id: Callable[[str], str],  # for a prefix
        called_as: Mapping[str, CalledAs] | None = None,  # how the client knows its functions, by the model's names
        with_logprobs: bool = False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self.id = id
        self._base = {"id": id, "object": "response", "created_at": created_at, "model": model}
        self._echo = {**_FIELDS, **echo}
        self._called_as = called_as or {}
        self._new_id = new_id
        self._with_logprobs = with_logprobs
        self._now = now
        self._num_events = 0
        self._status = "in_progress"
        self._ended: Fields = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        self._output: list[Fields] = []  # items that are done
        self._open: _OpenItem | None = None
        self._waiting_logprobs: list[Fields] = []  # of tokens whose text has not come yet

    @property
    def response(self) -> Fields:
        """The response as it is now, with the items that are done."""
        return {**self._base, "status": self._status, **self._echo, **self._ended, "output": list(self._output)}

    def queued(self) -> list[Fields]:
        """The first events of a response that waits in the background."""
        self._status = "queued"
        return [self._of_response("response.created"), self._of_response("response.queued")]

    def begin(self) -> list[Fields]:
        """The first events, or those after a wait."""
        self._status = "in_progress"
        created = [self._of_response("response.created")] if not self._num_events else []
        return [*created, self._of_response("response.in_progress")]

    def feed(self, events: Sequence[ToolEvent], logprobs: Sequence[Fields] = ()) -> list[Fields]:
        """What the model has said now; log-probabilities belong to text of the answer, and others are left out."""
        found: list[Fields] = []
        self._waiting_logprobs += logprobs if self._with_logprobs else ()
        for event in events:
            match event:
                case Content(text=text):
                    found += self._text(text, is_thought=False)
                case Reasoning(text=text):
                    found += self._text(text, is_thought=True)
                case CallOpened():
                    found += self._open_call(event)
                case CallArguments(text=text):
                    found += self._arguments(text)
                case CallClosed(is_complete=is_complete):
                    found += self._close(is_complete=is_complete)
        if any(not isinstance(event, Content) for event in events):
            self._waiting_logprobs.clear()  # these tokens were no text of the answer
        return found

    def end(
        self,
        *,
        status: str,  # completed, incomplete, failed or cancelled
        incomplete_reason: str | None = None,
        error: Fields | None = None,
        usage: Fields | None = None,
    ) -> list[Fields]:
        """The last events; an item that is open is as complete as the response."""
        found = self._close(is_complete=status == "completed" and not self._is_in_call)
        self._status = status
        self._ended = {
            "completed_at": int(self._now()) if status == "completed" else None,
            "error": error,
            "incomplete_details": None if incomplete_reason is None else {"reason": incomplete_reason},
            "usage": usage,
        }
        return [*found, self._of_response(_LAST_EVENTS[status])]

    @property
    def _is_in_call(self) -> bool:
        """Whether a call is open, which nothing but its own end completes."""
        return self._open is not None and self._open.call is not None

    def _text(self, text: str, *, is_thought: bool) -> list[Fields]:
        """More of a message, or of reasoning."""
        if not text:
            return []
        found = []
        if self._open is None or self._open.call is not None or self._open.is_thought != is_thought:
            found = self._close(is_complete=not self._is_in_call)
            self._open = _OpenItem(id=self._new_id("rs" if is_thought else "msg"), is_thought=is_thought)
            found.append(self._event("response.output_item.added", item=self._item("in_progress", parts=[])))
            found.append(self._of_part("response.content_part.added", part=self._part()))
        item = self._open
        assert item is not None
        item.pieces.append(text)
        if is_thought:
            return [*found, self._of_part("response.reasoning_text.delta", delta=text)]
        logprobs, self._waiting_logprobs = self._waiting_logprobs, []
        item.logprobs += logprobs
        return [*found, self._of_part("response.output_text.delta", delta=text, logprobs=logprobs)]

    def _open_call(self, call: CallOpened) -> list[Fields]:
        found = self._close(is_complete=not self._is_in_call)
        prefix = "ctc" if self._known(call.name).is_custom else "fc"
        self._open = _OpenItem(id=self._new_id(prefix), call=call)
        return [*found, self._event("response.output_item.added", item=self._item("in_progress"))]

    def _arguments(self, text: str) -> list[Fields]:
        item = self._open
        assert item is not None and item.call is not None, "arguments of no call"
        item.pieces.append(text)
        if not text or self._known(item.call.name).is_custom:
            return []  # a custom tool's input is a text inside of them
        return [self._of_item("response.function_call_arguments.delta", delta=text)]

    def _close(self, *, is_complete: bool) -> list[Fields]:
        """The item that is open is done."""
        item = self._open
        if item is None:
            return []
        done = self._item("completed" if is_complete else "incomplete")
        if item.call is not None:
            found = self._call_done(done)
        else:
            kind = "response.reasoning_text.done" if item.is_thought else "response.output_text.done"
            logprobs = {} if item.is_thought else {"logprobs": list(item.logprobs)}
            found = [
                self._of_part(kind, text=item.text, **logprobs),
                self._of_part("response.content_part.done", part=self._part()),
            ]
        found.append(self._event("response.output_item.done", item=done))
        self._output.append(done)
        self._open = None
        return found

    def _call_done(self, done: Fields) -> list[Fields]:
        if done["type"] == "function_call":
            arguments, name = done["arguments"], done["name"]
            return [self._of_item("response.function_call_arguments.done", arguments=arguments, name=name)]
        found = [self._of_item("response.custom_tool_call_input.delta", delta=done["input"])] if done["input"] else []
        return [*found, self._of_item("response.custom_tool_call_input.done", input=done["input"])]

    def _item(self, status: str, parts: list[Fields] | None = None) -> Fields:
        """The item that is open, as clients read it."""
        item = self._open
        assert item is not None
        base = {"id": item.id, "status": status}
        if item.call is not None:
            known = self._known(item.call.name)
            called = {**base, "call_id": item.call.id, "name": known.name}
            called |= {} if known.namespace is None else {"namespace": known.namespace}
            if known.is_custom:
                return {**called, "type": "custom_tool_call", "input": _custom_input(item.text)}
            return {**called, "type": "function_call", "arguments": item.text}
        content = [self._part()] if parts is None else parts
        if item.is_thought:
            return {**base, "type": "reasoning", "summary": [], "content": content, "encrypted_content": None}
        return {**base, "type": "message", "role": "assistant", "content": content}

    def _part(self) -> Fields:
        """The one part of the text that is open."""
        item = self._open
        assert item is not None
        return (
            {"type": "reasoning_text", "text": item.text} if item.is_thought else output_text(item.text, item.logprobs)
        )

    def _known(self, name: str) -> CalledAs:
        return self._called_as.get(name) or CalledAs(name=name)

    def _of_response(self, kind: str) -> Fields:
        return self._numbered(kind, response=self.response)

    def _event(self, kind: str, **fields: Any) -> Fields:
        """An event at the place of the item that is open."""
        return self._numbered(kind, output_index=len(self._output), **fields)

    def _of_item(self, kind: str, **fields: Any) -> Fields:
        assert self._open is not None
        return self._event(kind, item_id=self._open.id, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Fields:
        return self._of_item(kind, content_index=0, **fields)

    def _numbered(self, kind: str, **fields: Any) -> Fields:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}


def _custom_input(arguments: str) -> str:
    """The text that the arguments of a custom tool's function hold; all of them where they are cut off."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    found = value.get(CUSTOM_INPUT, "") if isinstance(value, dict) else arguments
    text = found if isinstance(found, str) else arguments
    return text.encode("utf-8", "replace").decode()  # half of a surrogate pair may have been escaped
