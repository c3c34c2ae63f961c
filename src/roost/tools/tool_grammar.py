"""The grammar of an answer with tools: free text until calls open, and every call by its tool's schema.

One grammar for the whole answer, from its first token. In free text a marker can only be written as the beginning of a
call. Builds text; whether llguidance can enforce a schema is for who compiles it. Called by tools.model_formats.
"""

from roost.text.tokenizer import Tokenizer
from roost.tools.definitions import ToolRequest
from roost.tools.format import ToolFormat
from roost.tools.lark import Lark, literal, marker, without

_BLANKS = r"[ \t\r\n]{0,8}"  # before the first character that shows whether an answer is text


def tool_grammar(format: ToolFormat, request: ToolRequest, tokenizer: Tokenizer, *, is_marked: bool = False) -> str:
    """The Lark text for what a request allows; `is_marked`: required calls begin with the marker, if there is one."""
    lark = Lark(_text(format.first)) if format.first else Lark()
    lark.add("REST", without(format.marker) if format.marker else "TEXT")
    if not request.callable:
        lark.add("start", "REST")
        return lark.text()
    block = lark.add("block", format.block(lark, request, tokenizer))
    repeats = format.between is not None and request.is_parallel
    if request.is_required:
        is_bare = format.first and not (is_marked and format.marker)
        entry = block if is_bare else f"{marker(format.marker, tokenizer)} {block}"
        between = literal(format.between) + " " if format.between else ""
        lark.add("start", f"{entry} ({between}{entry})*" if repeats else entry)
        return lark.text()
    opening = lark.until(format.marker, tokenizer) if format.marker else None
    if repeats:
        lark.add("start", f"({opening} {block})* TEXT")
    elif format.between is not None:
        lark.add("start", f"({opening} {block})? REST")
    else:  # nothing follows the block
        ways = ["REST", *([f"{opening} {block}"] if opening else []), *([block] if format.first else [])]
        lark.add("start", " | ".join(ways))
    return lark.text()


def _text(first: str) -> str:
    """A terminal's body: free text that does not begin as a block of calls does."""
    return f"/({_BLANKS}[^\\{first} \\t\\r\\n](?s:.*))?/"
