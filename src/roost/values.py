"""Values: checks that what a caller gave has the types its record declares, and formats values for error messages.

The one type check, for every interface: a field's annotation is the rule, and RequestError names the first field that
breaks it. Equivalent values (numpy's numbers, a list for a tuple) are converted. Ranges are not checked here, but by
the modules that know them. Called by `front` for options and by intake for every command.
"""

import types
import typing
from collections.abc import Callable, Sequence
from dataclasses import dataclass, is_dataclass, replace
from functools import cache
from numbers import Integral
from typing import Any, TypeVar, cast

import numpy as np

from roost.errors import RequestError

Record = TypeVar("Record")

_WHOLE_BITS_MAX = 64
_SHOWN_MAX = 40  # characters of a value in a message


def fitted(record: Record) -> Record:
    """The record with plain values of its declared types; raises RequestError for the first that does not convert."""
    changed, kind = {}, cast(Any, type(record))
    for name, rule in _rules(kind):
        given = getattr(record, name)
        plain = _fit(name, given, rule)
        if plain is not given:
            changed[name] = plain
    return replace(record, **changed) if changed else record  # type: ignore[type-var]


def real(param: str, value: object) -> float:
    """A value as a number, or RequestError."""
    plain: float = _fit(param, value, _rule(float))
    return plain


def token_ids(param: str, value: object) -> tuple[int, ...]:
    """A sequence of integers as token ids, or RequestError."""
    ids: tuple[int, ...] = _fit(param, value, _rule(tuple[int, ...]))
    return ids


def shown(value: object) -> str:
    """A value for an error message: never long, and without the digits of a huge number."""
    if isinstance(value, int) and value.bit_length() > _WHOLE_BITS_MAX:
        return f"a number of more than {_WHOLE_BITS_MAX} bits"
    if isinstance(value, str | bytes):
        return repr(value[:_SHOWN_MAX])
    is_plain = value is None or isinstance(value, bool | int | float | np.generic)
    return repr(value)[:_SHOWN_MAX] if is_plain else f"a value of type {type(value).__name__}"


class _Misfit(Exception):
    """A value, or a part of one, does not have its declared type."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self.value = value


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one declared type is checked."""

    words: str  # what is allowed, for the error message
    plain: Callable[[object], Any]  # converts a value; raises _Misfit if that is not possible


def _fit(param: str, value: object, rule: _Rule) -> Any:
    try:
        return rule.plain(value)
    except _Misfit as misfit:
        raise RequestError(400, param, f"must be {rule.words}, got {shown(misfit.value)}") from None


@cache
def _rules(record: type) -> tuple[tuple[str, _Rule], ...]:
    return tuple((name, _rule(hint)) for name, hint in typing.get_type_hints(record).items())


@cache
def _rule(hint: Any) -> _Rule:
    """The rule for an annotation."""
    parts, kind = typing.get_args(hint), typing.get_origin(hint)
    if hint in (str, bool, int, float):
        words, plain = {
            str: ("a text", _text),
            bool: ("true or false", _flag),
            int: ("a whole number", _whole),
            float: ("a number", _real),
        }[hint]
        return _Rule(words, plain)
    if kind is tuple and parts[-1] is not ...:
        inners = [_rule(part) for part in parts]
        return _Rule(f"({', '.join(each.words for each in inners)})", lambda value: _joined(value, inners))
    if isinstance(hint, type) and is_dataclass(hint):
        return _Rule(f"of type {hint.__name__}", lambda value: _nested(value, hint))
    inner = _rule(parts[0])
    if kind is tuple:
        return _Rule(f"a list, each {inner.words}", lambda value: _several(value, parts[0], inner))
    if kind is frozenset:
        return _Rule(f"a set, each {inner.words}", lambda value: _set(value, parts[0], inner))
    assert kind is types.UnionType and parts[1:] == (types.NoneType,), f"no rule for {hint}"
    return _Rule(f"{inner.words} or None", lambda value: None if value is None else inner.plain(value))


def _text(value: object) -> str:
    if isinstance(value, str):
        return value if type(value) is str else str.__str__(value)
    raise _Misfit(value)


def _flag(value: object) -> bool:
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise _Misfit(value)


def _whole(value: object) -> int:
    if type(value) is not int:
        if not isinstance(value, Integral) or isinstance(value, bool):
            raise _Misfit(value)
        value = int(value)
    if value.bit_length() > _WHOLE_BITS_MAX:
        raise _Misfit(value)
    return value


def _real(value: object) -> float:
    if type(value) is float:
        return value
    if isinstance(value, Integral):
        return _whole(value)
    if isinstance(value, float | np.floating):
        return float(value)
    raise _Misfit(value)


def _several(value: object, hint: Any, inner: _Rule) -> tuple[Any, ...]:
    if type(value) is tuple and hint in (int, str) and set(map(type, value)) <= {hint}:
        return value  # the fast path, for long prompts
    return tuple([inner.plain(part) for part in _parts(value)])


def _joined(value: object, inners: list[_Rule]) -> tuple[Any, ...]:
    parts = _parts(value)
    if len(parts) != len(inners):
        raise _Misfit(value)
    return tuple(inner.plain(part) for inner, part in zip(inners, parts, strict=True))


def _set(value: object, hint: Any, inner: _Rule) -> frozenset[Any]:
    if type(value) is frozenset and set(map(type, value)) <= {hint}:
        return value
    return frozenset(inner.plain(part) for part in (value if isinstance(value, set | frozenset) else _parts(value)))


def _nested(value: object, hint: type) -> Any:
    if not isinstance(value, hint):
        raise _Misfit(value)
    return fitted(value)


def _parts(value: object) -> Sequence[Any]:
    """The items of a sequence; a string counts as one value, not as a sequence."""
    if isinstance(value, np.ndarray) and value.ndim:
        return list(value)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview):
        return value
    raise _Misfit(value)
