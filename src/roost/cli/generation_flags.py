"""Generation flags: the sampling options that `chat` and `generate` share.

A flag exists because a field of `Options` has a help text for one. Defaults are those of a quick try where a command
gives its own, else the library's. Called by those commands.
"""

from argparse import ArgumentParser, Namespace
from dataclasses import Field, fields
from typing import Any

from roost.cli.flag_parser import add_field, given
from roost.front.options import Options


def add_flags(parser: ArgumentParser, *, temperature: float, max_new_tokens: int) -> None:
    """Add them."""
    section = parser.add_argument_group("Sampling")
    defaults = {"temperature": temperature, "max_new_tokens": max_new_tokens}
    for field in _flagged():
        add_field(section, Options, field, defaults.get(field.name, field.default))


def options_of(args: Namespace) -> Options:
    """The options from parsed flags."""
    return Options(**given(args, _flagged()))


def _flagged() -> list["Field[Any]"]:
    return [field for field in fields(Options) if field.metadata.get("flag")]
