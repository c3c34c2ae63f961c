"""Parameters one by one: the schema of an object taken apart, for formats that write each parameter in its own way.

Such a format can enforce a schema whose parameters are listed, each with its own; what ties several of them together
(anyOf beside properties, say) it cannot. Called by those formats.
"""

from dataclasses import dataclass
from typing import Any

_KNOWN = ("type", "properties", "required", "additionalProperties", "$defs", "definitions")
_SAYS_NOTHING = ("title", "description", "$schema", "$id", "examples", "default", "$comment", "x-guidance")
_DEFINITIONS = ("$defs", "definitions")
_REFS_MAX = 8  # from one definition to the next


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One parameter."""

    name: str
    schema: dict[str, Any]  # with the definitions that it may refer to
    is_required: bool


def unlisted_keyword(schema: dict[str, Any]) -> str | None:
    """The keyword because of which a schema is no plain list of parameters, None if it is one."""
    for keyword in schema:
        if keyword not in _KNOWN and keyword not in _SAYS_NOTHING:
            return keyword
    if not all(isinstance(each, dict | bool) for each in schema.get("properties", {}).values()):
        return "properties"
    missing = [name for name in schema.get("required", []) if name not in schema.get("properties", {})]
    if missing:
        return "required"
    return "$ref" if any(_refers_elsewhere(each) for each in schema.get("properties", {}).values()) else None


def parameters_of(schema: dict[str, Any]) -> list[Parameter] | None:
    """The parameters, in their order; None: any may be given."""
    properties, required = schema.get("properties", {}), schema.get("required", [])
    if not properties and schema.get("additionalProperties", True) is not False:
        return None
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    return [
        Parameter(name=name, schema=_resolved(each, definitions), is_required=name in required)
        for name, each in properties.items()
    ]


def types_of(schema: dict[str, Any]) -> frozenset[str] | None:
    """The JSON types that a parameter may have, None if that is not plain to see."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset([given])
    if isinstance(given, list):
        return frozenset(given)
    if values := values_of(schema):
        return frozenset("string" if isinstance(each, str) else "other" for each in values)
    branches = schema.get("anyOf")
    if isinstance(branches, list):
        kinds = [types_of(each) if isinstance(each, dict) else None for each in branches]
        known = [kind for kind in kinds if kind is not None]
        return frozenset().union(*known) if len(known) == len(kinds) else None
    return None


def values_of(schema: dict[str, Any]) -> list[Any]:
    """The values that a parameter may have, if they are listed."""
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    return values if isinstance(values, list) else []


def _resolved(schema: dict[str, Any] | bool, definitions: dict[str, Any]) -> dict[str, Any]:
    """A parameter's schema on its own: with the definitions, and with what it refers to itself in place."""
    found: Any = {} if isinstance(schema, bool) else schema
    for _ in range(_REFS_MAX):
        key, name = _definition_of(found.get("$ref"))
        target = definitions.get(key, {}).get(name) if key else None
        if not isinstance(target, dict):
            break
        found = {**target, **{keyword: value for keyword, value in found.items() if keyword != "$ref"}}
    return {**definitions, **found}


def _definition_of(ref: object) -> tuple[str, str]:
    """The two names in a reference such as #/$defs/Colour; empty if it is none."""
    parts = ref.split("/") if isinstance(ref, str) else []
    return (parts[1], parts[2]) if len(parts) == 3 and parts[0] == "#" and parts[1] in _DEFINITIONS else ("", "")


def _refers_elsewhere(value: Any) -> bool:
    """Whether a schema refers to anything but definitions, which it could not find on its own."""
    pending = [value]
    while pending:
        each = pending.pop()
        if isinstance(each, dict):
            ref = each.get("$ref")
            if isinstance(ref, str) and not ref.startswith(tuple(f"#/{key}/" for key in _DEFINITIONS)):
                return True
            pending.extend(each.values())
        elif isinstance(each, list):
            pending.extend(each)
    return False
