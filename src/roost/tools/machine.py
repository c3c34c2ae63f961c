"""The machine that reads an output: content, reasoning and tool calls, the same however the stream is cut.

Text goes in by pieces, events come out. What may still become a call is held back. Once a call has opened, its
arguments are passed on as they come; if it breaks off after that, it is closed as incomplete and the rest is content.
Nothing is lost, and nothing is both. Whitespace around calls and after reasoning is layout and is dropped. One machine
serves one output, and raises nothing, whatever it is fed. Called by whoever shows an output.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from roost.tools.chars import BLANKS, Chars, NotACall, Reading
from roost.tools.definitions import Tool
from roost.tools.events import CallArguments, CallClosed, CallOpened, Content, Reasoning, ToolEvent
from roost.tools.format import ToolFormat
from roost.tools.reasoning import ReasoningSplitter, ReasoningTags, overlap


class Machine:
    """Reads one output."""

    def __init__(
        self,
        *,
        format: ToolFormat | None,  # None: there are no calls to read
        tools: Sequence[Tool] | None,  # those that may be called; None: a call may name any
        new_id: Callable[[], str],
        reasoning: ReasoningTags | None = None,
        is_marked: bool = False,  # only the format's marker opens calls, if it has one
    ) -> None:
        self._splitter = None if reasoning is None else ReasoningSplitter(reasoning)
        self._content = _ContentReader(format, tools, new_id, is_marked=is_marked)

    @property
    def has_calls(self) -> bool:
        """Whether there are calls so far, all of them complete."""
        return 0 < self._content.calls.num_opened == self._content.calls.num_complete

    def feed(self, piece: str) -> list[ToolEvent]:
        """Add text; returns what is certain now."""
        return self._events(*(self._splitter.feed(piece) if self._splitter is not None else ("", piece)))

    def end(self) -> list[ToolEvent]:
        """The output is over; returns the rest."""
        events = self._events(*(self._splitter.end() if self._splitter is not None else ("", "")))
        self._content.end()
        return joined([*events, *self._content.taken()])

    def _events(self, thought: str, answer: str) -> list[ToolEvent]:
        reasoning: list[ToolEvent] = [Reasoning(text=thought)] if thought else []
        if answer:
            if self._splitter is not None and self._splitter.has_reasoned:
                self._content.after_reasoning()
            self._content.feed(answer)
        return joined([*reasoning, *self._content.taken()])


class Calls:
    """The calls of one output, as a format's reader finds them."""

    def __init__(
        self, tools: Mapping[str, Tool] | None, new_id: Callable[[], str], emit: Callable[[ToolEvent], None]
    ) -> None:
        self._tools = tools
        self._new_id = new_id
        self._emit = emit
        self._chars = Chars()
        self.num_opened = 0
        self.num_complete = 0
        self.is_open = False

    def begin(self, chars: Chars) -> None:
        """A reader starts, with these characters."""
        self._chars = chars

    def open(self, name: str) -> dict[str, Any]:
        """A call begins; returns the schema of its arguments. Raises NotACall if there is no such tool."""
        if self._tools is not None and name not in self._tools:
            raise NotACall
        self._chars.use()
        self._chars.is_closing = False
        self._emit(CallOpened(index=self.num_opened, id=self._new_id(), name=name))
        self.num_opened += 1
        self.is_open = True
        return {} if self._tools is None else self._tools[name].schema()

    def write(self, text: str) -> None:
        """More of the arguments."""
        self._chars.use()
        self._emit(CallArguments(index=self.num_opened - 1, text=text))

    def close(self, *, is_complete: bool = True) -> None:
        """The call's arguments end."""
        if is_complete:
            self.num_complete += 1
            self._chars.use()
            self._chars.is_closing = True
        self._emit(CallClosed(index=self.num_opened - 1, is_complete=is_complete))
        self.is_open = False


class _ContentReader:
    """Reads what comes after reasoning: content and calls."""

    def __init__(
        self, format: ToolFormat | None, tools: Sequence[Tool] | None, new_id: Callable[[], str], *, is_marked: bool
    ) -> None:
        self._format = format
        self._first = "" if format is None or (is_marked and format.marker) else format.first
        self._events: list[ToolEvent] = []
        by_name = None if tools is None else {tool.name: tool for tool in tools}
        self.calls = Calls(by_name, new_id, self._events.append)
        self._queue: deque[str] = deque()
        self._pending = ""  # may become an opening, or is whitespace before one
        self._reader: Reading[None] | None = None  # runs inside of calls
        self._chars = Chars()
        self._num_opened_before = 0  # calls before the reader began
        self._blank_len = 0  # of the whitespace that came before the opening
        self._has_content = False  # other than whitespace
        self._is_after_layout = False  # nothing but whitespace since reasoning or a call

    def feed(self, piece: str) -> None:
        """Add text."""
        self._queue.extend(piece)
        while self._queue:
            self._read(self._queue.popleft())

    def after_reasoning(self) -> None:
        """Reasoning came before: the whitespace after it is layout."""
        self._is_after_layout = self._is_after_layout or not (self._pending or self._has_content)

    def end(self) -> None:
        """No more comes: what was held back is content, or the syntax that ends a call."""
        while self._reader is not None:
            if self.calls.is_open:
                self.calls.close(is_complete=False)
                self._stop_reader()
            elif self._chars.is_closing:
                self._stop_reader()
            else:
                self._give_back()
                self.feed("")
        if self._pending.strip(BLANKS) or not self._is_after_layout:
            self._show(self._pending)
        self._pending = ""

    def taken(self) -> list[ToolEvent]:
        """The events since the last call."""
        taken = list(self._events)
        self._events.clear()
        return taken

    def _read(self, char: str) -> None:
        if self._reader is None:
            self._read_text(char)
            return
        self._chars.held += char
        try:
            self._reader.send(char)
        except StopIteration:
            self._queue.extendleft(reversed(self._chars.ahead))
            self._stop_reader()
        except NotACall:
            self._give_back()

    def _read_text(self, char: str) -> None:
        self._pending += char
        if self._format is None:
            body = self._pending.rstrip(BLANKS)
            self._show(body)
            self._pending = self._pending[len(body) :]
            return
        marker = self._format.marker
        if marker and self._pending.endswith(marker):
            self._start_reader(self._format, len(marker))
        elif char == self._first and not self._has_content and not self._pending[:-1].strip(BLANKS):
            self._start_reader(self._format, 1)
        else:
            body = self._pending[: len(self._pending) - overlap(self._pending, marker)].rstrip(BLANKS)
            self._show(body)
            self._pending = self._pending[len(body) :]

    def _start_reader(self, format: ToolFormat, opening_len: int) -> None:
        """Calls may begin: `opening_len` characters at the end of what is pending are how."""
        text = self._pending[:-opening_len]
        body = text.rstrip(BLANKS)
        self._show(body)
        held, self._pending = self._pending[len(body) :], ""
        self._blank_len = len(held) - opening_len
        self._chars = Chars()
        self._chars.held = held
        self._num_opened_before = self.calls.num_opened
        self.calls.begin(self._chars)
        self._reader = format.read(self._chars, self.calls)
        next(self._reader)
        if not format.marker or not held.endswith(format.marker):  # the first character is the call's own
            self._reader.send(held[-1])

    def _stop_reader(self) -> None:
        self._reader = None
        self._is_after_layout = True

    def _give_back(self) -> None:
        """What the reader holds is no call, or no more of one: it is read again as content."""
        self._reader, held = None, self._chars.held
        if self.calls.is_open:
            self.calls.close(is_complete=False)
        if self.calls.num_opened == self._num_opened_before:
            certain = self._blank_len + 1  # so that the opening is not taken for one again
            self._show(held[:certain])
            held = held[certain:]
        else:
            self._is_after_layout = True
        self._queue.extendleft(reversed(held))

    def _show(self, text: str) -> None:
        """Content; leading whitespace is dropped where it is layout and nothing came before."""
        if self._is_after_layout and not self._has_content:
            text = text.lstrip(BLANKS)
        if not text:
            return
        self._events.append(Content(text=text))
        self._has_content = self._has_content or bool(text.strip(BLANKS))
        self._is_after_layout = False


def joined(events: Sequence[ToolEvent]) -> list[ToolEvent]:
    """The events with neighbours of one kind as one."""
    found: list[ToolEvent] = []
    for event in events:
        match found[-1] if found else None, event:
            case Content(text=before), Content(text=text):
                found[-1] = Content(text=before + text)
            case Reasoning(text=before), Reasoning(text=text):
                found[-1] = Reasoning(text=before + text)
            case CallArguments(text=before), CallArguments(index=index, text=text):
                found[-1] = CallArguments(index=index, text=before + text)
            case _:
                found.append(event)
    return found
