"""`python -m tests.install.lock`: write requirements-dev.lock, the exact versions that this environment has.

Of everything that `.[test]` brings, also indirectly, but for torch, Triton and what only they need: their builds differ
from machine to machine. Reads the metadata of installed packages, and no index.
"""

import platform
import tomllib
from collections.abc import Iterable
from importlib.metadata import requires, version
from itertools import chain
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements-dev.lock"
LEFT_OUT = frozenset({"roost", "torch", "triton"})
NOT_TESTED_WITH = ("ray",)  # an extra that `make test` does without
_HEAD = """\
# Exact versions of the packages that the tests and checks of Roost run with, to reproduce a run on another machine:
#
#     pip install -c requirements-dev.lock -e '.[test]'
#
# Only constraints: pyproject.toml says what is installed and in which ranges, and `make` does not use this file.
# torch and Triton are not in it, since a build for CUDA and one for CPUs need different ones. For Python 3.11 and 3.12.
# Made by `make lock`, with Python {python}; do not edit.
"""


def asked() -> list[Requirement]:
    """What pyproject.toml asks for: to run, and for every extra that tests have."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [needs for extra, needs in project["optional-dependencies"].items() if extra not in NOT_TESTED_WITH]
    return [Requirement(text) for text in chain(project["dependencies"], *extras)]


def closure(first: Iterable[Requirement]) -> dict[str, str]:
    """Names and installed versions of some packages and of all that they need here, in order of the names."""
    found: dict[str, str] = {}
    seen: set[tuple[str, frozenset[str]]] = set()
    left = list(first)
    while left:
        each = left.pop()
        name, extras = canonicalize_name(each.name), frozenset(each.extras)
        if name in LEFT_OUT or (name, extras) in seen:
            continue
        seen.add((name, extras))
        found[name] = version(name)
        needs = [Requirement(text) for text in requires(name) or ()]
        left += [need for need in needs if _applies(need, extras)]
    return dict(sorted(found.items()))


def _applies(need: Requirement, extras: frozenset[str]) -> bool:
    return need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras | {""})


def written() -> str:
    """The file."""
    pins = [f"{name}=={number}" for name, number in closure(asked()).items()]
    return "\n".join([_HEAD.format(python=platform.python_version()), *pins]) + "\n"


if __name__ == "__main__":
    LOCK.write_text(written())
