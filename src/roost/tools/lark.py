"""Grammar text: the few forms of llguidance's Lark that the grammars of tool calls are made of.

Builds text only and needs no llguidance. A marker that the tokenizer has as an added token is named as that token,
since llguidance keeps such tokens out of any text; in free text it is known in both spellings. Called by
tools.tool_grammar, tools.reasoning and the formats.
"""

import json
from typing import Any

from roost.errors import RequestError
from roost.text.tokenizer import Tokenizer

_ANY = "(?s:.*)"
# Between the tokens of JSON: what `json.dumps` writes, so that none can go on without end.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Lark:
    """The rules of one grammar; `text`: free text, as a terminal's body."""

    def __init__(self, text: str = f"/{_ANY}/") -> None:
        self._rules: dict[str, str] = {"TEXT": text, "ANY": f"/{_ANY}/"}

    def add(self, name: str, body: str) -> str:
        """Add a rule; returns its name."""
        assert name not in self._rules, name
        self._rules[name] = body
        return name

    def until(self, text: str, tokenizer: Tokenizer) -> str:
        """Free text up to and with a marker, however that is spelt."""
        self.add("spelled[lazy]", f"TEXT {literal(text)}")
        id = tokenizer.added_ids.get(text)
        return "spelled" if id is None else f"(TEXT <[{id}]> | spelled)"

    def text(self) -> str:
        """The grammar."""
        return "".join(f"{name}: {body}\n" for name, body in self._rules.items())


def literal(text: str) -> str:
    """Exactly this text."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")  # which llguidance does not take as it is


def marker(text: str, tokenizer: Tokenizer) -> str:
    """A marker where nothing else may come: the added token if there is one, otherwise its text."""
    id = tokenizer.added_ids.get(text)
    return literal(text) if id is None else f"<[{id}]>"


def without(*texts: str) -> str:
    """A terminal's body: free text that has none of these in it."""
    return " & ".join(["TEXT", *(f"~(ANY {literal(text)} ANY)" for text in texts)])


def with_parts(lark: str, **parts: str) -> str:
    """A grammar that refers to others by name, each of them in Lark or in llguidance's JSON."""
    grammars: list[dict[str, Any]] = [{"lark_grammar": lark}]
    for name, text in parts.items():
        first, *others = _grammars(text)
        grammars += [{**first, "name": name}, *others]
    return json.dumps({"grammars": grammars}, ensure_ascii=False)


def _grammars(text: str) -> list[dict[str, Any]]:
    """The entries that a text stands for in llguidance's JSON."""
    if not text.lstrip().startswith("{"):
        return [{"lark_grammar": text}]
    try:
        found = json.loads(text)["grammars"]
    except (ValueError, KeyError, RecursionError):
        found = None
    if not isinstance(found, list) or not found or not all(isinstance(each, dict) for each in found):
        raise RequestError(400, "grammar", "must be Lark, or llguidance's JSON with a list of `grammars`")
    return found


def json_value(schema: dict[str, Any] | bool) -> str:
    """JSON by a schema, with fixed whitespace."""
    if isinstance(schema, bool):
        schema = {} if schema else {"not": {}}
    return f"%json {json.dumps({**schema, 'x-guidance': _LAYOUT}, ensure_ascii=False)}"
