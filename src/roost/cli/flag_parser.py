"""Flags: command-line options generated from the fields of the configuration, and back.

A flag exists because a field does; its help, choices and default are the field's. Called by the commands, and by
`cli.generation_flags` for the fields of `Options`.
"""

import types
import typing
from argparse import ArgumentParser, BooleanOptionalAction, Namespace, _ArgumentGroup
from collections.abc import Iterable
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

from roost.config.options import EngineConfig, MemoryConfig, ModelConfig, SchedConfig, SessionConfig, SpecConfig
from roost.errors import ConfigError

Group = TypeVar("Group")

ENGINE_GROUPS: dict[str, type] = {
    "model": ModelConfig,
    "memory": MemoryConfig,
    "sched": SchedConfig,
    "session": SessionConfig,
    "spec": SpecConfig,
}
_METAVARS = {int: "N", float: "X"}


def add_group(parser: ArgumentParser, group: type) -> None:
    """Add a flag for every field of a group of options."""
    section = parser.add_argument_group((group.__doc__ or "").rstrip("."))
    for field in fields(group):
        add_field(section, group, field, _default(field), is_open=True)


def add_field(
    section: _ArgumentGroup, group: type, field: "Field[Any]", default: Any, *, is_open: bool = False
) -> None:
    """Add the flag of one field; without the flag it is `default`, or None if it is open: the field has the default."""
    flag, text, kind = "--" + field.name.replace("_", "-"), field.metadata["help"], kind_of(group, field)
    choices, absent = choices_of(field), None if is_open else default
    if kind is bool:
        switch = section.add_argument(flag, action=BooleanOptionalAction, default=absent)
        switch.help = text if default is None else f"{text} (default: {'on' if default else 'off'})"
    elif isinstance(default, tuple):
        section.add_argument(
            flag, action="append", default=None, help=text, metavar=field.metadata.get("metavar") or field.name.upper()
        )
    else:
        shown = text if default is None else f"{text} (default: {default})"
        bare = field.metadata.get("bare")  # what the flag means without a value
        nargs = None if bare is None else "?"
        metavar = None if choices else _METAVARS.get(kind)
        section.add_argument(
            flag, type=kind, default=absent, help=shown, nargs=nargs, const=bare, choices=choices, metavar=metavar
        )


def add_engine(parser: ArgumentParser) -> None:
    """Add the flags of the engine."""
    for group in ENGINE_GROUPS.values():
        add_group(parser, group)


def group_of(args: Namespace, group: type[Group]) -> Group:
    """A group of options from parsed flags."""
    return group(**given(args, fields(group)))  # type: ignore[arg-type]


def given(args: Namespace, flagged: Iterable["Field[Any]"]) -> dict[str, Any]:
    """The fields that parsed flags give a value, by name."""
    values = {field.name: vars(args)[field.name] for field in flagged}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def engine_of(args: Namespace) -> EngineConfig:
    """The engine's configuration from parsed flags."""
    return EngineConfig(**{name: group_of(args, group) for name, group in ENGINE_GROUPS.items()})


def check_no_engine(args: Namespace) -> None:
    """Refuse flags of the engine together with --url: a running server's engine is already configured."""
    if args.config is not None:
        raise ConfigError("--config is for an engine in this process, and --url names a running server")
    for group in ENGINE_GROUPS.values():
        for field in fields(group):
            if vars(args)[field.name] is not None:
                flag = "--" + field.name.replace("_", "-")
                raise ConfigError(f"{flag} is for an engine in this process, and --url names a running server")


def choices_of(field: "Field[Any]") -> Any:
    """The values that a field may have; None: not a fixed set."""
    choices = field.metadata.get("choices")
    return choices() if callable(choices) else choices  # some follow from a registry


def _plain(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def kind_of(group: type, field: "Field[Any]") -> Any:
    """The type of a flag's value: int for `int | None`, a number or a word for `int | str | None`."""
    hint = typing.get_type_hints(group)[field.name]
    if isinstance(hint, types.UnionType):
        kinds = [each for each in typing.get_args(hint) if each is not types.NoneType]
        return kinds[0] if len(kinds) == 1 else number_or_word
    return hint


def number_or_word(text: str) -> int | str:
    """A flag's value that may be either."""
    try:
        return int(text)
    except ValueError:
        return text


def _default(field: "Field[Any]") -> Any:
    assert field.default is not MISSING, field.name
    return field.default
