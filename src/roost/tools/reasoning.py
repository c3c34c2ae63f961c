"""Reasoning: what a model thinks before it answers, told apart from the answer.

Owns the tags, the split of a stream at them, and the grammar that leaves reasoning free and holds the answer to another
grammar. Whitespace inside the tags' ends and after them is layout. Called by tools.machine and tools.model_formats.
"""

from dataclasses import dataclass

from roost.text.tokenizer import Tokenizer
from roost.tools.chars import BLANKS
from roost.tools.lark import Lark, literal, with_parts


@dataclass(frozen=True, slots=True, kw_only=True)
class ReasoningTags:
    """What reasoning stands between, and whether the prompt has opened it already."""

    begin: str
    end: str
    is_open: bool


class ReasoningSplitter:
    """Splits one output into reasoning and answer."""

    def __init__(self, tags: ReasoningTags) -> None:
        self._tags = tags
        self._pending = ""  # may become a tag, or is whitespace before one
        self._is_inside = tags.is_open
        self._has_begun = False  # something has come inside
        self.is_over = False  # the rest is the answer

    def feed(self, piece: str) -> tuple[str, str]:
        """Add text; returns more of the reasoning and more of the answer."""
        if self.is_over:
            return "", piece
        self._pending += piece
        if not self._is_inside:
            given = self._pending.lstrip(BLANKS)
            if self._tags.begin.startswith(given) and given != self._tags.begin:
                return "", ""
            if not given.startswith(self._tags.begin):
                return "", self._rest()
            self._is_inside, self._pending = True, given.removeprefix(self._tags.begin)
        thought, found, rest = self._pending.partition(self._tags.end)
        if found:
            self._pending = rest
            return self._shown(thought.rstrip(BLANKS)), self._rest()
        certain = thought[: len(thought) - overlap(thought, self._tags.end)].rstrip(BLANKS)
        self._pending = thought[len(certain) :]
        return self._shown(certain), ""

    def end(self) -> tuple[str, str]:
        """The output is over: what is left of both."""
        if not self._is_inside:
            return "", self._rest()
        thought, self._pending = self._pending, ""
        return self._shown(thought), ""

    @property
    def has_reasoned(self) -> bool:
        """Whether the answer comes after reasoning."""
        return self._is_inside

    def _shown(self, thought: str) -> str:
        shown = thought if self._has_begun else thought.lstrip(BLANKS)
        self._has_begun = self._has_begun or bool(shown)
        return shown

    def _rest(self) -> str:
        self.is_over = True
        rest, self._pending = self._pending, ""
        return rest


def overlap(text: str, tag: str) -> int:
    """How many characters at the end of a text may be the beginning of a tag."""
    return next((size for size in range(min(len(text), len(tag) - 1), 0, -1) if text.endswith(tag[:size])), 0)


def after_reasoning(grammar: str, tags: ReasoningTags, tokenizer: Tokenizer) -> str:
    """The grammar of free reasoning and then an answer by another grammar, which may be Lark or JSON; "" stays free."""
    if not grammar:
        return ""
    lark = Lark()
    reasoned = f"{lark.until(tags.end, tokenizer)} BREAK"
    if not tags.is_open:
        lark.add("BLANK", r"/[ \t\r\n]*/")
        lark.add("begin[lazy]", f"BLANK {literal(tags.begin)}")  # lazy: an answer in free text cannot begin like that
        id = tokenizer.added_ids.get(tags.begin)
        reasoned = f"{'begin' if id is None else f'(BLANK <[{id}]> | begin)'} {reasoned}"
    lark.add("BREAK", r"/\n{0,2}/")
    lark.add("start", f"{reasoned} @after_reasoning" if tags.is_open else f"({reasoned})? @after_reasoning")
    return with_parts(lark.text(), after_reasoning=grammar)
