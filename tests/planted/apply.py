"""Swaps one source line of a module as it is imported; the product itself holds no switch.

Must run before the module is first imported, so it is used in a process of its own.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

from tests.planted.bug import Bug

ROOT = Path(__file__).parents[2]


def source_path(module: str) -> Path:
    """The file a bug's module lives in."""
    base = ROOT / "src" if module.startswith("roost") else ROOT
    return base / (module.replace(".", "/") + ".py")


def swapped_source(bug: Bug) -> str:
    """The module's source with the bug in it; the line must be there exactly once."""
    lines = source_path(bug.module).read_text().split("\n")
    if lines.count(bug.line) != 1:
        raise LookupError(f"{bug.name}: the line occurs {lines.count(bug.line)} times in {bug.module}: {bug.line!r}")
    lines[lines.index(bug.line)] = bug.replacement
    return "\n".join(lines)


class _Loader(importlib.machinery.SourceFileLoader):
    def __init__(self, bug: Bug) -> None:
        super().__init__(bug.module, str(source_path(bug.module)))
        self._bug = bug

    def get_code(self, fullname: str) -> CodeType | None:
        source = swapped_source(self._bug)
        linecache.cache[self.path] = (len(source), None, source.splitlines(keepends=True), self.path)  # Triton reads it
        return compile(source, self.path, "exec")


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, bug: Bug) -> None:
        self._bug = bug

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._bug.module:
            return None
        return importlib.util.spec_from_file_location(
            fullname, source_path(fullname), loader=_Loader(self._bug), submodule_search_locations=None
        )


def plant(bug: Bug) -> None:
    """From now on the module is imported with the bug."""
    assert bug.module not in sys.modules, f"{bug.module} was imported before the bug could be planted"
    sys.meta_path.insert(0, _Finder(bug))
