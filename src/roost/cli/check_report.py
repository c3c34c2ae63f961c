"""Report: what checks have found, as text and as data that a stranger may read.

Every value passes through `Privacy`: the home folder becomes ~, Roost's own ROOST, and the names of user and host are
taken out. Knows no check. Called by `doctor` and the checks.
"""

import getpass
import os
import re
import socket
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import roost
from roost.errors import first_line

_SUFFIX = "_bytes"  # of the names of facts that are sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that is broken, and what to do about it."""

    what: str
    remedy: str


@dataclass(slots=True, kw_only=True)
class ReportSection:
    """What one check has found."""

    title: str
    facts: dict[str, Any] = field(default_factory=dict)  # sizes in bytes have names that end in _bytes
    notes: list[str] = field(default_factory=list)  # what works, but not as well as it could
    problems: list[Problem] = field(default_factory=list)

    def broken(self, what: str, remedy: str) -> None:
        """Add a problem."""
        self.problems.append(Problem(what=what, remedy=remedy))


def checked(title: str, check: Callable[[ReportSection], None]) -> ReportSection:
    """The section that a check fills; a check that fails itself is a problem, and the others go on."""
    section = ReportSection(title=title)
    try:
        check(section)
    except ModuleNotFoundError as error:
        section.broken(f"this cannot be checked: {error.name} is missing", f"pip install {error.name}")
    except Exception as error:  # noqa: BLE001 (what is examined may be broken in any way)
        section.broken(f"this check failed: {type(error).__name__}: {first_line(error)}", "report it, with this output")
    return section


class Privacy:
    """Takes out of values what tells who somebody is and where."""

    def __init__(self, homes: tuple[str, ...], stand_ins: Mapping[str, str]) -> None:
        roots = {home.rstrip("/") for home in homes} - {""}
        rules = {**stand_ins, **dict.fromkeys(roots, "~")}
        self._rules = [(_whole(name), rules[name]) for name in sorted(rules, key=len, reverse=True) if name]

    @classmethod
    def of_this_machine(cls) -> "Privacy":
        """The one for whoever runs this process, here."""
        home, host = os.path.expanduser("~"), socket.gethostname()  # which stays ~ for a user without one
        names = {host: "HOST", host.partition(".")[0]: "HOST"}
        with suppress(KeyError, OSError):  # a user without a name, as in containers
            names[getpass.getuser()] = "USER"
        return cls((home, os.path.realpath(home)), {str(Path(roost.__file__).parent): "ROOST", **names})

    def clean(self, value: Any) -> Any:
        """The same value, without what is private."""
        if isinstance(value, str | Path):
            text = str(value)
            for pattern, stand_in in self._rules:
                text = pattern.sub(stand_in, text)
            return text
        if isinstance(value, Mapping):
            return {self.clean(key): self.clean(each) for key, each in value.items()}
        return [self.clean(each) for each in value] if isinstance(value, list | tuple) else value

    def cleaned(self, section: ReportSection) -> ReportSection:
        """A section that may be shown to anybody."""
        facts = {name: self.clean(value) for name, value in section.facts.items()}
        problems = [Problem(what=self.clean(each.what), remedy=self.clean(each.remedy)) for each in section.problems]
        return ReportSection(title=section.title, facts=facts, notes=self.clean(section.notes), problems=problems)


def _whole(name: str) -> re.Pattern[str]:
    """A name where it is not part of a longer word."""
    return re.compile(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])")


def as_text(section: ReportSection) -> str:
    """What a section says, as lines."""
    lines = [f"  {_label(name):<18} {_shown(name, value)}" for name, value in section.facts.items()]
    lines += [f"  note: {note}" for note in section.notes]
    for problem in section.problems:
        lines += [f"  PROBLEM: {problem.what}", f"    what to do: {problem.remedy}"]
    return "\n".join(lines) + "\n"


def as_data(sections: list[ReportSection]) -> dict[str, Any]:
    """The same as data."""
    return {
        "ok": not any(section.problems for section in sections),
        "sections": {section.title: section.facts for section in sections},
        "notes": [note for section in sections for note in section.notes],
        "problems": [asdict(problem) for section in sections for problem in section.problems],
    }


def _label(name: str) -> str:
    return name.removesuffix(_SUFFIX).replace("_", " ") if name.islower() else name


def _shown(name: str, value: Any) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_shown(name, each)}" for key, each in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(_shown(name, each) for each in value) or "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith(_SUFFIX) and isinstance(value, int):
        return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"
    return "-" if value is None else str(value)
