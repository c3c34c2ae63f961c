"""Config file: options that the command line leaves out, from a TOML file and from the environment.

Flags are over the file, and the file is over the environment. A key is an option's flag without its dashes; one that no
command has is refused with what is near it. Values are checked here as the parser checks those of flags, by the fields
they are for. Called by the commands that take an engine.
"""

import difflib
import tomllib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Mapping
from dataclasses import Field, dataclass, fields
from pathlib import Path
from typing import Any

from roost.cli.flag_parser import ENGINE_GROUPS, choices_of, kind_of, number_or_word
from roost.environment import option, option_variables, variable_of
from roost.errors import ConfigError
from roost.server.config import ServerConfig

_SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_NAMES: dict[type, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
_EITHER = "a whole number or a word"


def add_config(parser: ArgumentParser) -> None:
    """Add the flag that names the file."""
    text = "a TOML file with options, which flags override; $ROOST_<OPTION> is for what neither says (docs/SERVER.md)"
    parser.add_argument("--config", default=None, metavar="FILE", help=text)


def completed(args: Namespace) -> Namespace:
    """Parsed flags, with values from the file and the environment for those that were not given."""
    known = {option.name: option for option in _options()}
    in_file = {} if args.config is None else _read(Path(args.config), known)
    values = dict(vars(args))
    for name, each in known.items():
        if name in values and values[name] is None:  # a key may be another command's
            values[name] = in_file[name] if name in in_file else each.from_environment()
    return Namespace(**values)


def ignored_variables() -> list[str]:
    """What to say of variables in the environment that look like an option's, but are no option's."""
    known = {variable_of(each.name): each.name for each in _options()}
    hints = {
        variable: _hint(variable.partition("_")[2].lower(), known.values(), lambda near: f"${variable_of(near)}")
        for variable in option_variables()
        if variable not in known
    }
    return [f"${variable} is ignored: there is no such option{hint}" for variable, hint in hints.items()]


def namespace_of(given: Mapping[str, Any]) -> Namespace:
    """Options given by name, as if they were parsed flags; a text may stand for any value."""
    known = {option.name: option for option in _options()}
    values: dict[str, Any] = {}
    for key, value in given.items():
        each = known.get(key.replace("-", "_"))
        values[key] = each.from_text(value, key) if each is not None and isinstance(value, str) else value
    return Namespace(**{**dict.fromkeys(known), **_named(values, known, "")})


@dataclass(frozen=True, slots=True)
class _Option:
    """A field that has a flag."""

    group: type
    field: "Field[Any]"

    @property
    def name(self) -> str:
        """Its name among parsed flags."""
        return self.field.name

    def checked(self, value: Any, place: str, shown: Callable[[Any], str]) -> Any:
        """A value that was found somewhere; `shown` is what may be said of one that has the wrong type."""
        kind = kind_of(self.group, self.field)
        if isinstance(self.field.default, tuple):
            each = value if isinstance(value, list) else [value]
            if not all(isinstance(one, str) for one in each):
                raise ConfigError(f"{place} must be a text or a list of texts, got {shown(value)}")
            return each
        if kind is number_or_word:
            if type(value) not in (int, str):
                raise ConfigError(f"{place} must be {_EITHER}, got {shown(value)}")
        elif not (type(value) is kind or (kind is float and type(value) is int)):
            raise ConfigError(f"{place} must be {_NAMES[kind]}, got {shown(value)}")
        choices = choices_of(self.field)
        if choices is not None and value not in choices:
            raise ConfigError(f"{place} must be one of {', '.join(map(str, choices))}, got {_shown(value)}")
        return value

    def from_environment(self) -> Any:
        """Its value there; None without one."""
        variable, text = option(self.name)
        return self.from_text(text, f"${variable}") if text else None

    def from_text(self, text: str, place: str) -> Any:
        """The value that a text stands for."""
        kind = kind_of(self.group, self.field)
        if kind is bool:
            return self.checked(_SWITCHES.get(text.lower(), text), place, _shown)
        if kind in (int, float, number_or_word):
            try:
                return self.checked(kind(text), place, _shown)
            except ValueError:
                pass
        return self.checked(text, place, _shown)


def _options() -> Iterable[_Option]:
    for group in (ServerConfig, *ENGINE_GROUPS.values()):
        for field in fields(group):
            yield _Option(group, field)


def _read(path: Path, known: dict[str, _Option]) -> dict[str, Any]:
    """The file's values, by the names of their fields."""
    try:
        given = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot be read: {error.strerror}") from error
    except ValueError as error:  # not TOML, or not text
        raise ConfigError(f"--config {path}: is not TOML: {error}") from error
    return _named(given, known, f"--config {path}: ")


def _named(given: Mapping[str, Any], known: Mapping[str, _Option], where: str) -> dict[str, Any]:
    """Checked values, by the names of their fields."""
    found: dict[str, Any] = {}
    for key, value in given.items():
        name, place = key.replace("-", "_"), where + key
        if name not in known:
            hint = _hint(name, known, lambda near: near.replace("_", "-"))
            raise ConfigError(f"{place}: there is no such option{hint}")
        if name in found:
            raise ConfigError(f"{place} is given twice, with - and with _")
        found[name] = known[name].checked(value, place, _type)
    return found


def _hint(name: str, known: Iterable[str], written: Callable[[str], str]) -> str:
    """The option that may be meant, as it is written there; nothing where none is near."""
    near = difflib.get_close_matches(name, known, n=1)
    return f"; did you mean {written(near[0])}?" if near else ""


def _type(value: Any) -> str:
    """A value's type in words: one that stands at the wrong key may be a secret."""
    if isinstance(value, list):
        return f"a list of {', '.join(dict.fromkeys(map(_type, value))) or 'nothing'}"
    return _NAMES.get(type(value)) or {dict: "a table"}.get(type(value), "a date or a time")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:80] + "…"
