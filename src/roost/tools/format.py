"""What a format of tool calls declares: how calls are marked, read, and enforced.

A new format is one file with a `ToolFormat`, and one more entry in tools.registry. Called through tools.machine,
tools.tool_grammar and tools.model_formats.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import Chars, Reading
from roost.tools.definitions import Tool
from roost.tools.lark import Lark


class CallSink(Protocol):
    """Where a reader puts the calls that it finds."""

    def open(self, name: str) -> dict[str, Any]:
        """A call begins; returns the schema of its arguments. Raises NotACall if there is no such tool."""

    def write(self, text: str) -> None:
        """More of its arguments, as JSON."""

    def close(self) -> None:
        """Its arguments are complete."""


class ToolFormat(Protocol):
    """One way in which models write tool calls."""

    @property
    def name(self) -> str:
        """Of --tool-format."""

    @property
    def marker(self) -> str:
        """What opens a block of calls anywhere in an answer; "" if nothing does."""

    @property
    def first(self) -> str:
        """The character that opens one at the beginning of an answer, as the first of the block; "" if none does."""

    @property
    def between(self) -> str | None:
        """What stands between two blocks, each of one call; None: one block has all calls, and ends the answer."""

    @property
    def tokens(self) -> tuple[str, ...]:
        """All texts of its syntax that may be added tokens of a vocabulary."""

    @property
    def has_short_ids(self) -> bool:
        """Whether templates take only call ids of nine letters and digits."""

    def read(self, chars: Chars, calls: CallSink) -> Reading[None]:
        """Read a block after its marker, or from its first character; raises NotACall where it does not go on."""

    def unenforced(self, schema: dict[str, Any]) -> str | None:
        """The keyword of a schema that this format cannot enforce, None if it can write all that JSON can."""

    def block(self, lark: Lark, tools: Sequence[Tool], tokenizer: Tokenizer, *, is_parallel: bool) -> str:
        """The grammar of a block after its marker, or from its first character."""
