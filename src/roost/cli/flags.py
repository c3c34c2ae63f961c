"""Flags: the command line's options, made from the fields of the configuration and back.

A flag exists because a field does; its help and default are the field's. Called by the commands.
"""

import types
import typing
from argparse import ArgumentParser, BooleanOptionalAction, Namespace
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from roost.config import EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SessionConfig, SpecConfig

Group = TypeVar("Group")

_ENGINE_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "memory": MemoryConfig,
    "sched": SchedConfig,
    "session": SessionConfig,
    "spec": SpecConfig,
}


def add_group(parser: ArgumentParser, group: type) -> None:
    """Add a flag for every field of a group of options."""
    section = parser.add_argument_group(group.__doc__)
    for field in fields(group):
        flag, text, kind = "--" + field.name.replace("_", "-"), field.metadata["help"], _kind(group, field)
        default = _default(field)
        if kind is bool:
            section.add_argument(flag, action=BooleanOptionalAction, default=default, help=text)
        elif isinstance(default, tuple):
            section.add_argument(flag, action="append", default=None, help=text, metavar=field.name.upper())
        else:
            shown = text if default is None else f"{text} (default: {default})"
            bare = field.metadata.get("bare")  # what the flag means without a value
            nargs = None if bare is None else "?"
            section.add_argument(flag, type=kind, default=default, help=shown, nargs=nargs, const=bare)


def add_engine(parser: ArgumentParser) -> None:
    """Add the flags of the engine."""
    for group in _ENGINE_GROUPS.values():
        add_group(parser, group)


def group_of(args: Namespace, group: type[Group]) -> Group:
    """A group of options from parsed flags."""
    values = {field.name: vars(args)[field.name] for field in fields(group)}  # type: ignore[arg-type]
    return group(**{name: _plain(value) for name, value in values.items() if value is not None})


def engine_of(args: Namespace) -> EngineConfig:
    """The engine's configuration from parsed flags."""
    return EngineConfig(**{name: group_of(args, group) for name, group in _ENGINE_GROUPS.items()})


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _kind(group: type, field: "Field[Any]") -> Any:
    """What a flag's text becomes: int for `int | None`, a number or the word itself for `int | str | None`."""
    hint = typing.get_type_hints(group)[field.name]
    if isinstance(hint, types.UnionType):
        kinds = [each for each in typing.get_args(hint) if each is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else _number_or_word
    return hint


def _number_or_word(text: str) -> int | str:
    try:
        return int(text)
    except ValueError:
        return text


def _default(field: "Field[Any]") -> Any:
    assert field.default is not MISSING, field.name
    return field.default
