"""What a format of tool calls declares: how calls are marked, read, and enforced.

A new format is one file with a `ToolFormat`, and one more entry in tools.registry. Called through tools.machine,
tools.tool_grammar and tools.model_formats.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading
from roost.tools.definitions import ToolRequest
from roost.tools.lark import Lark


class CallSink(Protocol):
    """Where a reader puts the calls that it finds."""

    def open(self, name: str) -> dict[str, Any]:
        """A call begins; returns the schema of its arguments. Raises NotACall if there is no such tool."""

    def write(self, text: str) -> None:
        """More of its arguments, as JSON."""

    def close(self) -> None:
        """Its arguments are complete."""


def enforces_all(schema: dict[str, Any]) -> str | None:
    """Of formats whose arguments are JSON: whatever can be enforced of JSON, they can."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """One way in which models write tool calls."""

    name: str  # of --tool-format
    marker: str = ""  # what opens a block of calls anywhere in an answer; "" if nothing does
    first: str = ""  # the character that opens one at the beginning of an answer, as the first of the block
    between: str | None = None  # what stands between two blocks, each of one call; None: one block has all, and is last
    tokens: tuple[str, ...] = ()  # all texts of its syntax that may be added tokens of a vocabulary
    has_short_ids: bool = False  # templates take only call ids of nine letters and digits
    # Reads a block after its marker, or from its first character; raises NotACall where it does not go on.
    read: Callable[[Chars, CallSink], Reading[None]]
    # The grammar of a block after its marker, or from its first character; it may add rules.
    block: Callable[[Lark, ToolRequest, Tokenizer], str]
    # The keyword of a schema that cannot be enforced in this format, though it could be of JSON; None if there is none.
    unenforced: Callable[[dict[str, Any]], str | None] = enforces_all
