"""The names in a PromQL expression: enough of its syntax to see which metrics, labels and values one asks for."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_SELECTOR = re.compile(r"\b([a-zA-Z_:][\w:]*)\b(?!\s*\()\s*(?:\{([^}]*)\})?")
_MATCHER = re.compile(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"')
_CLAUSE = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\(([^)]*)\)")
_RANGE = re.compile(r"\[[^\]]*\]")
_WORDS = {"and", "or", "unless", "bool", "offset", "inf", "nan"}


@dataclass(frozen=True, slots=True)
class Selector:
    """A metric, and what is asked of its labels: names, and the values that a matcher lists."""

    metric: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)


def selectors(expression: str) -> Iterator[Selector]:
    """The metrics that an expression reads, in order."""
    plain = _RANGE.sub("", _CLAUSE.sub("", expression))
    for found in _SELECTOR.finditer(plain):
        metric, inside = found.groups()
        if metric.lower() not in _WORDS:
            matchers = _MATCHER.findall(inside or "")
            yield Selector(metric, {label: tuple(value.split("|")) for label, _, value in matchers})


def grouped_by(expression: str) -> set[str]:
    """The labels that an expression groups or joins by."""
    return {label.strip() for _, inside in _CLAUSE.findall(expression) for label in inside.split(",") if label.strip()}
