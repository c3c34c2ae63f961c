"""Events: what a machine finds in an output, in the order in which it comes.

Text that is neither is the answer's content. A call is opened once, its arguments come as pieces of one JSON text, and
it is closed once. Made by tools.machine, read by whoever shows an output.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Reasoning:
    """More of what the model thinks before it answers."""

    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallOpened:
    """A call begins."""

    index: int  # among the calls of this output
    id: str
    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CallClosed:
    """A call ends; its arguments are one JSON object if it is complete, and the beginning of one if not."""

    index: int
    is_complete: bool


ToolEvent = Content | Reasoning | CallOpened | CallArguments | CallClosed
