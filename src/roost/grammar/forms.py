"""Forms of grammars: the ways in which a request says what its output must match, as one text that llguidance reads.

A JSON schema, any JSON object, a regular expression, a choice among texts, EBNF (as llama.cpp and xgrammar write it) or
Lark. Checks what can be seen without compiling; whether a schema can be enforced is for who compiles it. Called by
whoever reads a request, and by programs that fill in `Options.grammar`.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from roost.errors import RequestError
from roost.grammar.build import check_text
from roost.grammar.ebnf import lark_of
from roost.tools.definitions import check_depth
from roost.tools.lark import json_value, literal
from roost.values import shown

CHOICES_MAX = 4096
_IS_EBNF = re.compile(r"^[ \t]*[A-Za-z][A-Za-z0-9_-]*[ \t]*::=", re.MULTILINE)
_IGNORED = re.compile(r"^[ \t]*\w+\[[^\]\n]*\b(temperature)\s*=", re.MULTILINE)  # of Lark as llguidance has it


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def json_schema_grammar(schema: object) -> str:
    """JSON by a schema: a dict, its text, or a pydantic model; whitespace is as `json.dumps` writes it."""
    plain = _schema_of(schema)
    check_depth(plain, "grammar")
    if isinstance(plain, dict) and "x-guidance" in plain:
        raise RequestError(400, "grammar", "x-guidance is not supported: whitespace is fixed, and nothing is coerced")
    return _checked(f"start: {json_value(plain)}\n")


def regex_grammar(pattern: str) -> str:
    """Text of which a regular expression, in Rust's syntax, matches the whole."""
    if not pattern:
        raise RequestError(400, "grammar", "must have at least 1 character")
    escaped = re.sub(r"\\.|/|\n", _in_slashes, pattern, flags=re.DOTALL)
    return _checked(f"start: /{escaped}/\n")


def choice_grammar(choices: Sequence[str]) -> str:
    """One of some texts."""
    if not 1 <= len(choices) <= CHOICES_MAX or not all(isinstance(each, str) and each for each in choices):
        raise RequestError(400, "grammar", f"must be 1 to {CHOICES_MAX} texts, none of them empty")
    return _checked(f"start: CHOICE\nCHOICE: {' | '.join(map(literal, choices))}\n")


def ebnf_grammar(text: str) -> str:
    """EBNF whose first rule is `root`, or Lark whose first is `start`."""
    check_text(text)
    if _IS_EBNF.search(text):
        return _checked(lark_of(text))
    if found := _IGNORED.search(text):
        raise RequestError(400, "grammar", f"{found[1]} is not supported in a rule: leave it out")
    return text


def _schema_of(given: object) -> dict[str, Any] | bool:
    if isinstance(given, type) and hasattr(given, "model_json_schema"):  # pydantic's, which need not be installed
        given = _closed(given.model_json_schema())
    if isinstance(given, str):
        check_text(given)
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise RequestError(400, "grammar", f"must be a JSON schema, got {shown(given)}") from error
    if not isinstance(given, dict | bool):
        raise RequestError(400, "grammar", f"must be a JSON schema, got {shown(given)}")
    return given


# Where a schema holds others: as a value, in a list, by name.
_INNER = ("items", "additionalProperties", "not", "anyOf", "allOf", "oneOf", "prefixItems")
_NAMED = ("properties", "patternProperties", "$defs")


def _closed(schema: Any) -> Any:
    """A pydantic model's schema without fields that the model would ignore, unless it says that it takes others."""
    if isinstance(schema, list):
        return [_closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    closed: dict[str, Any] = {"additionalProperties": False} if "properties" in schema else {}
    for name, each in schema.items():
        if name in _NAMED:
            closed[name] = {key: _closed(inner) for key, inner in each.items()}
        else:
            closed[name] = _closed(each) if name in _INNER else each
    return closed


def _checked(grammar: str) -> str:
    """A grammar whose text may be sent."""
    check_text(grammar)
    return grammar


def _in_slashes(found: re.Match[str]) -> str:
    """A part of a regular expression, as it is written between slashes on one line."""
    text = found[0]
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(text, text)
